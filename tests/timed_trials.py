"""Made trials for the tests of step times."""

from batchtune.results import BatchShape, Trial


def timed_trial(
    batch_size,
    length,
    seconds,
    *,
    target=None,
    spread=0.0,
    outcome="ok",
    mean=None,
    timed_steps=4,
):
    """A warm-up and some timed steps; `spread` is their interquartile range, `mean` their mean, in seconds."""
    return Trial.of(
        BatchShape(batch_size, length, target),
        outcome,
        steps=1 + timed_steps,
        step_seconds=seconds,
        elapsed_seconds=1.0,
        step_seconds_spread=spread,
        mean_step_seconds=mean,
    )
