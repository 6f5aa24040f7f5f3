"""Trials made by hand, and the replies that carry them."""

from msgspec.structs import replace

from batchtune.probe.requests import Ran
from batchtune.results import Trial


def made_trial(shape, outcome="ok", **facts):
    """A trial that knows nothing but what is said."""
    return Trial.of(shape, outcome, **{"steps": int(outcome == "ok"), **facts})


def ran(
    shape,
    outcome="ok",
    traceback=None,
    **facts,
):
    """The reply to a trial, or a step."""
    return Ran(
        trial=made_trial(shape, outcome, **facts),
        stage=None if outcome == "ok" else "step",
        traceback=traceback,
    )


def altered(reply, **facts):
    """The same reply with other facts in its trial."""
    return replace(reply, trial=replace(reply.trial, **facts))
