"""The verification as a whole, on a made device."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from made_trials import ran
from msgspec.structs import replace
from report_records import SCRIPT
from verify.made_stepper import (
    LIMIT_BYTES,
    MIB,
    made_config,
    made_probe,
    made_stepper,
)

from batchtune.errors import ResultError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.devices.law import NAME
from batchtune.probe.requests import RecordedStep, Replayed
from batchtune.results import (
    WorkloadRecord,
)
from batchtune.verify import proof_of, verify
from batchtune.verify.plan import VerifyPlan, VerifySettings

LENGTHS = Lengths.of(np.random.default_rng(0).integers(1, 31, 2000))
EQUAL = Lengths.of(np.repeat([5.0, 12.0, 30.0], 600))
FITS = made_config([5.0, 12.0, 30.0], [180, 75, 30])
TOO_LARGE = made_config([5.0, 12.0, 30.0], [180, 90, 30])
PROBE = made_probe(LENGTHS)
MADE = WorkloadRecord(spec="made.py:Made", options={})


def plan_of(config=FITS, lengths=LENGTHS, probe=None, **settings):
    chosen = VerifySettings(**settings)
    return VerifyPlan(lengths=lengths, config=config, settings=chosen, probe=probe)


def verified(
    stepper,
    config=FITS,
    lengths=LENGTHS,
    probe=None,
    on_progress=lambda progress: None,
    **settings,
):
    plan = plan_of(config, lengths, probe, **(settings or {"steps": 60}))
    return verify(stepper, plan, MADE, on_progress=on_progress)


def failing(outcome, error):
    """The batches of the middle bucket with its longest example fail."""

    def fault(shape, run):
        if (shape.batch_size, shape.length) != (75, 12.0):
            return None
        return ran(shape, outcome, error=error, traceback="its end")

    return fault


def test_what_fits_and_takes_as_long_as_estimated_holds():
    found = verified(made_stepper(), probe=PROBE)
    assert (found.holds, found.failures, found.warnings) == (True, [], [])
    assert found.time_ratio == pytest.approx(1.0, abs=0.02)
    assert found.time_ratio_error == pytest.approx(0.0, abs=1e-9)


def test_the_worst_shapes_are_run_first_and_then_in_alternation():
    stepper = made_stepper()
    verified(stepper)
    first = [shape.batch_size for shape in stepper.shapes[:6]]
    assert first == [180, 75, 30, 180, 30, 75]


def on_cuda(stepper, **changes):
    """The device as one whose allocator is CUDA's native one, unless the changes say otherwise."""
    cuda = {"kind": "cuda", "allocator": "native", **changes}
    stepper.device = replace(stepper.device, **cuda)
    return stepper


def test_other_shuffles_follow_in_further_processes():
    stepper = made_stepper()
    found = verified(stepper)
    assert (found.processes, found.restarted_steps) == (3, 120)
    runs = [stepper.shapes[start : start + 60] for start in (6, *stepper.starts[1:])]
    assert runs[0] != runs[1] != runs[2] != runs[0]


@pytest.mark.parametrize(
    ("kind", "seconds", "processes"),
    [("cpu", 5, 1), ("cpu", 15, 2), ("cpu", 25, 3), ("cuda", 5, 2)],
)
def test_a_proof_uses_its_time_for_further_processes(
    monkeypatch, kind, seconds, processes
):
    clock = [0.0]
    made_time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("batchtune.verify.time", made_time)
    stepper = on_cuda(made_stepper(), kind=kind, allocator="expandable")
    start = stepper.start

    def slow_start():
        clock[0] += 20
        return start()

    stepper.start = slow_start
    assert verified(stepper, brief=True, seconds=seconds).processes == processes


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, 6),
        ({"kind": "cpu", "allocator": None}, 0),
        ({"allocator": "expandable"}, 0),
    ],
    ids=["native", "cpu", "expandable"],
)
def test_where_memory_fragments_pairs_run_on_emptied_caches(changes, pairs):
    stepper = on_cuda(made_stepper(), **changes)
    found = verified(stepper, FITS, EQUAL, made_probe(EQUAL))
    assert (found.pairs, found.planned_pairs) == (pairs, pairs)
    ran = itertools.compress(itertools.pairwise(stepper.shapes), stepper.released)
    assert len(set(ran)) == pairs


def test_without_time_for_pairs_each_shape_runs_before_three():
    stepper = on_cuda(made_stepper())
    found = verified(
        stepper, made_config([5.0, 9.0, 12.0, 20.0, 30.0], [180, 100, 75, 45, 30])
    )
    assert found.pairs == found.planned_pairs == 3 * sum(stepper.released)
    firsts = itertools.compress(stepper.shapes, stepper.released)
    assert {shape.batch_size for shape in firsts} == {180, 100, 75, 45, 30}


def test_each_bucket_is_proven_and_replayed_with_less_memory():
    """A rare bucket had not run in a proof, and its first batch ran out of memory in 5 of 5 epochs."""
    stepper = on_cuda(made_stepper(), allocator="expandable")
    recorded = RecordedStep(device=0, held=[], requests=[1])
    stepper.alter = lambda reply, number: replace(reply, recorded=recorded)
    asked = []

    def replay(request):
        asked.append(request)
        return Replayed(processes=2, steps=150, failed=1, error="CUDA out of memory")

    stepper.replay = replay
    found = verified(stepper, brief=True, seconds=5)
    failure = found.failures[0]
    assert (failure.phase, failure.step, failure.outcome) == ("replayed", 150, "oom")
    assert failure.shape == stepper.shapes[1]
    assert (found.replayed_steps, found.replayed_processes) == (150, 2)
    longest, shorter = (
        {shape.batch_size: shape.length for shape in ran}
        for ran in (stepper.shapes[:3], stepper.shapes[3:6])
    )
    assert longest.keys() == shorter.keys() == {180, 75, 30}
    # Shapes that repeat fit where those of other batches do not.
    assert all(longest[size] > shorter[size] for size in longest)
    assert len(asked[0].steps) == found.steps
    assert asked[0].limit_bytes == LIMIT_BYTES - int(0.01 * LIMIT_BYTES)
    assert "as shuffled batches were replayed" in proof_of(found).reason


def test_a_proofs_steps_are_those_of_the_training():
    stepper = on_cuda(made_stepper())
    script = replace(SCRIPT, accumulation=4)
    stepper.device = replace(stepper.device, script=script)
    found = verified(stepper, FITS, EQUAL, brief=True, steps=60)
    assert found.steps == 6 + 58 and found.pairs == found.planned_pairs == 6
    steps = [(step.shape, *step.others) for step in stepper.steps]
    assert {len(step) for step in steps} == {4}
    assert len(set(steps[0])) > 1
    sequences = itertools.compress(steps, stepper.released)
    assert all(first == again for first, _, _, again in sequences)


def test_a_crash_counts_only_if_it_comes_again():
    crashed = []

    def once(shape, step):
        if shape.batch_size == 75 and not crashed:
            crashed.append(shape)
            return ran(shape, "crash", error="SIGSEGV")
        return None

    assert verified(made_stepper(fault=once)).holds


def test_time_that_ends_leaves_a_verification_unfinished():
    found = verify(
        on_cuda(made_stepper()),
        plan_of(steps=60),
        MADE,
        on_progress=lambda progress: None,
        deadline=0.0,
    )
    assert (found.unfinished, found.holds, found.steps) == (True, False, 0)
    assert found.processes == 1
    assert found.reasons[0].startswith("The time ended")


def fragmented(shape, run):
    if run >= 20 and shape.batch_size == 75:
        return ran(shape, "oom", error="CUDA out of memory")
    return None


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (
            {},
            {"config": TOO_LARGE, "probe": PROBE},
            r"^A batch of 90 × 12 ran out of memory among the largest batches \(bucket 2 of 3\): out of memory$",
        ),
        ({"fault": fragmented}, {}, "75 × .* ran out of memory among shuffled batches"),
        (
            {"fault": failing("crash", "SIGSEGV")},
            {},
            "ended its process.*SIGSEGV",
        ),
        (
            {"fault": failing("timeout", "SIGSEGV")},
            {},
            "took too long.*SIGSEGV",
        ),
        # Before the OOM that it ends in.
        (
            {"leak_bytes": 4 * MIB, "limit_bytes": 2 * LIMIT_BYTES},
            {"steps": 400},
            "the workload leaks",
        ),
        (
            {"slower": 1.2},
            {"probe": PROBE},
            r"measured against .*: 1\.(19|2)\d* times, where 0\.90 to 1\.10 is allowed",
        ),
        ({"slower": 0.8}, {"probe": PROBE}, r": 0\.(79|8)\d* times"),
    ],
    ids=["oom", "shuffled", "crash", "hang", "leak", "slower", "faster"],
)
def test_what_does_not_hold_says_why(device, given, reason):
    found = verified(made_stepper(**device), **given)
    assert not found.holds
    assert re.search(reason, found.reasons[0])


def test_the_first_failing_shuffled_batch_ends_the_run():
    found = verified(made_stepper(fault=fragmented))
    (failure,) = found.failures
    assert (failure.phase, failure.step) == ("shuffled", found.steps)
    assert (failure.bucket, failure.batch_size, failure.outcome) == (1, 75, "oom")


DISGUISED = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
)


def test_an_oom_in_disguise_counts_if_half_the_batch_passes():
    found = verified(made_stepper(fault=failing("oom", DISGUISED)))
    assert [failure.batch_size for failure in found.failures] == [75]


def test_what_fails_whatever_the_size_is_the_workloads_own_error():
    def always(shape, run):
        return ran(shape, "oom", error=DISGUISED)

    with pytest.raises(WorkloadError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        verified(made_stepper(fault=always))


@pytest.mark.parametrize("allocator", ["native", "expandable"])
def test_a_cache_that_goes_on_growing_does_not_hold(allocator):
    stepper = made_stepper(cache_bytes=MIB)
    stepper.device = replace(stepper.device, allocator=allocator)
    found = verified(stepper)
    assert "fragment the memory" in found.reasons[0]
    advised = "probe again with --allocator expandable" in found.reasons[0]
    assert advised == (allocator == "native")


def test_emptied_caches_give_a_warning_but_hold():
    found = verified(made_stepper(retries=1))
    assert found.holds
    assert proof_of(found).alloc_retries == found.alloc_retries == 3 + 60
    assert "emptied its cache 63 times" in found.warnings[0]


def test_without_step_times_the_time_is_not_compared():
    found = verified(made_stepper(slower=9.0), probe=made_probe(LENGTHS, timed=False))
    assert found.holds and found.measured_epoch_seconds is not None
    assert "not compared with an estimate" in found.warnings[0]


def test_another_device_than_was_probed_is_refused():
    stepper = made_stepper()
    stepper.device = replace(stepper.device, name="other")
    with pytest.raises(ResultError, match=f"was measured on {NAME}; this is other"):
        verified(stepper, probe=PROBE)


def test_progress_is_told_before_each_step():
    told = []
    stepper = made_stepper()
    verified(stepper, on_progress=told.append)
    assert [one.shape for one in told] == stepper.shapes
    places = [(one.phase, one.done, one.total, one.process) for one in told]
    assert places[5:7] == [("worst", 5, 6, 1), ("shuffled", 0, 60, 1)]
    assert places[-1] == ("shuffled", 59, 60, 3)


def test_batches_that_are_padded_to_multiples_are_run_so():
    stepper = made_stepper()
    found = verified(
        stepper, made_config([8.0, 16.0, 32.0], [100, 50, 25], multiple_of=8.0)
    )
    assert {shape.length for shape in stepper.shapes} == {8.0, 16.0, 32.0}
    assert found.lengths == LENGTHS.summary()
    assert found.settings["multiple_of"] == 8.0


def test_by_default_an_epoch_is_run_within_a_minute():
    config = made_config([30.0], [4])  # 500 batches
    assert plan_of(config, probe=PROBE).planned_steps == 200
    slow = Lengths.of([5999.0, 6000.0] * 100)  # 0.6 s each
    of_slow = plan_of(made_config([6000.0], [1]), slow, made_probe(slow))
    assert 90 < of_slow.planned_steps < 110
    script = replace(SCRIPT, accumulation=3)
    probe = replace(PROBE, device=replace(PROBE.device, script=script))
    # A proof ends with whole steps.
    assert plan_of(config, probe=probe, brief=True).planned_steps == 201
    few = plan_of(made_config([3.0], [4]), Lengths.of([3.0] * 8))
    assert few.planned_steps == 12
