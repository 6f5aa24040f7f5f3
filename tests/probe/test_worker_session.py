"""A worker's trials, with a made meter: what no CPU can show."""

import contextlib
import itertools
import sys
from collections import Counter

import pytest
from made_devices import MIB, StillMeter, made_device

from batchtune.probe import attempt as attempt_module
from batchtune.probe.worker import Session
from batchtune.processes.worker import encode
from batchtune.results import BatchShape
from batchtune.trust import trust_warnings

SHAPE = BatchShape(4, 3.0)


class MadeMeter(StillMeter):
    """A device of 1000 MiB; it does what its workload says."""

    used = 100 * MIB
    flushed = 0
    raised = 0
    sound = True
    released = 0
    queued = False

    def __init__(self):
        self.device = made_device(
            kind="cuda", limit_bytes=1000 * MIB, allocator="native"
        )
        self.clocks = []

    def synchronize(self):
        self.queued = False

    def note_clock(self):
        self.clocks.append(1980 if self.queued else 210)

    def release(self):
        self.released += 1

    def peak(self):
        return self.used + 50 * MIB

    def reserved(self):
        return self.used + 70 * MIB

    def in_use(self):
        return self.used

    def retries_and_ooms(self):
        return self.flushed, self.raised

    def healthy(self):
        return self.sound


class MadeWorkload:
    """Does in its n-th step what it was told to."""

    def __init__(self, meter, act):
        self.meter = meter
        self.act = act
        self.steps = 0

    def setup(self, device): ...

    def make_batch(self, shape):
        return shape

    def step(self, batch):
        self.steps += 1
        self.meter.queued = True
        self.act(self.meter, batch, self.steps)


def session(act, *agree):
    meter = MadeMeter()
    return Session(MadeWorkload(meter, act), meter, *agree)


def out_of_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def out_in_disguise():
    raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def fail():
    raise ValueError("tokens and labels differ")


def leave():
    sys.exit(3)


def fail_unprintably():
    raise ValueError("a lone surrogate: \udcff " + "x" * 1_000_000)


def fail_without_words():
    class Wordless(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Wordless


def nothing(meter, batch, number): ...


def failing(fault, *numbers):
    """Has the fault in these steps, or in all."""

    def act(meter, batch, number):
        if number in numbers or not numbers:
            fault()

    return act


def catching(number=1):
    """Runs out of memory from this step on, and goes on as if nothing had happened."""

    def act(meter, batch, step):
        if step >= number:
            with contextlib.suppress(RuntimeError):
                meter.raised += 1
                out_of_memory()

    return act


def flushing(*numbers, times=1):
    """Empties the allocator's cache in these steps, or in all."""

    def act(meter, batch, number):
        if number in numbers or not numbers:
            meter.flushed += times

    return act


def raises_in_the_allocator(meter, batch, number):
    meter.raised += 1


# What a step raises → the outcome, the error, and whether a later step's costs the worker.
RAISED = {
    out_of_memory: ("oom", "RuntimeError: CUDA out of memory. Tried", False),
    out_in_disguise: ("oom", "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_", True),
    fail: ("error", "ValueError: tokens and labels differ", True),
}


@pytest.mark.parametrize("sound", [True, False], ids=["", "sticky"])
@pytest.mark.parametrize("step", [0, 1, 2, 4], ids=lambda step: f"step {step}")
@pytest.mark.parametrize("fault", RAISED, ids=lambda fault: fault.__name__)
def test_what_is_raised_is_judged_alike_wherever_it_is(fault, step, sound):
    """In making the batch (0), in the warm-up, or in a timed step; `sticky`: nothing works any more afterwards."""

    def act(meter, batch, number):
        if number == step:
            meter.sound = sound
            fault()

    outcome, error, costs_worker = RAISED[fault]
    made = session(act)
    made._workload.make_batch = lambda shape: act(made._meter, shape, 0)
    measured = made.measure(SHAPE)
    trial = measured.trial
    assert (trial.outcome, trial.caught) == (outcome, False)
    assert trial.error.startswith(error)
    assert (trial.peak_bytes, trial.step_seconds) == (None, None)
    assert trial.failed_peak_bytes == made._meter.peak()
    assert measured.stage == ("step" if step else "make_batch")
    assert "test_worker_session.py" in measured.traceback
    # In the very first step, the optimizer's state may be incomplete afterwards.
    assert measured.renew == (costs_worker or step == 1 or not sound)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (leave, "SystemExit: 3"),
        (fail_unprintably, r"ValueError: a lone surrogate: \udcff x"),
        (fail_without_words, "Wordless"),
    ],
)
def test_whatever_a_step_raises_can_be_reported(fault, error):
    measured = session(failing(fault, 4)).measure(SHAPE)
    assert measured.trial.outcome == "error"
    assert measured.trial.error.startswith(error)
    assert len(encode(measured)) < 10_000
    assert measured.renew


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_oom_caught_by_the_workload_counts_wherever_it_is(step):
    measured = session(catching(step)).measure(SHAPE)
    assert (measured.trial.outcome, measured.trial.caught) == ("oom", True)
    assert not measured.renew
    assert measured.trial.error.startswith(
        "caught by the workload, whose step still returned: "
    )
    # It ran once more from an empty cache.
    assert "test_worker_session.py, line" in measured.trial.error


def test_a_leak_is_reported_as_one():
    def act(meter, batch, number):
        meter.used += 4 * MIB

    measured = session(act).measure(SHAPE)
    assert (measured.trial.outcome, measured.trial.error) == (
        "error",
        "the workload leaks: each step leaves about 4 MiB more in use (10 steps in a row)",
    )
    assert ".item() or .detach()" in measured.hint
    assert (measured.stage, measured.renew) == ("step", True)


def test_a_step_of_varying_time_is_repeated_with_its_spread(monkeypatch):
    now = 0.0

    def act(meter, batch, number):
        nonlocal now
        now += (0.01, 0.03)[number % 2]

    monkeypatch.setattr(attempt_module.time, "perf_counter", lambda: now)
    trial = session(act).measure(SHAPE).trial
    assert trial.steps > 7  # where it is steady, five timed ones are enough
    assert trial.step_seconds_spread > 0.05 * trial.step_seconds


def test_a_caught_allocator_error_is_an_oom_unless_in_a_step():
    trial = session(raises_in_the_allocator).measure(SHAPE).trial
    assert (trial.outcome, trial.caught) == ("oom", True)
    assert "the allocator ran out of memory" in trial.error
    assert session(raises_in_the_allocator).step(SHAPE).trial.outcome == "ok"
    assert session(catching()).step(SHAPE).trial.outcome == "oom"


def test_the_clock_is_read_once_while_a_timed_step_is_queued():
    steps = []
    made = session(lambda meter, batch, number: steps.append(len(meter.clocks)))
    made.measure(SHAPE)
    assert made._meter.clocks == [1980]
    assert steps[:3] == [0, 0, 1]


def test_a_flush_in_the_warm_up_ends_the_try_at_once():
    made = session(flushing(1, 2))
    trial = made.measure(SHAPE).trial
    assert made._workload.steps == 2
    assert (trial.outcome, trial.alloc_retries) == ("oom", 1)
    assert "emptied its cache" in trial.error
    assert made._meter.released == 3


def compiled_step(mean):
    """A step whose forward pass torch.compile compiles for every batch size."""
    import torch

    compiled = torch.compile(mean, backend="eager", dynamic=False)

    def act(meter, batch, number):
        compiled(torch.ones(batch.batch_size))

    return act


def test_a_step_that_compiles_is_not_timed(monkeypatch):
    import torch
    from torch._dynamo.utils import counters

    now = 0.0
    mean = compiled_step(lambda batch: batch.mean())

    def act(meter, batch, number):
        nonlocal now
        before = counters["frames"]["total"]
        if number == 3:
            torch._dynamo.reset()
        mean(meter, batch, number)
        now += 60.0 if counters["frames"]["total"] > before else 1.0

    monkeypatch.setattr(attempt_module.time, "perf_counter", lambda: now)
    made = session(act)
    trial = made.measure(SHAPE).trial
    assert (trial.step_seconds, trial.mean_step_seconds) == (1.0, 1.0)
    assert trial.compilations >= 2
    assert not trial.at_recompile_limit
    assert made.step(BatchShape(5, 3.0)).trial.step_seconds == 1.0


def test_the_recompile_limit_is_recorded_and_reported(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "unimplemented", Counter())
    made = session(compiled_step(lambda batch: batch.sum()))
    trials = [made.measure(BatchShape(size, 3.0)).trial for size in range(2, 13)]
    assert [trial.at_recompile_limit for trial in trials] == [False] * 8 + [True] * 3
    warnings = trust_warnings(MadeMeter().device, trials)
    (warning,) = [text for text in warnings if "recompile limit" in text]
    assert "3 of the 11 measurements" in warning


@pytest.mark.parametrize(("kept", "renew"), [(0, False), (1, False), (50, True)])
def test_memory_that_a_failure_keeps_costs_the_worker(kept, renew):
    def act(meter, batch, number):
        meter.used += 30 * MIB * (number == 1)  # such as the optimizer's state
        if batch.batch_size > 4:
            meter.used += kept * MIB
            out_of_memory()

    made = session(act)
    assert not made.measure(SHAPE).renew
    failed = made.measure(BatchShape(5, 3.0))
    assert (failed.trial.outcome, failed.renew) == ("oom", renew)


def test_a_pass_by_flushing_the_cache_is_rerun_from_an_empty_one():
    trial = session(flushing(1)).measure(SHAPE).trial
    assert (trial.outcome, trial.alloc_retries) == ("ok", 0)


def test_a_single_step_counts_flushes_and_is_not_run_again():
    made = session(flushing(times=2))
    trial = made.step(SHAPE).trial
    assert (trial.outcome, trial.alloc_retries) == ("ok", 2)
    assert made._workload.steps == 1


def unsteady(meter, shape, step):
    meter.used = 100 * MIB + 2 * MIB * (step % 2)


def growing_in_brief_trials(meter, shape, step):
    """Their two steps are not taken for a leak."""
    is_brief = step > 12  # after three trials of four steps
    meter.used = 100 * MIB + is_brief * ((step + 1) % 2) * MIB


@pytest.mark.parametrize(
    ("act", "steps"),
    [
        (nothing, [4, 4, 4, 2, 2]),
        (unsteady, [4, 4, 4, 4, 4]),
        (growing_in_brief_trials, [4, 4, 4, 2, 2]),
    ],
)
def test_after_steady_trials_a_long_step_is_timed_once(act, steps, monkeypatch):
    clock = itertools.count(step=0.2)  # seconds; read before and after each step
    monkeypatch.setattr(attempt_module.time, "perf_counter", lambda: next(clock))
    made = session(act)
    assert [made.measure(SHAPE).trial.steps for _ in steps] == steps


class Agreed:
    """Notes what a rank says to the others; they want what is given, in turn, and then nothing."""

    def __init__(self, *others):
        self.others = iter(others)
        self.votes = []
        self.caught = []

    def __call__(self, wanted, caught=None):
        self.votes.append(wanted)
        self.caught.append(caught)
        return next(self.others, False) or wanted


def test_ranks_run_as_many_steps_as_any_of_them_needs():
    def steps(*others):
        # Steps take no time here, so 30 are timed, after the warm-up.
        trial = session(nothing, Agreed(*others)).measure(SHAPE).trial
        assert trial.outcome == "ok"
        return trial.steps

    alone = Agreed()
    assert session(nothing, alone).measure(SHAPE).trial.steps == 31
    # The flush; for each step whether it compiled and whether more are needed; the leak; another try.
    assert len(alone.votes) == 1 + 2 * 30 + 2
    # Another rank's flush in the warm-up: one more try; again: what is known here does not matter.
    assert steps(True, True) == 31
    assert steps(True, True, True) == 1
    assert steps(False, True) == 32  # another rank compiled
    # Another rank tries again: the second try is not brief, either.
    assert steps(*[False] * 62, True) == 31


def test_a_rank_that_fails_does_not_vote():
    others = Agreed()
    measured = session(failing(out_of_memory, 3), others).measure(SHAPE)
    assert measured.trial.outcome == "oom"
    # Before: the flush, one timed step that did not compile, and that more are needed.
    assert others.votes == [False, False, True]


def test_only_the_rank_that_leaks_says_so():
    # After the flush and 30 steps, another rank sees a leak, and watches it to the end.
    others = Agreed(*[False] * 61, *[True] * 21)
    trial = session(nothing, others).measure(SHAPE).trial
    assert (trial.outcome, trial.steps) == ("ok", 31 + 10)


def test_an_error_caught_on_this_rank_is_told_to_the_others():
    others = Agreed()
    measured = session(catching(), others).measure(SHAPE)
    assert (measured.trial.outcome, measured.trial.caught) == ("oom", True)
    assert "CUDA out of memory" in others.caught[0]
