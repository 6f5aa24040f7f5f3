"""Writes tar shards of made-up speech as WebDataset reads them, with nothing but Python's standard library.

A sample is three members with one key: `wav` (noise of one to five seconds unless told otherwise, 16 kHz, 16 bits),
`txt` (a sentence, the longer the audio the longer) and `json` (the duration and the sentence). The same arguments give
the same bytes.

    python examples/shards/make_shards.py --shards 20 --wavs 500 --out shards
    batchtune sweep-buckets 'shards/shard-{000000..000019}.tar' --max-batch-length 60

The lengths are read from the headers of the wavs; nothing is decoded. A target, or another length, comes from any
other member:

    batchtune sweep-buckets shards --target-key txt --max-batch-length 60
    batchtune sweep-buckets shards --length-key json.duration --max-batch-length 60
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
import wave
from collections.abc import Sequence
from pathlib import Path

SAMPLE_RATE = 16_000
SECONDS = (1.0, 5.0)
WORDS_PER_SECOND = 2.5
WORDS = "a bell rings over the river and nobody hears how cold the morning has become".split()


def main() -> None:
    """Writes the shards and says where."""
    parser = argparse.ArgumentParser(description="Writes tar shards of made-up speech.")
    parser.add_argument("--shards", type=int, default=4, help="how many")
    parser.add_argument("--wavs", type=int, default=100, help="how many in each")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("shards"),
        help="the folder; made where it is missing",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=SECONDS,
        help="the shortest and the longest wav",
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    paths = make_shards(
        arguments.out,
        arguments.shards,
        arguments.wavs,
        arguments.seconds,
        arguments.seed,
    )
    print(f"{len(paths)} shards of {arguments.wavs} samples in {arguments.out}")


def make_shards(
    folder: Path,
    shards: int,
    wavs: int,
    seconds: Sequence[float] = SECONDS,
    seed: int = 1,
) -> list[Path]:
    """Writes `shard-000000.tar` and so on.

    Args:
        folder: Where to; made where it is missing.
        shards: How many.
        wavs: Samples in each.
        seconds: The shortest and the longest wav.
        seed: Of lengths, noise and sentences.

    Returns:
        The files, in order.
    """
    chance = random.Random(seed)
    # Twice as long as is needed, 2 bytes each.
    noise = chance.randbytes(2 * 2 * round(seconds[1] * SAMPLE_RATE))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"shard-{number:06}.tar" for number in range(shards)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for index in range(number * wavs, (number + 1) * wavs):
                for suffix, content in sample(chance, noise, seconds).items():
                    member = tarfile.TarInfo(f"utt{index:08}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return paths


def sample(
    chance: random.Random, noise: bytes, between: Sequence[float]
) -> dict[str, bytes]:
    """The members of one sample, cut from the noise: suffix → content."""
    num_samples = round(chance.uniform(*between) * SAMPLE_RATE)
    start = 2 * chance.randrange(len(noise) // 2 - num_samples)
    seconds = num_samples / SAMPLE_RATE
    text = " ".join(chance.choices(WORDS, k=max(1, round(seconds * WORDS_PER_SECOND))))
    return {
        "wav": wav(noise[start : start + 2 * num_samples]),
        "txt": text.encode(),
        "json": json.dumps({"duration": seconds, "text": text}).encode(),
    }


def wav(pcm: bytes) -> bytes:
    """A mono file of 16 bits with these samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(pcm)
    return file.getvalue()


if __name__ == "__main__":
    main()
