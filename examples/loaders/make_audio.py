"""Writes wavs of made-up speech of different lengths, one file each, and the same in tar shards.

    python examples/loaders/make_audio.py --out audio --clips 320

A clip is a gliding tone with harmonics, and noise: one channel, 16 kHz, 16 bits. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import random
import tarfile
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16_000
SECONDS = (1.0, 8.0)
SHARDS = 16  # each worker reads its own: as many workers at most


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the files and says where."""
    parser = argparse.ArgumentParser(
        description="Writes wavs of made-up speech, one file each, and in tar shards."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("audio"),
        help="the folder; made where it is missing",
    )
    parser.add_argument("--clips", type=int, default=320, help="how many")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=SECONDS,
        help="the shortest and the longest clip",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    seconds = make_audio(options.out, options.clips, options.seconds, options.seed)
    print(
        f"{options.clips} clips, {seconds:.0f} s in all, in {options.out / 'wavs'} and {options.out / 'shards'}"
    )


def make_audio(
    folder: Path, clips: int, seconds: Sequence[float] = SECONDS, seed: int = 0
) -> float:
    """Writes `wavs/clip-000000.wav` and so on, and `shards/shard-000.tar` and so on; returns the sum of the lengths.

    Args:
        folder: Where to; made where it is missing.
        clips: How many.
        seconds: The shortest and the longest clip.
        seed: Of lengths and sounds.
    """
    for name in ("wavs", "shards"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for old in (folder / name).iterdir():
            old.unlink()
    chance, total = random.Random(seed), 0.0
    paths = [folder / "wavs" / f"clip-{number:06}.wav" for number in range(clips)]
    for number, path in enumerate(paths):
        length = round(chance.uniform(*seconds) * SAMPLE_RATE)
        write(path, clip(np.random.default_rng((seed, number)), length))
        total += length / SAMPLE_RATE
    chance.shuffle(paths)
    for shard in range(min(SHARDS, clips)):
        with tarfile.open(folder / "shards" / f"shard-{shard:03}.tar", "w") as tar:
            for path in paths[shard::SHARDS]:
                tar.add(path, path.name)
    return total


def clip(chance: np.random.Generator, length: int) -> np.ndarray:
    """A gliding tone with harmonics, and noise, as 16-bit samples."""
    time = np.arange(length) / SAMPLE_RATE
    pitch = chance.uniform(80, 250) * (
        1 + 0.3 * np.sin(2 * np.pi * chance.uniform(0.2, 1) * time)
    )
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    tone = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 9))
    loudness = 0.5 + 0.5 * np.sin(2 * np.pi * 3 * time)  # syllables
    sound = 0.15 * loudness * tone + 0.01 * chance.standard_normal(length)
    return np.clip(np.round(sound * 2**15), -(2**15), 2**15 - 1).astype("<i2")


def write(path: Path, samples: np.ndarray) -> None:
    """Writes a wav of one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.tobytes())


if __name__ == "__main__":
    main()
