"""Wavs → augmented log-mel spectrograms, by a torch Dataset.

    python examples/loaders/make_audio.py --out audio
    batchtune tune-loader examples/loaders/torch_loader.py:make_dataset --set folder=audio/wavs --step-ms 50

With batches of at most 60 s, in buckets by length:

    batchtune sweep-buckets audio/wavs --max-batch-length 60
    batchtune tune-loader examples/loaders/torch_loader.py:make_dataset --set batch_size=0 --step-ms 50

The features are in windows of 25 ms every 10 ms, with 80 mels.
"""

from __future__ import annotations

import io
import math
import wave
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SAMPLE_RATE = 16_000
WINDOW = 400  # samples: 25 ms
FFT = 512  # a power of 2, for which alone DALI is fast on the CPU
HOP = 160  # 10 ms
MELS = 80
FLOOR = 1e-10  # of a mel's power: -100 dB
EPSILON = 1e-5  # added to a variance before it divides
GAINS_DB = (-6.0, 6.0)
NOISE = 0.005


def make_dataset(folder: str = "audio/wavs", batch_size: int = 16) -> dict[str, Any]:
    """The arguments of a DataLoader; with `batch_size=0` for the batches that a run folder's `sampler.yaml` says."""
    clips = Clips(folder)
    arguments = {"dataset": clips, "collate_fn": padded}
    if batch_size:
        return {**arguments, "batch_size": batch_size, "shuffle": True}
    return {**arguments, "lengths": [seconds_of(path) for path in clips.paths]}


class Clips(Dataset[torch.Tensor]):
    """The features of each wav in a folder."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*.wav"))
        if not self.paths:
            raise FileNotFoundError(
                f"no wavs in {folder}: python examples/loaders/make_audio.py makes some"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return log_mel(augmented(decoded(self.paths[index].read_bytes())))


def seconds_of(path: Path) -> float:
    """The length of a wav, from its header."""
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def decoded(content: bytes) -> torch.Tensor:
    """The samples of a wav of 16 bits, from -1 to 1."""
    with wave.open(io.BytesIO(content)) as file:
        samples = bytearray(file.readframes(file.getnframes()))
    return torch.frombuffer(samples, dtype=torch.int16) / 2**15


def augmented(samples: torch.Tensor) -> torch.Tensor:
    """Changes the volume and adds noise. Each worker of a DataLoader draws from its own seed, another in each epoch."""
    low, high = GAINS_DB
    gain = 10 ** ((low + (high - low) * torch.rand(())) / 20)
    return samples * gain + NOISE * torch.randn_like(samples)


def log_mel(samples: torch.Tensor) -> torch.Tensor:
    """Frames × mels in dB, each mel with mean 0 and variance 1 over the clip."""
    spectrum = torch.stft(samples, FFT, HOP, WINDOW, window(), return_complex=True)
    mels = mel_filters() @ spectrum.abs().square()
    decibels = 10 * mels.clamp(min=FLOOR).log10()
    variance, mean = torch.var_mean(decibels, dim=1, correction=0, keepdim=True)
    return ((decibels - mean) / (variance + EPSILON).sqrt()).T.contiguous()


def padded(features: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch: clips × frames × mels, and the frames of each clip that are no padding."""
    frames = torch.tensor([len(one) for one in features])
    return {"log_mel": pad_sequence(features, batch_first=True), "frames": frames}


@cache
def window() -> torch.Tensor:
    """A Hann window."""
    return torch.hann_window(WINDOW)


@cache
def mel_filters() -> torch.Tensor:
    """Triangles of area 1, evenly spaced in mels after Slaney: mels × frequencies."""
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)
    top = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000) / math.log(6.4)
    mels = torch.linspace(0, top, MELS + 2)
    # Linear up to 1 kHz, which is 15 mels.
    edges = torch.where(
        mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) * math.log(6.4) / 27)
    )[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (
        (frequencies - low) / (centre - low),
        (high - frequencies) / (high - centre),
    )
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)
