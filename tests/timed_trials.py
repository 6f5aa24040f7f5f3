"""Made trials for the tests of step times."""

from batchtune.results import Trial


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
    return Trial(
        index=0,
        batch_size=batch_size,
        length=length,
        target_length=target,
        outcome=outcome,
        steps=1 + timed_steps,
        step_seconds=seconds,
        peak_bytes=None,
        reserved_bytes=None,
        alloc_retries=None,
        error=None,
        elapsed_seconds=1.0,
        step_seconds_spread=spread,
        mean_step_seconds=mean,
    )
