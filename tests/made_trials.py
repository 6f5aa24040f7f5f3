"""Trials made by hand, and the replies that carry them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from batchtune.probe.requests import Ran
from batchtune.results import BatchShape, Outcome, Trial


def made_trial(shape: BatchShape, outcome: Outcome = "ok", **facts: Any) -> Trial:
    """A trial that knows nothing but what is said."""
    return Trial.of(shape, outcome, **{"steps": int(outcome == "ok"), **facts})


def ran(
    shape: BatchShape,
    outcome: Outcome = "ok",
    traceback: str | None = None,
    **facts: Any,
) -> Ran:
    """The reply to a trial, or a step."""
    return Ran(
        trial=made_trial(shape, outcome, **facts),
        stage=None if outcome == "ok" else "step",
        traceback=traceback,
    )


def altered(reply: Ran, **facts: Any) -> Ran:
    """The same reply with other facts in its trial."""
    return replace(reply, trial=replace(reply.trial, **facts))
