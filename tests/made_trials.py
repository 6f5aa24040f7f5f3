"""Trials made by hand, and the replies that carry them."""

from __future__ import annotations

from typing import Any

from batchtune.probe.protocol import Ran
from batchtune.results import Trial
from batchtune.shapes import BatchShape


def made_trial(shape: BatchShape, outcome: str = "ok", **facts: Any) -> Trial:
    """A trial that knows nothing but what is said."""
    made: dict[str, Any] = {
        "index": 0,
        "steps": 1 if outcome == "ok" else 0,
        "step_seconds": None,
        "peak_bytes": None,
        "reserved_bytes": None,
        "alloc_retries": None,
        "error": None,
        "elapsed_seconds": 0.0,
    }
    return Trial(
        batch_size=shape.batch_size,
        length=shape.length,
        target_length=shape.target_length,
        outcome=outcome,
        **{**made, **facts},
    )


def ran(shape: BatchShape, outcome: str = "ok", traceback: str | None = None, **facts: Any) -> Ran:
    """The reply to a trial, or a step."""
    return Ran(
        trial=made_trial(shape, outcome, **facts), stage=None if outcome == "ok" else "step", traceback=traceback
    )
