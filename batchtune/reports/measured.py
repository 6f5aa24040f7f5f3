"""The sections on a probe, on a verification, and on a recorded training against what both predict."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from msgspec.structs import asdict

from batchtune.reports import RunResults
from batchtune.reports.section import (
    Cells,
    Section,
    Table,
    V,
    cache_emptied,
    failures_table,
    format_shape,
    known,
    make_table,
    settings_table,
    training_notes,
)
from batchtune.results import (
    AnyRow,
    BatchShape,
    CostModel,
    Device,
    LengthsSummary,
    Outcome,
    PackedProbe,
    Probe,
    Row,
    SamplerConfig,
    StreamRow,
    StreamSweep,
    Training,
    TrainingStep,
    Trial,
    Verification,
    last_recording,
)
from batchtune.trust import settings_differences
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

# A fit that misses its own measurements by more can't be trusted between them.
_POOR_FIT = 0.1
# Enough trials for any search; they bound the size of the HTML page.
_MAX_TRIALS = 1000
_AGAIN = "Run `batchtune verify` again as it was probed, or probe again with --force."


def probe_section(run: RunResults) -> Section:
    """Return what to report on `probe.json`."""
    probe = run.probe
    assert probe is not None
    failed = [trial for trial in probe.trials if trial.outcome not in ("ok", "oom")]
    tables = [_frontier_table(probe)] if probe.frontier else []
    if probe.packed is not None and probe.packed.proofs:
        tables.append(_compositions_table(probe, probe.packed))
    tables += failures_table(
        "Trials that failed, but not for lack of memory",
        (
            (_trial_shape(trial, probe.lengths.unit), trial.outcome, trial.error)
            for trial in failed
        ),
        of="batch shape",
        file="probe.json",
    )
    if probe.trials:
        tables.append(_trials_table(probe))
    tables.append(
        settings_table(
            "Device and settings", {**asdict(probe.device), **probe.settings}
        )
    )
    needs = training_notes(run)
    headline, *others = _sentences(probe, proves=run.main is probe)
    next_steps = []
    if run.main is probe:
        gives = "find the cheapest buckets"
        if probe.packed is not None:
            gives = "compare packers, and write the sampler's config"
        next_steps = [(f"batchtune sweep-buckets {run.manifest}{run.as_option}", gives)]
    return Section(
        title="Probe",
        sentences=[headline, *needs, *others],
        brief=3 + len(needs),
        tables=tables,
        warnings=list(_warnings(probe, failed, run.left_out)),
        next_steps=next_steps,
    )


def _sentences(probe: Probe, *, proves: bool) -> Iterator[str]:
    """Say what fits, how that was confirmed and measured, and if `proves`, which commands prove tables."""
    unit = probe.lengths.unit
    limit = format_length(probe.max_batch_length, unit)
    device = describe_device(probe.device)
    if probe.packed is not None:
        yield from _packed_sentences(probe, probe.packed)
    elif probe.unfinished:
        yield f"At least max_batch_length = {limit} fits, by an unfinished probe, measured on {device}."
    elif {point.closed_by for point in probe.frontier} == {"data"}:
        yield (
            f"max_batch_length = {limit} fits, measured on {device}. Larger batches were not tried: "
            f"{_why_no_larger(probe)}."
        )
    else:
        yield f"max_batch_length = {limit} is the most that is proven at every length, measured on {device}."
    if probe.why_unproven is not None:
        yield f"None of it is proven: {probe.why_unproven}."
    if probe.frontier:
        yield _batch_sizes(probe)
    confirmation = probe.confirmation
    if confirmation is not None and confirmation.shapes:
        outcome = "all fit"
        if confirmation.given_up:
            outcome = f"{format_number(confirmation.given_up)} did not fit"
        yield (
            f"Batches at the limit then ran interleaved ({counted(confirmation.shapes, 'shape')}, "
            f"{counted(confirmation.steps, 'step')}, {counted(confirmation.workers, 'worker')}): {outcome}."
        )
        if proves:
            yield "`batchtune tune` or `batchtune verify` proves tables of them in shuffled training."
    if any(point.target_length is not None for point in probe.frontier):
        yield "Each length was measured with the longest target of the examples up to that length."
    if probe.margin is not None:
        yield (
            f"{format_size(probe.margin.free_bytes)} are kept free: equal batches differ by up to "
            f"{format_size(probe.margin.spread_bytes)} in {counted(probe.margin.repetitions, 'repetition')}."
        )
    outcomes = Counter(trial.outcome for trial in probe.trials)
    ended = ", ".join(
        f"{outcomes[name]} {name}" for name in get_args(Outcome) if outcomes[name]
    )
    driver = ""
    if probe.device.driver:
        driver = f", driver {probe.device.driver}"
    allocator = ""
    if probe.device.allocator is not None:
        allocator = f", allocator {probe.device.allocator}"
    yield (
        f"Measured: {probe.workload.words} with torch {probe.device.torch}{driver}{allocator}, "
        f"in {counted(len(probe.trials), 'trial')} ({ended})."
    )
    if probe.packed is not None:
        yield from _packed_laws(probe.packed)
    fits = [
        f"{name} by {format_percent(model.relative_error)}"
        for name, model in _models(probe)
    ]
    if fits:
        yield f"The models miss the trials: {', '.join(fits)} (root mean square)."


def _why_no_larger(probe: Probe) -> str:
    """Say what ended a search in which no batch was too large."""
    cap = probe.settings.get("max_batch_size")
    if cap == max(point.batch_size for point in probe.frontier):
        return f"{counted(cap, 'example')} are the most allowed, by --max-batch-size or by steps that keep their own"
    return "the data has no more examples"


def _batch_sizes(probe: Probe) -> str:
    """Say how many examples fit of the longest and of the shortest lengths."""
    unit = probe.lengths.unit
    longest = probe.frontier[-1]
    largest = max(probe.frontier, key=lambda point: point.batch_size)
    examples = counted(longest.batch_size, "example")
    length = format_length(longest.length, unit)
    if largest.batch_size == longest.batch_size:
        return f"A batch holds {examples} of up to {length}."
    return (
        f"A batch holds from {examples} of {length} to {format_number(largest.batch_size)} of "
        f"{format_length(largest.length, unit)}."
    )


def _packed_sentences(probe: Probe, packed: PackedProbe) -> Iterator[str]:
    """Say how many tokens fit in a packed batch, why no more, and which batches prove it."""
    device = describe_device(probe.device)
    most = f"max_tokens = {packed.max_tokens:,}"
    if probe.unfinished:
        yield f"At least {most} fit in a packed batch, by an unfinished probe, measured on {device}."
    else:
        yield f"{most} is the most that fits in a packed batch, measured on {device}."
    reasons = {
        "memory": "the measured peaks leave too little room for more",
        "data": "that is all of the data, or of --max-tokens",
        "time": "the probe ended before more were tried",
    }
    reason = reasons.get(packed.closed_by, f"more tokens ended in {packed.closed_by}")
    if packed.oom_tokens is not None:
        reason += f"; {packed.oom_tokens:,} tokens ran out of memory"
    proofs = [probe.trials[index] for index in packed.proofs]
    proven = "No batch has proven it yet"
    if proofs:
        sizes = [trial.batch_size for trial in proofs]
        proven = (
            f"It was proven with the longest sequences, the shortest, mixes of both, and a random draw: "
            f"{min(sizes):,} to {counted(max(sizes), 'sequence')}"
        )
    yield f"{proven}. Why no more: {reason}."


def _packed_laws(packed: PackedProbe) -> Iterator[str]:
    """Say what the peak memory and the step time of a packed batch depend on."""
    for name, model, form in (
        ("Peak memory", packed.peak_bytes, format_size),
        ("Step time", packed.step_seconds, format_seconds),
    ):
        if model is None:
            continue
        parts = {
            "": model.constant,
            " a token": model.token,
            " a sequence": model.sequence,
        }
        terms = [f"{form(cost)}{of}" for of, cost in parts.items() if cost]
        if model.squared_token:
            # For one token it would be too little to read.
            cost = form(model.squared_token * 1e6)
            terms.append(f"{cost} for the square of 1,000 tokens of a sequence")
        yield (
            f"{name}: {' + '.join(terms)}, to within {format_percent(model.relative_error)} (at most "
            f"{format_percent(model.largest_error)})."
        )


def _models(probe: Probe) -> Iterator[tuple[str, CostModel]]:
    """Yield the fitted models with their names in sentences."""
    if probe.models.peak_bytes is not None:
        yield "peak memory", probe.models.peak_bytes
    if probe.models.step_seconds is not None:
        yield "step time", probe.models.step_seconds


def describe_device(device: Device) -> str:
    """Return the device and the limit that was enforced: `NVIDIA H200, limited to 126 GiB of 140 GiB`."""
    limit = f"{format_size(device.limit_bytes)} of {format_size(device.total_bytes)}"
    return f"{device.name}, limited to {limit}{device.whose}"


def _warnings(probe: Probe, failed: list[Trial], left_out: int) -> Iterator[str]:
    """Yield the probe's own warnings, then what its journal, frontier and models leave in doubt."""
    if left_out > 0:
        yield (
            f"The report leaves out {counted(left_out, 'line')} of trials.jsonl, after line {len(probe.trials)} (newer "
            "than probe.json, or cut short). The same `probe-oom` or `tune` goes on from there."
        )
    if failed:
        trials = f"{counted(len(failed), 'trial')} failed, but not for lack of memory"
        yield f"{trials} ({failed[0].outcome}): --full lists them with their messages."
    yield from map(with_full_stop, probe.warnings)
    if probe.frontier and probe.frontier[-1].length < probe.lengths.max * (1 - 1e-9):
        unit = probe.lengths.unit
        yield (
            f"The frontier ends at {format_length(probe.frontier[-1].length, unit)}, but the longest example has "
            f"{format_length(probe.lengths.max, unit)}. Leave longer examples out with --max-length, or give the "
            "probe more memory."
        )
    for name, model in _models(probe):
        if model.relative_error > _POOR_FIT:
            yield (
                f"The model of {name} misses the trials by {format_percent(model.relative_error)}: treat figures that "
                "build on it as rough. Probe again with --force on a machine that does nothing else."
            )


def _frontier_table(probe: Probe) -> Table:
    rows = []
    for point in probe.frontier:
        closed_by: str = point.closed_by
        if point.oom_batch_size is not None:
            closed_by += f" at {format_number(point.oom_batch_size)}"
        elif point.batch_size == probe.settings.get("max_batch_size"):
            closed_by = "max_batch_size"
        rows.append(
            {
                "length": format_length(point.length, probe.lengths.unit),
                "target length": known(point.target_length, format_number),
                "batch size": format_number(point.batch_size),
                "closed by": closed_by,
                "peak memory": known(point.peak_bytes, format_size),
                "step time": known(point.step_seconds, format_seconds),
                "trial": known(point.trial, str),
            }
        )
    return make_table(
        "Frontier: the largest batch, by length",
        rows,
        left=["closed by"],
        file="probe.json",
    )


def _compositions_table(probe: Probe, packed: PackedProbe) -> Table:
    rows = []
    for index in packed.proofs:
        trial = probe.trials[index]
        shape = trial.shape
        assert shape.sequences is not None
        rows.append(
            {
                "sequences": f"{trial.batch_size:,}",
                "longest": format_length(shape.length, probe.lengths.unit),
                "shortest": format_length(shape.sequences[-1], probe.lengths.unit),
                "sum of squares": f"{shape.squared_tokens:,}",
                "peak memory": known(trial.peak_bytes, format_size),
                "step time": known(trial.step_seconds, format_seconds),
                "trial": str(index),
            }
        )
    return make_table(
        f"Batches with {packed.max_tokens:,} tokens that fit",
        rows,
        left=[],
        file="probe.json",
    )


def _trial_shape(trial: Trial, unit: str | None) -> str:
    if trial.sequences is not None:
        return str(trial.shape)
    return format_shape(trial.batch_size, trial.length, unit)


def _trials_table(probe: Probe) -> Table:
    rows = [
        {
            "trial": str(trial.index),
            "batch shape": _trial_shape(trial, probe.lengths.unit),
            "target length": known(trial.target_length, format_number),
            "outcome": trial.outcome,
            "step time": known(trial.step_seconds, format_seconds),
            "peak memory": known(trial.peak_bytes, format_size),
            "held": known(trial.reserved_bytes, format_size),
            "took": format_seconds(trial.elapsed_seconds),
            "message": trial.error or ", ".join(trial.throttle_reasons or ()),
        }
        for trial in probe.trials
    ]
    return make_table(
        "Every trial",
        rows,
        left=["batch shape", "outcome", "message"],
        file="probe.json",
        most=_MAX_TRIALS,
        folded=True,
    )


def verification_section(run: RunResults) -> Section:
    """Return what to report on `verify.json`."""
    verification = run.verification
    assert verification is not None
    outcome = list(_outcome(verification))
    unit = verification.lengths.unit
    return Section(
        title="Verification",
        sentences=[*outcome, *_verification_facts(verification)],
        brief=len(outcome),
        tables=failures_table(
            "Batches that failed in the verification",
            (
                (
                    format_shape(failure.batch_size, failure.length, unit),
                    failure.outcome,
                    failure.error,
                )
                for failure in verification.failures
            ),
            of="batch shape",
            file="verify.json",
        ),
        warnings=list(_verification_warnings(run, verification)),
    )


def _outcome(verification: Verification) -> Iterator[str]:
    """Say whether it holds and why, most important first, and if not, what to do instead."""
    if verification.holds:
        steps = counted(verification.steps, "shuffled batch")
        if verification.of_stream:
            steps = f"{counted(verification.steps, 'batch')} of the stream"
        retries = cache_emptied(verification.alloc_retries)
        yield f"Verified: {steps} without running out of memory{retries}; {_time(verification)}."
        return
    if verification.failures:
        yield "The verification does not hold."
    else:
        yield "No batch ran out of memory, but the verification does not hold."
    yield from map(with_full_stop, verification.reasons or ["No reason is given"])
    if verification.failures and verification.of_stream:
        yield "Probe again with --force, or give more memory."
    elif verification.failures:
        yield "`batchtune tune` rules out what failed, and goes on."


def _time(verification: Verification) -> str:
    if verification.measured_epoch_seconds is None:
        return "times were not measured"
    takes = (
        f"an epoch takes {format_seconds(verification.measured_epoch_seconds)} measured"
    )
    if verification.estimated_epoch_seconds is None or verification.time_ratio is None:
        return f"{takes}, and no estimate is known"
    error = ""
    if verification.time_ratio_error is not None:
        error = f" ± {verification.time_ratio_error:.2f}"
    estimated = format_seconds(verification.estimated_epoch_seconds)
    return f"{takes} against {estimated} estimated ({verification.time_ratio:.2f}{error} times)"


def _verification_facts(verification: Verification) -> Iterator[str]:
    """Say what was run where, and what it showed of the memory."""
    kind = "shuffled ones"
    if verification.buffer_size is not None:
        kind = f"of the stream ({verification.algorithm} with a buffer of {format_number(verification.buffer_size)})"
    yield (
        f"Ran {counted(verification.worst_steps, 'worst batch')}, then "
        f"{format_number(verification.steps)} of {format_number(verification.planned_steps)} {kind}; an epoch has "
        f"{format_number(verification.epoch_batches)}."
    )
    if verification.processes > 1:
        yield (
            f"Other shuffles ran in {counted(verification.processes - 1, 'further process')}: "
            f"{counted(verification.restarted_steps, 'step')} passed."
        )
    if verification.replayed_steps:
        yield (
            f"Their memory requests were replayed in {format_number(verification.replayed_processes)} other orders: "
            f"{counted(verification.replayed_steps, 'step')} passed."
        )
    if verification.planned_pairs:
        yield (
            f"One shape followed another on an emptied cache {format_number(verification.pairs)} of "
            f"{format_number(verification.planned_pairs)} times without running out of memory."
        )
    yield f"Measured: {verification.workload.words} on {describe_device(verification.device)}."
    memory = {
        "in use": verification.peak_bytes,
        "held by the allocator": verification.reserved_bytes,
        "more in use at the end than at first": verification.rest_growth_bytes,
    }
    measured = [
        f"{format_size(size)} {what}"
        for what, size in memory.items()
        if size is not None and size > 0
    ]
    if measured:
        yield f"Memory: {', '.join(measured)}."


def batches_in(made: SamplerConfig | Verification) -> list[Any]:
    """Return what says which batches are made of padded lengths: equal for equal batches."""
    return [
        made.bucket_boundaries,
        made.bucket_batch_sizes,
        made.pool_size,
        made.batch_overhead,
    ]


def is_current(run: RunResults, verified: Verification) -> bool:
    """Return whether the verification is of the batches of sampler.yaml as it is now, or of the recommended ones."""
    if run.config and not verified.of_stream:
        return batches_in(run.config) == batches_in(verified)
    return mismatch(run) is None


def mismatch(run: RunResults) -> str | None:
    """Say how the verification's batches differ from the recommended ones, and what to do.

    None if they agree, or if nothing is known of one of them. Any row that `stream.yaml` can hold will do if the
    recommended one is SpeechBrain's, which it can't.
    """
    verified = run.verification
    if verified is None:
        return None
    swept = run.stream if verified.of_stream else run.sweep
    if swept is None:
        return None
    if verified.lengths.fingerprint != swept.lengths.fingerprint:
        return (
            "The verification used other lengths than the sweep, so it says nothing about these. Run `batchtune "
            "verify` again."
        )
    rows: Sequence[Row | StreamRow | None] = [swept.recommended_row]
    if isinstance(swept, StreamSweep) and (
        swept.recommended_row is None or swept.recommended_row.by_speechbrain
    ):
        rows = swept.rows
    if any(row is not None and _ran(verified, row) for row in rows):
        return None
    return (
        "The verification ran other batches than the sweep recommends: those of an earlier sweep, or of an edited "
        "config. A proof in the sweep is not of these. Sweep again, and run `batchtune verify`."
    )


def _ran(verified: Verification, row: AnyRow) -> bool:
    """Return whether a row's batches are those that were verified."""
    if (
        row.boundaries != verified.bucket_boundaries
        or row.batch_sizes != verified.bucket_batch_sizes
    ):
        return False
    if isinstance(row, Row):
        return (
            row.pool_size == verified.pool_size
            and row.batch_overhead == verified.batch_overhead
        )
    return (
        row.algorithm == verified.algorithm
        and row.buffer_size == verified.buffer_size
        and row.max_padding_ratio == verified.max_padding_ratio
    )


def _verification_warnings(run: RunResults, verified: Verification) -> Iterator[str]:
    """Yield how it differs from the recommendation, its own warnings, and how it differs from the probe."""
    difference = mismatch(run)
    if difference is not None:
        yield difference
    yield from map(with_full_stop, verified.warnings)
    probe = run.probe
    if probe is None:
        return
    compared = {
        verified.workload.words: probe.workload.words,
        describe_device(verified.device): describe_device(probe.device),
    }
    for now, before in compared.items():
        if now != before:
            yield f"The verification ran {now}, the probe {before}: one says little about the other. {_AGAIN}"
    yield from settings_differences(probe.device, verified.device)


# What a recorded training showed, against what the probe and the sweep predict.


def read_recording(
    path: Path, probe: Probe | None, lengths: LengthsSummary | None
) -> Training:
    """Return what the last recording of `training.jsonl` shows. Raises ResultError if the file can't be read."""
    recording = last_recording(path)
    ooms = [step.oom for step in recording.steps if step.oom is not None]
    figures: dict[str, Any] = {
        "device": recording.start.device,
        "steps": len(recording.steps) - len(ooms),
        "ooms": len(ooms),
        "first_oom": next(iter(ooms), None),
        "damaged_lines": recording.damaged_lines,
    }
    timed = [step for step in recording.steps if step.seconds is not None]
    timed_shapes = _shapes(timed)
    if timed_shapes:
        figures["mean_step_seconds"] = fmean(step.seconds or 0.0 for step in timed)
        figures["peak_bytes"] = max(step.peak_bytes or 0 for step in timed) or None
    is_padded = all(shape.sequences is None for shape in timed_shapes)
    if timed_shapes and is_padded and probe is not None:
        figures |= _predictions(timed_shapes, probe, len(timed))
    # An epoch has steps without a time too, such as the first of a process.
    shapes = _shapes([step for step in recording.steps if step.oom is None])
    if shapes and lengths is not None:
        epochs = sum(shape.batch_size for shape in shapes) / lengths.count
        padded_length = sum(shape.padded_length for shape in shapes)
        padding_ratio = 1 - epochs * lengths.total / padded_length
        figures["epoch_batches"] = len(shapes) / epochs
        figures["padding_ratio"] = max(0.0, padding_ratio)
    return Training(**figures)


def _shapes(steps: Iterable[TrainingStep]) -> list[BatchShape]:
    """Return the batches of the steps."""
    return list(itertools.chain.from_iterable(step.batches for step in steps))


def _predictions(
    shapes: Sequence[BatchShape], probe: Probe, steps: int
) -> dict[str, float]:
    """Return what the probe predicts of steps of these batches, unless it needs targets that are not known."""
    from batchtune.epochs import EpochShapes
    from batchtune.epochs.cost_model import predict
    from batchtune.epochs.measured_costs import costs_of

    with_targets = all(shape.target_length is not None for shape in shapes)
    batches = EpochShapes.of(shapes, with_targets=with_targets)
    predictions: dict[str, float] = {}
    step_seconds = costs_of(probe).step_seconds
    memory = probe.models.peak_bytes
    with contextlib.suppress(ValueError):
        if memory is not None:
            sizes = batches.batch_sizes
            largest = predict(memory, sizes, batches.lengths, batches.targets).max()
            predictions["predicted_peak_bytes"] = round(float(largest))
        if step_seconds is not None:
            total = batches.seconds(step_seconds).sum()
            predictions["predicted_step_seconds"] = float(total) / steps
    return predictions


def training_section(run: RunResults) -> Section:
    """Return what to report on `training.jsonl`."""
    training = run.training
    assert training is not None
    outcome = ""
    warnings = []
    if training.steps:
        outcome = ", without running out of memory"
    if training.ooms:
        outcome = f", and out of memory {counted(training.ooms, 'time')}"
        warnings.append(
            f"The recorded training ran out of memory ({training.first_oom}): run `batchtune tune` again as before in "
            "this run folder, and it stays below those batches."
        )
    if training.damaged_lines:
        warnings.append(
            f"{counted(training.damaged_lines, 'line')} of training.jsonl can't be read: a disk was full, or the power "
            "failed. The report leaves that out."
        )
    return Section(
        title="Recorded training",
        sentences=[
            f"Recorded training: {counted(training.steps, 'step')} on {training.device}{outcome}."
        ],
        tables=[_comparison(run, training)],
        warnings=warnings,
    )


def _comparison(run: RunResults, training: Training) -> Table:
    """Lay out what was predicted next to what was measured: of its batches, and of an epoch as recommended."""
    batches: float | None = None
    padding: float | None = None
    if run.sweep is not None and run.sweep.recommended_row is not None:
        batches = run.sweep.recommended_row.batches
        padding = run.sweep.recommended_row.padding_ratio
    rows = [
        _row(
            "a step",
            training.predicted_step_seconds,
            training.mean_step_seconds,
            format_seconds,
        ),
        _row(
            "the largest peak",
            training.predicted_peak_bytes,
            training.peak_bytes,
            format_size,
        ),
        _row("batches of an epoch", batches, training.epoch_batches, format_number),
        _row("padding", padding, training.padding_ratio, format_percent),
    ]
    title = "Predicted (an epoch: as recommended) and measured in training"
    return make_table(title, rows, left=["of"])


def _row(
    name: str, predicted: V | None, measured: V | None, words: Callable[[V], str]
) -> Cells:
    return {
        "of": name,
        "predicted": known(predicted, words),
        "measured": known(measured, words),
    }
