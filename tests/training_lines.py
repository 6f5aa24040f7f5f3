"""A made `training.jsonl`."""

import msgspec

from batchtune.results import BatchShape, TrainingStart, TrainingStep, meta_of

START = TrainingStart(meta=meta_of(TrainingStart), device="made")


def step(
    *batches,
    seconds=0.1,
    peak_bytes=10**6,
    oom=None,
    rank=0,
    recording="",
):
    """A step over batches of (batch size, length) or (batch size, length, target length)."""
    return TrainingStep(
        rank=rank,
        recording=recording,
        batches=[BatchShape(*batch) for batch in batches],
        seconds=None if oom else seconds,
        peak_bytes=None if oom else peak_bytes,
        oom=oom,
    )


def write(folder, lines):
    path = folder / "training.jsonl"
    folder.mkdir(exist_ok=True)
    path.write_bytes(b"".join(b"\n" + msgspec.json.encode(line) for line in lines))
    return path
