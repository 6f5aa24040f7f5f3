"""Examples and collate functions as training scripts have them, of random lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from real_speechbrain import load_speechbrain
from torch.nn.utils.rnn import pad_sequence


def speech(samples, tokens):
    return {
        "id": "utterance",
        "sig": torch.rand(samples) + 0.1,
        "tokens": torch.randint(3, 30, (tokens,)),
        "duration": samples / 16000,
        "spk": 1,
    }


def text(tokens, _):
    ids = torch.randint(3, 100, (tokens,)).tolist()
    return {
        "input_ids": ids,
        "attention_mask": [1] * tokens,
        "labels": [-100] * 4 + ids[4:],
    }


def whisper(tokens, _):
    labels = torch.randint(3, 50, (tokens,)).tolist()
    return {"input_features": torch.rand(8, 30), "labels": labels}


def features(frames, tokens):
    target = torch.randint(1, 30, (tokens,))
    return torch.rand(frames, 10) + 0.1, target, "utterance"


def graph(nodes, edges):
    ends = torch.randint(0, nodes, (2, edges))
    return {"x": torch.rand(nodes, 8), "edge_index": ends}


def padded(sequences, value=0):
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def column(examples, key):
    """Takes a key out of all examples, as collate functions of Transformers do."""
    if isinstance(examples[0], dict):
        return [example.pop(key) for example in examples]
    return [example[key] for example in examples]


def speechbrain(examples):
    return load_speechbrain()[2].PaddedBatch(examples)


def causal(examples):
    from transformers import BatchEncoding

    return BatchEncoding(
        {
            "input_ids": padded(column(examples, "input_ids")),
            "attention_mask": padded(column(examples, "attention_mask")),
            "labels": padded(column(examples, "labels"), -100),
        }
    )


def to_multiple_of_8(examples):
    ids = padded(column(examples, "input_ids"))
    return {"input_ids": torch.nn.functional.pad(ids, (0, -ids.shape[1] % 8))}


def sequence_to_sequence(examples):
    features = torch.stack(column(examples, "input_features"))
    return {
        "input_features": features,
        "labels": padded(column(examples, "labels"), -100),
    }


def subsampled(examples):
    x = column(examples, 0)
    y = column(examples, 1)
    x_lengths = torch.tensor([len(one) for one in x])
    y_lengths = torch.tensor([len(one) for one in y])
    mask = torch.zeros(len(x), -(-int(x_lengths.max()) // 4))
    return (
        padded(x),
        x_lengths,
        padded(y),
        y_lengths,
        x_lengths // 4,
        mask,
        column(examples, 2),
    )


def packed(examples):
    rows = column(examples, "input_ids")
    lengths = [len(row) for row in rows]
    ids = torch.cat([torch.tensor(row) for row in rows])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": positions[None],
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
    }


def ragged(examples):
    return {"xs": column(examples, "sig"), "ys": column(examples, "tokens")}


@dataclass
class Graphs:
    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor


def graphs(examples):
    nodes = column(examples, "x")
    shifts = np.cumsum([0] + [len(x) for x in nodes])
    edges = column(examples, "edge_index")
    numbers = [torch.full((len(x),), number) for number, x in enumerate(nodes)]
    return Graphs(
        torch.cat(nodes),
        torch.cat([edge + shifts[number] for number, edge in enumerate(edges)], 1),
        torch.cat(numbers),
    )


class Case(NamedTuple):
    """Examples of random lengths, each a range, and the lengths of a batch that is made."""

    example: Callable[[int, int], Any]
    collate: Callable[[list[Any]], Any]
    lengths: tuple[int, int]
    targets: tuple[int, int]
    length: int
    target_length: int | None
    length_key: str | None = None

    def random(self, seed):
        """Makes 60 examples."""
        torch.manual_seed(seed)
        drawn = np.random.default_rng(seed)
        lengths = drawn.integers(*self.lengths, 60).tolist()
        targets = drawn.integers(*self.targets, 60).tolist()
        return list(map(self.example, lengths, targets))

    def equal(self, count):
        """Makes examples of exactly these lengths."""
        return [
            self.example(self.length, self.target_length or 0) for _ in range(count)
        ]


SAMPLES = (8000, 48000)
WORDS = (5, 30)
CASES = {
    "padded batch": Case(speech, speechbrain, SAMPLES, WORDS, 30000, 20),
    "causal language model": Case(text, causal, (10, 200), WORDS, 150, None),
    "fixed input": Case(whisper, sequence_to_sequence, (5, 60), WORDS, 40, None),
    "subsampled": Case(features, subsampled, (200, 1200), (5, 40), 901, 21),
    "packed": Case(text, packed, (10, 200), WORDS, 150, None),
    "ragged": Case(speech, ragged, SAMPLES, WORDS, 30000, 20),
    "graphs": Case(graph, graphs, (5, 40), (20, 200), 30, 100, length_key="x"),
}
