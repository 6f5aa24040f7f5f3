"""The summary of a run, in sentences that a person can read aloud: what to set, and what it saves."""

from __future__ import annotations

from batchtune.proofs import unproven_sizes
from batchtune.reports.gate.words import drift_sentences, verdict_sentence
from batchtune.reports.run import RunResults
from batchtune.reports.trade_offs import trade_off_sentences
from batchtune.reports.verification import verification_sentences
from batchtune.reports.words import format_percent, format_ratio, with_full_stop
from batchtune.results import Baseline, Confirmation, Device, Probe, Row, Sweep
from batchtune.units import counted, format_length, format_number, format_seconds, format_size

FIXED_BASELINE = "fixed-random"

# What SpeechBrain's recipes and its documentation set; the README's comparison stands on the same range.
_TODAY_BUCKETS = range(10, 21)

_CURRENT = "your current config"


def summary_sentences(results: RunResults) -> list[str]:
    """What to set and what it saves, most important first; the same in every format."""
    sentences = _sweep_sentences(results.sweep, results.probe) if results.sweep is not None else []
    if results.probe is not None:
        sentences += _probe_sentences(results.probe)
        if results.sweep is None:
            sentences.append("`batchtune sweep-buckets` finds the buckets that waste least with it.")
    if results.verification is not None:
        # What does not hold comes first: all else stands on it.
        place = 2 if results.verification.holds else 0
        sentences[place:place] = verification_sentences(results.verification)
    if results.drift is not None:
        sentences[:0] = drift_sentences(results.drift)
    if results.verdicts:
        sentences.insert(0, verdict_sentence(results.verdicts))
    return sentences


def today_row(sweep: Sweep) -> Row | None:
    """Today's practice: SpeechBrain's own boundaries, with the most of 10 to 20 buckets that was swept."""
    rows = [row for row in sweep.rows if row.strategy == "speechbrain" and row.num_buckets in _TODAY_BUCKETS]
    return max(rows, key=lambda row: row.num_buckets, default=None)


def fixed_baseline(sweep: Sweep) -> Baseline | None:
    """The largest fixed batch size, its batches drawn at random; None where it was not computed."""
    return next((baseline for baseline in sweep.baselines if baseline.name == FIXED_BASELINE), None)


def describe_device(device: Device) -> str:
    """The device and the limit that was enforced: `NVIDIA H200, limited to 126 GiB of 140 GiB`."""
    return f"{device.name}, limited to {format_size(device.limit_bytes)} of {format_size(device.total_bytes)}"


def _sweep_sentences(sweep: Sweep, probe: Probe | None) -> list[str]:
    row, fixed = sweep.recommended_row, fixed_baseline(sweep)
    if row is None:
        why = with_full_stop(f": {sweep.reason}" if sweep.reason else "")
        sentences = [f"No bucket table is recommended{why or '.'}"]
        if fixed is not None:
            sentences.append(
                f"A fixed batch size of {format_number(fixed.batch_size)} needs {_batches(fixed.batches)} for an epoch."
            )
        return sentences
    others: list[tuple[str, Row | Baseline]] = []
    today = today_row(sweep) if sweep.current is None or sweep.current_fits is False else None
    if sweep.current is not None and sweep.current_fits is not False:
        others.append((_CURRENT, sweep.current))
    if today is not None and today is not row:
        others.append((f"SpeechBrain's num_buckets={today.num_buckets}", today))
    if fixed is not None:
        others.append((f"a fixed batch size of {format_number(fixed.batch_size)}", fixed))
    return [
        _what_to_set(sweep, row, others),
        _what_it_saves(row, others),
        *_proof(row, probe),
        *_about_current(sweep, row),
        _bound(sweep, row),
        _padding(row, others),
        *([f"Why: {with_full_stop(sweep.reason)}"] if sweep.reason else []),
        *trade_off_sentences(sweep),
    ]


def _what_to_set(sweep: Sweep, row: Row, others: list[tuple[str, Row | Baseline]]) -> str:
    count = len(row.boundaries)
    buckets = "1 bucket" if count == 1 else f"{format_number(count)} buckets"
    sizing = ", batch sizes from the frontier" if row.sizing == "frontier" else ""
    limit = format_length(sweep.max_batch_length, sweep.lengths.unit)
    source = (sweep.current_settings or {}).get("source")
    on_ranks = f" on {format_number(sweep.world_size)} ranks" if sweep.world_size > 1 else ""
    named = {_CURRENT: f"{_CURRENT} ({source})"} if source and source != "--current" else {}
    needs = " and ".join(f"{named.get(name, name)} needs {format_number(other.batches)}" for name, other in others)
    return (
        f"Set {buckets} ({row.strategy}{sizing}) with max_batch_length = {limit}: an epoch{on_ranks} needs "
        f"{_batches(row.batches)}" + (f" where {needs}." if needs else ".")
    )


def _what_it_saves(row: Row, others: list[tuple[str, Row | Baseline]]) -> str:
    seconds = row.estimated_epoch_seconds
    if seconds is None:
        saved = [f"{_fewer(row.batches, other.batches)} than with {name}" for name, other in others if other.batches]
        unknown = "Step times are not known, so batches are what is compared"
        return f"{unknown}: {' and '.join(saved)}." if saved else f"{unknown}."
    faster = [
        f"{_speed(seconds, other.estimated_epoch_seconds)} {name} ({format_seconds(other.estimated_epoch_seconds)})"
        for name, other in others
        if other.estimated_epoch_seconds
    ]
    estimate = f"One epoch is estimated at {format_seconds(seconds)}"
    return f"{estimate}: {' and '.join(faster)}." if faster else f"{estimate}."


def _proof(row: Row, probe: Probe | None) -> list[str]:
    """Whether the batches were run, and how much memory they leave; nothing where nothing was probed."""
    if row.unproven is None:
        return []
    if (sizes := unproven_sizes(row)) is not None:
        return [f"{sizes[0].upper()}{sizes[1:]}: the warnings say why."]
    run, margin = "Every batch size was run, or is no larger than one that was", probe.margin if probe else None
    if probe is None or margin is None or not margin.bytes:
        return [f"{run}; how much memory that leaves free is not known."]
    share = format_percent(margin.bytes / probe.device.limit_bytes)
    return [f"{run}, and leaves {format_size(margin.bytes)} ({share} of the limit) free."]


def _about_current(sweep: Sweep, row: Row) -> list[str]:
    """What the comparison with the user's own config comes down to, where that is not plain."""
    now = sweep.current
    if now is None:
        return []
    if sweep.current_fits is False:
        return [
            f"Your current config ({format_number(now.batches)} batches) is not compared: its batches are larger than "
            "what was found to fit."
        ]
    ours, theirs = row.estimated_epoch_seconds, now.estimated_epoch_seconds
    timed = ours is not None and theirs is not None
    if timed and row.equal_to_best and now.equal_to_best:
        return ["By the error of the estimates, it and your current config are equally fast."]
    if (theirs < ours) if timed and ours is not None and theirs is not None else now.batches < row.batches:
        return ["Your current config is better than the recommended table: keep it."]
    return []


def _bound(sweep: Sweep, row: Row) -> str:
    bound = sweep.lower_bound
    what, above = [_batches(bound.batches)], [_above(row.batches, bound.batches)]
    if bound.estimated_epoch_seconds and row.estimated_epoch_seconds:
        what.append(f"an estimated {format_seconds(bound.estimated_epoch_seconds)}")
        above.append(_above(row.estimated_epoch_seconds, bound.estimated_epoch_seconds))
    return f"The bound that no bucket table can beat is {' and '.join(what)}: this is {' and '.join(above)} above it."


def _above(cost: float, bound: float) -> str:
    return format_percent(max(0.0, cost / bound - 1) if bound else 0.0)


def _padding(row: Row, others: list[tuple[str, Row | Baseline]]) -> str:
    against = " and ".join(f"{format_percent(other.padding_ratio)} with {name}" for name, other in others)
    sentence = f"Padding is {format_percent(row.padding_ratio)} of all cells"
    return f"{sentence}, against {against}." if against else f"{sentence}."


def _probe_sentences(probe: Probe) -> list[str]:
    unit = probe.lengths.unit
    sentences = [
        f"max_batch_length = {format_length(probe.max_batch_length, unit)} is the most that fits at every "
        f"length, measured on {describe_device(probe.device)}."
    ]
    if len(probe.frontier) > 1:
        largest = max(probe.frontier, key=lambda point: point.batch_size)
        longest = probe.frontier[-1]
        sentences.append(
            f"A batch holds from {format_number(longest.batch_size)} examples of "
            f"{format_length(longest.length, unit)} to {format_number(largest.batch_size)} of "
            f"{format_length(largest.length, unit)}."
        )
    if any(point.target_length is not None for point in probe.frontier):
        sentences.append("Each length was measured with the longest target that occurs at or below it.")
    if probe.confirmation is not None and probe.confirmation.shapes:
        sentences.append(_confirmed(probe.confirmation))
    return sentences


def _confirmed(confirmation: Confirmation) -> str:
    shapes, steps = format_number(confirmation.shapes), format_number(confirmation.steps)
    which = "The batch at the limit was" if confirmation.shapes == 1 else f"The {shapes} batches at the limit were"
    again = f" after {counted(confirmation.given_up, 'larger one')} had failed so" if confirmation.given_up else ""
    return f"{which} run once more in turns, {steps} steps in {confirmation.workers} processes, and fit{again}."


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{format_number(count)} batches"


def _fewer(ours: int, theirs: int) -> str:
    if ours == theirs:
        return "no fewer batches"
    share = format_percent(abs(1 - ours / theirs))
    return f"{share} {'fewer' if ours < theirs else 'more'} batches"


def _speed(our_seconds: float, their_seconds: float) -> str:
    if our_seconds == 0 or format_ratio(their_seconds / our_seconds) == "1.00":
        return "as fast as"
    if our_seconds < their_seconds:
        return f"{format_ratio(their_seconds / our_seconds)} times faster than"
    return f"{format_ratio(our_seconds / their_seconds)} times slower than"
