"""A made `training.jsonl`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from batchtune.results import RecordedBatch, TrainingStart, TrainingStep, meta_of


def start(*, per_unit: float = 1.0, rank: int = 0) -> TrainingStart:
    return TrainingStart(
        meta=meta_of(TrainingStart),
        device="made",
        per_unit=per_unit,
        target_per_unit=1.0,
        rank=rank,
    )


def step(
    *batches: tuple[int, int] | tuple[int, int, int],
    seconds: float | None = 0.1,
    peak_bytes: int | None = 10**6,
    oom: str | None = None,
    rank: int = 0,
    warm_up: bool = False,
) -> TrainingStep:
    """A step over batches of (batch size, length) or (batch size, length, target length)."""
    recorded = [
        RecordedBatch(
            batch_size=batch[0],
            length=batch[1],
            target_length=batch[2] if len(batch) > 2 else None,
        )
        for batch in batches
    ]
    return TrainingStep(
        rank=rank,
        batches=recorded,
        seconds=None if oom else seconds,
        peak_bytes=None if oom else peak_bytes,
        warm_up=warm_up,
        oom=oom,
    )


def write(folder: Path, lines: Sequence[TrainingStart | TrainingStep]) -> Path:
    path = folder / "training.jsonl"
    folder.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path
