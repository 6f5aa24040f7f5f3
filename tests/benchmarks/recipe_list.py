"""The recipes of `recipes.py`: what is trained, on which lengths, under which limit, and who batches."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from benchmarks import recipe_peers as peers
from benchmarks import recipe_summary
from benchmarks.recipe_peers import Contender
from public_lengths import code, folder, sharegpt
from real_lengths import COMMON_VOICE, librispeech_seconds

# A chat is cut at 4,096 tokens and a file of code at 8,192; all are then this much shorter, as the models are small.
CHAT_CUT, CHAT_SCALE = 4096, 32
CODE_CUT, CODE_SCALE, BYTES_PER_TOKEN = 8192, 32, 4


class NoLengths(Exception):
    """The lengths of a recipe are not here."""


@dataclass(frozen=True)
class Recipe:
    """A training as people run it.

    Attributes:
        name: On the command line.
        data: Where the lengths come from, in words.
        training: The class in `recipe_models.py`.
        lengths: Loads all lengths, and target lengths if there are any.
        unit: Of the lengths.
        count: Examples of an epoch, drawn at random.
        contenders: Who batches; the first is what the recipe ships.
        accumulate: Micro-batches of an optimizer step, as shipped.
        options: Of the training; all have two layers unless told otherwise.
        on_cuda: What takes the place of `count` and `options` on a GPU.
    """

    name: str
    data: str
    training: str
    lengths: Callable
    unit: str
    count: int
    contenders: tuple[Contender, ...]
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=lambda: {"layers": 2})
    on_cuda: dict[str, Any] = field(default_factory=dict)
    streamed: bool = False

    @property
    def is_packed(self):
        """Whether batches are packed rows."""
        return self.training.startswith("Packed")


def librispeech():
    """Seconds of LibriSpeech's train-clean-100."""
    return librispeech_seconds(), None


def transcribed_librispeech():
    """Seconds and characters of LibriSpeech's dev-clean."""
    data = shared_data() / "librispeech-wav2vec-tsv"
    samples = np.loadtxt(data / "valid.tsv", skiprows=1, delimiter="\t", usecols=1)
    with (data / "valid.ltr").open() as lines:
        characters = np.array([float(len(line.split())) for line in lines])
    return samples / 16_000, characters


def common_voice():
    """Seconds of Common Voice's Indonesian clips."""
    with gzip.open(COMMON_VOICE, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    return np.array([float(row["duration[ms]"]) for row in rows]) / 1000, None


def chats():
    """Tokens of ShareGPT's chats."""
    tokens = np.minimum(sharegpt(shared_data()), CHAT_CUT) // CHAT_SCALE
    return np.maximum(tokens, 2).astype(float), None


def code_files():
    """Tokens of files of code, by their bytes."""
    tokens = np.minimum(code(shared_data()) / BYTES_PER_TOKEN, CODE_CUT) // CODE_SCALE
    return np.maximum(tokens, 4).astype(float), None


def shared_data():
    """Return the folder of the public lengths."""
    data = folder()
    if data is None:
        raise NoLengths("its public lengths are not here")
    return data


ACCELERATE = Contender("batch size by accelerate", peers.accelerate_fixed, "accelerate")
GROUPED = Contender("group_by_length", peers.grouped_by_length, "transformers")
SPEECHBRAIN = Contender(
    "SpeechBrain's sampler, tuned", peers.tuned_speechbrain, "speechbrain"
)
LHOTSE = Contender("Lhotse, OOMptimizer's sizes", peers.lhotse_sized, "lhotse")
NEMO = Contender(
    "NeMo's 2-D buckets, OOMptimizer's sizes", peers.nemo_two_dimensional, "nemo"
)
REBALANCE = Contender(
    "batch_rebalance", peers.rebalanced, "transformers", keeps_accumulation=True
)
ODB = Contender("online-dynamic-batching, tuned", peers.online_dynamic_batching, "odb")
DEFAULT = Contender("batchtune", peers.by_default, kind="batchtune")
FILLED = Contender(recipe_summary.FILLED, peers.filled, kind="batchtune")
RECUT = Contender(recipe_summary.RECUT, peers.recut, kind="batchtune")
OURS = (DEFAULT, FILLED)
OURS_RECUT = (DEFAULT, RECUT, FILLED)
CHAT_ROW = CHAT_CUT // CHAT_SCALE
SPEECH_ON_CUDA = {
    "count": 8000,
    "options": {"dim": 512, "layers": 12},
}
TEXT_ON_CUDA = {"count": 8000, "options": {"dim": 512, "layers": 8}}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="ctc",
            data="Common Voice",
            training="CtcTraining",
            lengths=common_voice,
            unit="s",
            count=1920,
            on_cuda=SPEECH_ON_CUDA,
            # transformers, examples/pytorch/speech-recognition/README.md, on one GPU: per_device_train_batch_size 8,
            # gradient_accumulation_steps 8.
            contenders=(
                peers.shipped_fixed(8),
                GROUPED,
                SPEECHBRAIN,
                REBALANCE,
                *OURS_RECUT,
            ),
            accumulate=8,
        ),
        Recipe(
            name="ctc-bucketed",
            data="LibriSpeech",
            training="CtcTraining",
            lengths=librispeech,
            unit="s",
            count=500,
            on_cuda=SPEECH_ON_CUDA,
            # speechbrain, recipes/LibriSpeech/ASR/CTC/hparams/conformer_large.yaml: max_batch_length_train 850,
            # num_bucket 200, max_batch_ex 128. It reshuffles here in each epoch, as all others do.
            contenders=(
                peers.shipped_speechbrain(850, 200, 128),
                SPEECHBRAIN,
                LHOTSE,
                *OURS,
            ),
        ),
        Recipe(
            name="aed",
            data="LibriSpeech, with transcripts",
            training="EncoderDecoderTraining",
            lengths=transcribed_librispeech,
            unit="s",
            count=512,
            options={"layers": 1},
            on_cuda=SPEECH_ON_CUDA,
            # The same, sequence to sequence on LibriSpeech.
            contenders=(
                peers.shipped_fixed(8),
                GROUPED,
                NEMO,
                REBALANCE,
                *OURS_RECUT,
            ),
            accumulate=8,
        ),
        Recipe(
            name="sft",
            data="ShareGPT",
            training="ChatTraining",
            lengths=chats,
            unit="tokens",
            count=768,
            on_cuda=TEXT_ON_CUDA,
            # As chats are commonly trained on one GPU: per_device_train_batch_size 4, gradient_accumulation_steps 16.
            contenders=(
                peers.shipped_fixed(4),
                ACCELERATE,
                GROUPED,
                ODB,
                REBALANCE,
                *OURS_RECUT,
            ),
            accumulate=16,
        ),
        Recipe(
            name="sft-packed",
            data="ShareGPT",
            training="PackedChatTraining",
            lengths=chats,
            unit="tokens",
            count=768,
            on_cuda=TEXT_ON_CUDA,
            # trl/scripts/sft.py: packing, per_device_train_batch_size 2, gradient_accumulation_steps 8.
            contenders=(
                peers.shipped_trl(2, CHAT_ROW),
                Contender("TRL's packing, same budget", peers.tuned_trl, "trl"),
                Contender(
                    "axolotl's multipack, same budget",
                    peers.tuned_axolotl,
                    "axolotl",
                ),
                *OURS,
            ),
            accumulate=8,
        ),
        Recipe(
            name="mlm",
            data="files of code",
            training="MaskedTraining",
            lengths=code_files,
            unit="tokens",
            count=896,
            on_cuda=TEXT_ON_CUDA,
            # transformers, examples/pytorch/language-modeling/run_mlm.py: per_device_train_batch_size 8; here what
            # 8 GPUs train on, one accumulates.
            contenders=(
                peers.shipped_fixed(8),
                GROUPED,
                SPEECHBRAIN,
                LHOTSE,
                REBALANCE,
                *OURS_RECUT,
            ),
            accumulate=8,
        ),
        Recipe(
            name="stream",
            data="Common Voice",
            training="CtcTraining",
            lengths=common_voice,
            unit="s",
            count=1000,
            on_cuda=SPEECH_ON_CUDA,
            streamed=True,
            # webdataset, filters.batched: batchsize 20.
            contenders=(
                peers.shipped_stream(20),
                Contender(
                    ".batched() by accelerate",
                    peers.accelerate_stream,
                    "webdataset",
                ),
                Contender(
                    "dynamic_bucketed_batch, tuned",
                    peers.speechbrain_stream,
                    "speechbrain",
                ),
                *(replace(one, needs="webdataset") for one in OURS),
            ),
        ),
    )
}
