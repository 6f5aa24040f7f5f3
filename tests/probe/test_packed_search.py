"""The token budget of packed batches on a made device: never too large, within a per cent, in few trials."""

import math
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_trials import altered
from memory_laws import BASE_BYTES, LIMIT_BYTES, Law, ooms, warns
from msgspec import structs
from packed_laws import (
    SENTENCES,
    TOKENS,
    PackedDevice,
    a_tenth_of_a_megabyte_each,
    drawn_batches,
    probe_packed,
    trials_before_turns,
)

from batchtune.errors import ProbeError, ResultError, UsageError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.packed_search import (
    COMPOSITIONS,
    MOST_TRIALS,
    MOST_UNEVEN_TRIALS,
)
from batchtune.results import PROBE_FILE, Probe, read_result

# Memory that does not grow evenly: a mask over the row, a floor, pages, another kernel.
ROUGH = {
    "mask": lambda shape: 1e5 * shape.tokens + 4.0 * shape.tokens**2,
    "floor": lambda shape: max(3e9, 1e5 * shape.tokens),
    "high floor": lambda shape: max(6.5e9, 1e5 * shape.tokens),
    "pages": lambda shape: 1e5 * 8192 * math.ceil(shape.tokens / 8192),
    "large pages": lambda shape: 1e5 * 30_000 * math.ceil(shape.tokens / 30_000),
    "powers of two": lambda shape: 1e5 * 2 ** math.ceil(math.log2(shape.tokens)),
    "wall": lambda shape: (1e5 if shape.tokens < 40_000 else 1e6) * shape.tokens,
    "concave": lambda shape: 1e6 * shape.tokens**0.8,
}


def probed(
    memory=a_tenth_of_a_megabyte_each,
    *,
    noise=0.0,
    lengths=TOKENS,
    dear=False,
    **changed,
):
    device = PackedDevice(
        Law(lambda size, length, target: 0.0, noise=noise),
        lengths,
        memory=memory,
    )
    with tempfile.TemporaryDirectory() as folder:
        return device, probe_packed(device, Path(folder), dear=dear, **changed)


def assert_never_too_large(device, probe):
    """The budget holds for its compositions and all that they contain; return the largest that does."""
    packed = probe.packed
    truth = device.largest_budget(int(device.lengths.total))
    assert packed.max_tokens <= truth
    proofs = [probe.trials[index].shape for index in packed.proofs]
    assert min(shape.tokens for shape in proofs) >= packed.max_tokens
    contained = [
        batch
        for batch in drawn_batches(device.lengths, packed.max_tokens, 30)
        if any(proof.contains(batch) for proof in proofs)
    ]
    assert contained
    assert all(map(device.fits, contained))
    # Where peaks scatter, what proves the budget may fail, and prove a smaller one.
    assert trials_before_turns(probe) <= MOST_UNEVEN_TRIALS + len(COMPOSITIONS)
    return truth


@example(163_278, 60.0, 3e6, 0.0, TOKENS, True)  # too little margin at first
@given(
    token=st.floats(2e4, 1.5e6),
    squared=st.sampled_from([0.0, 5.0, 60.0]),
    sequence=st.sampled_from([0.0, 2e5, 3e6]),
    noise=st.sampled_from([0.0, 0.002, 0.01]),
    lengths=st.sampled_from([TOKENS, SENTENCES]),
    dear=st.booleans(),
)
def test_even_memory_is_found_within_two_per_cent(
    token, squared, sequence, noise, lengths, dear
):
    device, probe = probed(
        lambda shape: (
            token * shape.tokens
            + squared * shape.squared_tokens
            + sequence * shape.batch_size
        ),
        noise=noise,
        lengths=lengths,
        dear=dear,
    )
    truth = assert_never_too_large(device, probe)
    assert probe.packed.max_tokens >= truth * (0.98 - 2 * noise) - 1
    assert ooms(probe.trials) <= 4
    if not noise:
        assert trials_before_turns(probe) <= MOST_TRIALS


@pytest.mark.parametrize(("noise", "dear"), [(0.0, False), (0.01, True)])
@pytest.mark.parametrize("name", ROUGH)
def test_uneven_memory_never_gives_too_large_a_budget(name, noise, dear):
    device, probe = probed(ROUGH[name], noise=noise, dear=dear)
    truth = assert_never_too_large(device, probe)
    # Up to where the answer lies these are even.
    least = 0.96 if name in ("mask", "floor", "concave") else 0.4
    assert probe.packed.max_tokens >= least * truth


def test_few_trials_fail_and_the_laws_are_fitted():
    _, probe = probed(
        lambda shape: (
            5e4 * shape.tokens
            + 30 * shape.squared_tokens
            + 1e6 * shape.batch_size
            + 3e6
        )
    )
    assert len(probe.trials) <= 10
    assert ooms(probe.trials) <= 1
    fit = probe.packed.peak_bytes
    terms = (fit.constant, fit.token, fit.squared_token, fit.sequence)
    assert terms == pytest.approx((BASE_BYTES + 3e6, 5e4, 30, 1e6), rel=0.05)
    assert fit.largest_error < 1e-9
    assert probe.packed.step_seconds.squared_token == pytest.approx(1e-9, rel=0.05)
    assert probe.is_proven
    assert probe.frontier == []
    assert probe.max_batch_length == probe.packed.max_tokens


def test_a_mask_over_the_row_is_warned_of():
    _, probe = probed(ROUGH["mask"])
    assert warns(probe, "square of all tokens")
    _, probe = probed()
    assert not warns(probe, "square of all tokens")


@pytest.mark.parametrize("changed", [{}, {"max_tokens": 9_000}])
def test_what_the_data_can_fill_ends_the_search(changed):
    lengths = Lengths.of([2048.0] * 4 + [100.0] * 30)
    _, probe = probed(lengths=lengths, **changed)
    assert probe.packed.max_tokens == changed.get("max_tokens", 4 * 2048 + 3000)
    assert probe.packed.closed_by == "data"
    assert probe.packed.oom_tokens is None


def test_equal_sequences_are_a_budget():
    device, probe = probed(lengths=Lengths.of([1000.0] * 500))
    assert_never_too_large(device, probe)
    # Where parts of the row come together, two sequences are cut.
    assert 2 <= len(probe.packed.proofs) < len(COMPOSITIONS)


def test_a_single_sequence_is_a_budget():
    _, probe = probed(lengths=Lengths.of([1000.0]))
    assert probe.packed.max_tokens == 1000


# What goes wrong


def test_a_workload_that_pads_is_told():
    message = r"its memory is that of padded.*\n.*leave out packed = True"
    with pytest.raises(WorkloadError, match=message):
        probed(lambda shape: 1e5 * shape.batch_size * shape.length)


def test_a_workload_that_ignores_the_batch_is_told(tmp_path):
    device = PackedDevice(memory=lambda shape: 1e9)
    device.seconds_of = lambda shape: 0.1
    message = r"do not depend on the batch.*\n.*into one row"
    with pytest.raises(WorkloadError, match=message):
        probe_packed(device, tmp_path)


def test_sequences_that_are_too_long_are_counted():
    message = r"examples exceed 1\d\d\d, the longest that fits"
    hint = "--max-length 1.*--truncate 1"
    with pytest.raises(ProbeError, match=rf"{message}.*\n.*{hint}"):
        probed(lambda shape: 5e6 * shape.tokens)


def test_a_longest_sequence_that_fits_alone_may_be_no_budget():
    with pytest.raises(ProbeError, match=r"no token budget fits.*\n.*--min-length"):
        probed(lambda shape: 1e5 * shape.tokens + 2e8 * shape.batch_size)


PADDED = Lengths.of([3.0])  # by a workload that pads


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        (Lengths.of([3.0, 2.5, 1.5]), {}, "2 of 3 are fractional, such as 2.5"),
        (Lengths.of([3.0, 2.0], [1.0, 1.0]), {}, "packed sequences have one length"),
        (TOKENS, {"max_batch_size": 8}, "--max-batch-size is for padded batches"),
        (TOKENS, {"max_tokens": 100}, "--max-tokens 100 is less than the longest"),
        (PADDED, {"max_tokens": 5000}, "--max-tokens is for a workload that packs"),
    ],
)
def test_what_can_not_be_packed_is_an_error(lengths, changed, message, tmp_path):
    device = PackedDevice(lengths=lengths, packed=lengths is not PADDED)
    with pytest.raises(UsageError, match=message):
        probe_packed(device, tmp_path / "run", **changed)
    assert not (tmp_path / "run" / PROBE_FILE).exists()


@pytest.mark.parametrize("packed", [False, True])
def test_trials_of_the_other_kind_are_refused(packed, tmp_path):
    probe_packed(PackedDevice(packed=packed), tmp_path)
    with pytest.raises(ResultError, match="holds a probe of p"):
        probe_packed(PackedDevice(packed=not packed), tmp_path)


# Interruptions and faults


class Unsteady(PackedDevice):
    """Is interrupted after `most` trials and steps, or answers otherwise once: `answer` replaces a trial's reply."""

    def __init__(self, most=10**6, answer=lambda reply: reply):
        super().__init__()
        self.most = most
        self.answer = answer

    def measure(self, shape, index, **how):
        reply = super().measure(shape, index, **how)
        return reply if how.get("fresh") else self.answer(reply)

    def run(self, shape, steps):
        if self.runs >= self.most:
            raise KeyboardInterrupt
        return super().run(shape, steps)


@pytest.mark.parametrize("most", [1, 4, 9])
def test_an_interrupted_probe_goes_on_as_if_it_had_not_been(most, tmp_path):
    whole = probe_packed(PackedDevice(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        probe_packed(Unsteady(most=most), tmp_path / "run")
    left = read_result(tmp_path / "run" / PROBE_FILE, Probe)
    assert left.unfinished
    assert not left.is_proven
    assert 0 < left.packed.max_tokens <= whole.packed.max_tokens
    assert left.packed.closed_by == "time"
    goes_on = probe_packed(PackedDevice(), tmp_path / "run")
    expected = [trial.shape for trial in whole.trials]
    assert [trial.shape for trial in goes_on.trials] == expected
    assert goes_on.packed.max_tokens == whole.packed.max_tokens
    assert not goes_on.unfinished


def test_minutes_end_a_packed_probe(tmp_path, monkeypatch):
    device = Unsteady()
    monkeypatch.setattr(
        "batchtune.probe.flow.time.monotonic", lambda: 10.0 * device.runs
    )
    probe = probe_packed(device, tmp_path, minutes=0.6)
    assert probe.unfinished
    assert len(probe.trials) < 7
    assert warns(probe, "--minutes")
    assert not probe_packed(device, tmp_path).unfinished


def test_a_crash_is_tried_again_before_it_is_believed(tmp_path):
    crashed = []

    def crash_once(reply):
        trial = reply.trial
        if trial.index < 4:
            return reply
        crashed.append(trial.shape)
        return altered(reply, outcome="crash", peak_bytes=None, error="SIGSEGV")

    probe = probe_packed(Unsteady(answer=crash_once), tmp_path)
    passed = {trial.shape for trial in probe.trials if trial.outcome == "ok"}
    assert crashed
    assert set(crashed) <= passed
    assert probe.packed.max_tokens >= 68_000


@pytest.mark.parametrize(
    ("allocator", "least"), [("expandable", 60_000), ("native", 0.9 * 70_000)]
)
def test_what_fails_in_turns_is_replaced_by_smaller_batches(allocator, least, tmp_path):
    class Fragments(PackedDevice):
        def step(self, shape, others=(), *, release=False):
            reply = super().step(shape, others, release=release)
            if self.bytes(shape) <= 0.97 * LIMIT_BYTES:
                return reply
            return altered(reply, outcome="oom", error="out of memory")

    device = Fragments()
    device.device = structs.replace(device.device, kind="cuda", allocator=allocator)
    probe = probe_packed(device, tmp_path)
    in_turns = [trial for trial in probe.trials if trial.confirmation]
    for trial in in_turns:
        assert trial.error == "interleaved with the other shapes: out of memory"
    assert least <= probe.packed.max_tokens <= 0.97 * 70_000
    assert probe.confirmation.given_up > 0
    # Where the allocator fragments, batches that have passed alone prove the smaller ones.
    assert (probe.trials[-1] in in_turns) == (allocator == "native")
    assert len(probe.packed.proofs) > 1


def holding_more(reply, more):
    """The reply of a process that holds so many bytes more."""
    trial = reply.trial
    if trial.peak_bytes is None:
        return reply
    return altered(
        reply,
        peak_bytes=trial.peak_bytes + more,
        rest_bytes=trial.rest_bytes + more,
    )


def holds_more_with_each_trial(reply):
    """The margin grows with it: nothing near the limit is proven any more."""
    return holding_more(reply, 40_000_000 * max(0, reply.trial.index - 8))


def holds_more_after_many_sequences(reply, kept):
    """From the first batch of very many sequences on."""
    if reply.trial.shape.batch_size <= 1000:
        return reply
    return holding_more(reply, int(kept * LIMIT_BYTES))


@pytest.mark.parametrize(
    ("answer", "dear", "least"),
    [
        (holds_more_with_each_trial, True, 0.75),
        *(
            (partial(holds_more_after_many_sequences, kept=kept), False, 0.95 - kept)
            for kept in (0.01, 0.03, 0.1)
        ),
    ],
)
def test_a_process_that_comes_to_hold_more_costs_only_that(
    answer, dear, least, tmp_path
):
    device = Unsteady(answer=answer)
    probe = probe_packed(device, tmp_path, dear=dear)
    truth = device.largest_budget(int(device.lengths.total))
    assert least * truth <= probe.packed.max_tokens <= truth
    assert len(probe.trials) <= MOST_UNEVEN_TRIALS + len(COMPOSITIONS)
