"""Examples and collate functions as training scripts have them, of random lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from real_speechbrain import load_speechbrain
from torch.nn.utils.rnn import pad_sequence


class Made:
    """Makes examples of one kind after another, the same ones for one seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def between(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def speech(self) -> dict[str, Any]:
        samples = self.between(8000, 48000)
        return {
            "id": "utterance",
            "sig": torch.rand(samples) + 0.1,
            "tokens": torch.randint(3, 30, (self.between(5, 30),)),
            "duration": samples / 16000,
            "spk": 1,
        }

    def text(self) -> dict[str, Any]:
        tokens = self.random.integers(3, 100, self.between(10, 200)).tolist()
        return {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            "labels": [-100] * 4 + tokens[4:],
        }

    def whisper(self) -> dict[str, Any]:
        labels = self.random.integers(3, 50, self.between(5, 60)).tolist()
        return {"input_features": torch.rand(8, 30), "labels": labels}

    def wav2vec2(self) -> dict[str, Any]:
        samples = self.between(8000, 48000)
        return {
            "input_values": self.random.random(samples).astype("float32") + 0.1,
            "labels": self.random.integers(3, 30, self.between(5, 30)).tolist(),
        }

    def features(self) -> tuple[Any, ...]:
        frames = torch.rand(self.between(200, 1200), 10) + 0.1
        return frames, torch.randint(1, 30, (self.between(5, 40),)), "utterance"

    def graph(self) -> dict[str, Any]:
        nodes = self.between(5, 40)
        edges = torch.randint(0, nodes, (2, self.between(20, 200)))
        return {"x": torch.rand(nodes, 8), "edge_index": edges}


def padded(sequences: list[Any], value: float = 0) -> torch.Tensor:
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def column(examples: list[Any], key: Any) -> list[Any]:
    """Takes a key out of all examples, as collate functions of Transformers do."""
    if isinstance(examples[0], dict):
        return [example.pop(key) for example in examples]
    return [example[key] for example in examples]


def speechbrain(examples: list[Any]) -> Any:
    return load_speechbrain()[2].PaddedBatch(examples)


def causal(examples: list[Any]) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(
        {
            "input_ids": padded(column(examples, "input_ids")),
            "attention_mask": padded(column(examples, "attention_mask")),
            "labels": padded(column(examples, "labels"), -100),
        }
    )


def to_multiple_of_8(examples: list[Any]) -> Any:
    ids = padded(column(examples, "input_ids"))
    return {"input_ids": torch.nn.functional.pad(ids, (0, -ids.shape[1] % 8))}


def sequence_to_sequence(examples: list[Any]) -> dict[str, Any]:
    features = torch.stack(column(examples, "input_features"))
    return {
        "input_features": features,
        "labels": padded(column(examples, "labels"), -100),
    }


def waves(examples: list[Any]) -> dict[str, Any]:
    values = column(examples, "input_values")
    masks = [torch.ones(len(value), dtype=torch.long) for value in values]
    return {
        "input_values": padded(values),
        "attention_mask": padded(masks),
        "labels": padded(column(examples, "labels"), -100),
    }


def subsampled(examples: list[Any]) -> tuple[Any, ...]:
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


def packed(examples: list[Any]) -> dict[str, Any]:
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


def ragged(examples: list[Any]) -> dict[str, Any]:
    return {"xs": column(examples, "sig"), "ys": column(examples, "tokens")}


@dataclass
class Graphs:
    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor


def graphs(examples: list[Any]) -> Graphs:
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
    kind: str  # a method of Made
    collate: Callable[[list[Any]], Any]
    length: int
    target_length: int | None
    length_key: str | None = None

    def equal(self, count: int) -> list[Any]:
        """Makes examples of exactly these lengths, as Made makes them of random ones."""
        target_length = self.target_length or 0
        return [_exactly(self.kind, self.length, target_length) for _ in range(count)]


def _exactly(kind: str, length: int, target_length: int) -> Any:
    ones = torch.ones(length)
    target = torch.ones(target_length, dtype=torch.long)
    if kind == "speech":
        seconds = length / 16000
        return {
            "id": "u",
            "sig": ones,
            "tokens": target,
            "duration": seconds,
            "spk": 1,
        }
    if kind == "text":
        names = ("input_ids", "attention_mask", "labels")
        return {name: [1] * length for name in names}
    if kind == "whisper":
        return {"input_features": torch.rand(8, 30), "labels": [1] * length}
    if kind == "wav2vec2":
        return {"input_values": ones.numpy(), "labels": target.tolist()}
    if kind == "features":
        return torch.ones(length, 10), target, "utterance"
    edges = torch.zeros(2, target_length, dtype=torch.long)
    return {"x": torch.rand(length, 8), "edge_index": edges}


CASES = {
    "padded batch": Case("speech", speechbrain, 30000, 20),
    "causal language model": Case("text", causal, 150, None),
    "fixed input": Case("whisper", sequence_to_sequence, 40, None),
    "waves": Case("wav2vec2", waves, 30000, 20),
    "subsampled": Case("features", subsampled, 901, 21),
    "packed": Case("text", packed, 150, None),
    "ragged": Case("speech", ragged, 30000, 20),
    "graphs": Case("graph", graphs, 30, 100, length_key="x"),
}


def random_examples(case: Case, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    made = Made(seed)
    return [getattr(made, case.kind)() for _ in range(60)]
