"""A made `training.jsonl`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from batchtune.results import BatchShape, TrainingStart, TrainingStep, meta_of

START = TrainingStart(meta=meta_of(TrainingStart), device="made")


def step(
    *batches: tuple[int, float] | tuple[int, float, float],
    seconds: float | None = 0.1,
    peak_bytes: int | None = 10**6,
    oom: str | None = None,
    rank: int = 0,
    recording: str = "",
) -> TrainingStep:
    """A step over batches of (batch size, length) or (batch size, length, target length)."""
    return TrainingStep(
        rank=rank,
        recording=recording,
        batches=[BatchShape(*batch) for batch in batches],
        seconds=None if oom else seconds,
        peak_bytes=None if oom else peak_bytes,
        oom=oom,
    )


def write(folder: Path, lines: Sequence[TrainingStart | TrainingStep]) -> Path:
    path = folder / "training.jsonl"
    folder.mkdir(exist_ok=True)
    path.write_bytes(b"".join(b"\n" + msgspec.json.encode(line) for line in lines))
    return path
