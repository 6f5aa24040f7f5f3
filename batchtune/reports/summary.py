"""A report's sentences, as a person can read them aloud: what to set, what it saves, warnings, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from batchtune.reports.comparisons import advantage, batches_words, is_better, padding, savings
from batchtune.reports.loaders import (
    brief_loader_sentences,
    loader_headline,
    loader_sentences,
    loader_steps,
    loader_warnings,
)
from batchtune.reports.pools import pool_sentences
from batchtune.reports.rows import compared, fixed_baseline, swept_kinds
from batchtune.reports.run import RunResults
from batchtune.reports.streams import (
    brief_stream_sentences,
    stream_headline,
    stream_sentences,
    stream_steps,
    stream_warnings,
)
from batchtune.reports.trade_offs import trade_off_sentences
from batchtune.reports.verification import verification_sentences, verification_warnings
from batchtune.results import (
    SAMPLER_FILE,
    Device,
    Drift,
    Probe,
    Row,
    StreamSweep,
    Sweep,
    Verdict,
    unproven_sizes,
)
from batchtune.trust import WORST_TIME_ERROR
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

# Less than this part of what fits is worth a word; a rounded limit is not.
_LOW_LIMIT = 0.95
# A fit that misses its own measurements by more can't be trusted between them.
_POOR_FIT = 0.1
_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."


def summary_sentences(results: RunResults) -> list[str]:
    """Say what to set and what it saves, most important first; the same in every format.

    The first is a headline: short, and enough where there is room for one sentence only.
    """
    probe, sweep, stream = results.probe, results.sweep, results.stream
    frontier = _about_frontier(probe) if probe is not None else []
    said, evidence = _headlines(results), _evidence(results)
    loader = [] if results.loader is None else list(loader_sentences(results.loader))
    about_loader = loader if results.main is results.loader else [f"Loader: {sentence}" for sentence in loader]
    if probe is not None and probe is results.main:
        sweep_next = "`batchtune sweep-buckets` finds the buckets that waste least with it."
        return [*said, *evidence, *frontier, sweep_next, *about_loader]
    said += evidence if sweep is None else _about_sweep(sweep, evidence)
    about_stream = stream_sentences(stream) if stream is not None else []
    said += about_stream if sweep is None else [f"Stream: {sentence}" for sentence in about_stream]
    return [*said, *([_limit(probe)] if probe is not None else []), *frontier, *about_loader]


def _about_sweep(sweep: Sweep, evidence: list[str]) -> list[str]:
    """Say what the recommended row saves, with the evidence for it, and why it is recommended."""
    row, fixed = sweep.recommended_row, fixed_baseline(sweep)
    if row is not None:
        said = [*savings(sweep, row, compared(sweep), swept_kinds(sweep)), *evidence, *_waste(sweep, row)]
        said += [f"Why: {with_full_stop(sweep.reason)}"] if sweep.reason else []
        said += pool_sentences(sweep, row) if row.pool_size is not None else []
        return [*said, *trade_off_sentences(sweep)]
    if fixed is None:
        return evidence
    size = format_number(fixed.batch_size)
    return [f"A fixed batch size of {size} needs {batches_words(fixed.batches)} for an epoch.", *evidence]


def brief_sentences(results: RunResults) -> list[str]:
    """Say what to set and what speaks for it; a table compares the numbers."""
    if results.verification is not None and not results.verification.holds:
        return _headlines(results, troubles_only=True)  # what to set, and what that saves, is then no news
    frontier = _about_frontier(results.probe) if results.probe is not None and results.main is results.probe else []
    stream = brief_stream_sentences(results.stream) if results.stream is results.main else []
    loader = brief_loader_sentences(results.loader) if results.loader is results.main else []
    return [*_headlines(results), *_evidence(results), *frontier, *stream, *loader]


def describe_device(device: Device) -> str:
    """Return the device and the limit that was enforced: `NVIDIA H200, limited to 126 GiB of 140 GiB`."""
    return f"{device.name}, limited to {format_size(device.limit_bytes)} of {format_size(device.total_bytes)}"


def _headlines(results: RunResults, *, troubles_only: bool = False) -> list[str]:
    """Say what does not hold, as all else depends on it; then what to set; then how far other lengths differ."""
    sentences = [verdict_sentence(results.verdicts)] if results.verdicts else []
    if results.verification is not None and not results.verification.holds:
        sentences += verification_sentences(results.verification)
    if results.sweep is not None and not troubles_only:
        sentences.append(_what_to_set(results.sweep))
    if results.stream is not None and not troubles_only:
        sentences.append(stream_headline(results.stream))
    if results.probe is results.main and not troubles_only:
        sentences.append(_limit(results.probe))
    if results.loader is not None and not troubles_only:
        sentences.append(loader_headline(results.loader))
    if results.drift is not None:
        row = results.sweep.recommended_row if results.sweep is not None else None
        sentences += drift_sentences(results.drift, row)
    return sentences


def _evidence(results: RunResults) -> list[str]:
    """Say what was run for real, how much memory that leaves, and whether the user's own config does as well."""
    sweep, probe, verification = results.sweep, results.probe, results.verification
    said = verification_sentences(verification) if verification is not None and verification.holds else []
    if sweep is None or (row := sweep.recommended_row) is None:
        return said
    if (sizes := unproven_sizes(row)) is not None:
        said.append(f"{sizes[0].upper()}{sizes[1:]}: the warnings say why.")
    elif row.unproven is not None:
        left = "; how much memory that leaves free is not known"
        if probe is not None and probe.margin is not None and (free := probe.margin.bytes):
            share = format_percent(free / probe.device.limit_bytes)
            left = f", and leaves {format_size(free)} ({share} of the limit) free"
        said.append(f"Every batch size was run, or is no larger than one that was{left}.")
    now = sweep.current
    if now is not None and sweep.current_fits is not False:  # a warning says what does not fit
        timed = row.estimated_epoch_seconds is not None and now.estimated_epoch_seconds is not None
        is_equal = timed and row.equal_to_best and now.equal_to_best  # the headline says so
        if not is_equal and is_better(now, row):
            what = "table" if row.pool_size is None else "pools"
            said.append(f"Your current config is better than the recommended {what}: keep it.")
    return said


def _what_to_set(sweep: Sweep) -> str:
    """Say it, and compare it with the first of the others: `: 1.34 times faster than your current config`."""
    row = sweep.recommended_row
    if row is None and swept_kinds(sweep) == "pools":
        return with_full_stop(sweep.reason[:1].upper() + sweep.reason[1:]) or "No pools are recommended."
    if row is None:
        return f"No bucket table is recommended{with_full_stop(f': {sweep.reason}' if sweep.reason else '.')}"
    count = len(row.boundaries)
    what = f"{'1 bucket' if count == 1 else f'{format_number(count)} buckets'} ({row.strategy})"
    if row.pool_size is not None:
        what = row.name
    # A table of the frontier has batches beyond max_batch_length, which is what fits at every length.
    limit = f"max_batch_length = {format_length(sweep.max_batch_length, sweep.lengths.unit)}"
    sizes = "measured batch sizes" if row.sizing == "frontier" else limit
    return f"Set {what} with {sizes}{advantage(row, compared(sweep))}."


def _waste(sweep: Sweep, row: Row) -> list[str]:
    """Say how far from the bound it is, and how much is padding."""
    bound, seconds = sweep.lower_bound, row.estimated_epoch_seconds
    what, ratios = [batches_words(bound.batches)], [row.batches / bound.batches]
    if bound.estimated_epoch_seconds and seconds:
        what.append(f"an estimated {format_seconds(bound.estimated_epoch_seconds)}")
        ratios.append(seconds / bound.estimated_epoch_seconds)
    above = " and ".join(format_percent(max(0.0, ratio - 1)) for ratio in ratios)
    nothing = "no bucket table" if swept_kinds(sweep) == "tables" else "neither bucket tables nor pools"
    return [
        f"The bound that {nothing} can beat is {' and '.join(what)}: this is {above} above it.",
        padding(row, compared(sweep)),
    ]


def _limit(probe: Probe) -> str:
    limit = format_length(probe.max_batch_length, probe.lengths.unit)
    device = describe_device(probe.device)
    return f"max_batch_length = {limit} is the most that fits at every length, measured on {device}."


def _about_frontier(probe: Probe) -> list[str]:
    unit, confirmation, sentences = probe.lengths.unit, probe.confirmation, []
    if len(probe.frontier) > 1:
        largest, longest = max(probe.frontier, key=lambda point: point.batch_size), probe.frontier[-1]
        fits, more = format_number(longest.batch_size), format_number(largest.batch_size)
        ends = format_length(longest.length, unit), format_length(largest.length, unit)
        sentences.append(
            f"A batch holds from {fits} examples of {ends[0]} to {more} of {ends[1]}."
            if largest.batch_size > longest.batch_size
            else f"A batch holds {fits} examples, whatever their length."
        )
    if any(point.target_length is not None for point in probe.frontier):
        sentences.append("Each length was measured with the longest target that occurs at or below it.")
    if confirmation is not None and confirmation.shapes:
        shapes, steps = format_number(confirmation.shapes), format_number(confirmation.steps)
        which = "The batch at the limit was" if confirmation.shapes == 1 else f"The {shapes} batches at the limit were"
        again = f" after {counted(confirmation.given_up, 'larger one')} had failed" if confirmation.given_up else ""
        processes = f"{steps} steps in {confirmation.workers} processes"
        sentences.append(f"{which} run once more in turns, {processes}, and fit{again}.")
    return sentences


def verdict_sentence(verdicts: Sequence[Verdict]) -> str:
    """Say how the run stands up to all rules, in one sentence."""
    fails = sum(verdict.outcome == "fails" for verdict in verdicts)
    errors = sum(verdict.outcome == "error" for verdict in verdicts)
    if not fails and not errors:
        return "The rule holds." if len(verdicts) == 1 else f"All {len(verdicts)} rules hold."
    if len(verdicts) == 1:
        return "The rule fails." if fails else "The rule can't be judged."
    parts = [f"{fails} {'fails' if fails == 1 else 'fail'}"] if fails else []
    parts += [f"{errors} can't be judged"] if errors else []
    return f"Of {counted(len(verdicts), 'rule')}, {' and '.join(parts)}."


def drift_sentences(drift: Drift, row: Row | None = None) -> list[str]:
    """Say how far the other lengths are from those of the run, and what that costs with the recommended row."""
    examples = counted(drift.lengths.count, "example")
    if not drift.changed:
        return [f"The manifest has the same lengths as the run: {examples}."]
    beyond = f"{counted(drift.beyond, 'example')} {'is' if drift.beyond == 1 else 'are'}" if drift.beyond else "none is"
    times, tuned, anew = "", "the table costs", "a newly tuned one"
    if row is not None and row.pool_size is not None:
        tuned, anew = "the pools cost", "newly tuned ones of that size"
    if drift.epoch_seconds is not None and drift.retuned_epoch_seconds is not None:
        ours, retuned = format_seconds(drift.epoch_seconds), format_seconds(drift.retuned_epoch_seconds)
        times = f"{ours} against {retuned} an epoch, "
    return [
        f"The lengths of the manifest ({examples}) differ from those of the run: their distributions differ by "
        f"{drift.distance:.3f} (Kolmogorov-Smirnov, to within 0.001), and {beyond} beyond the last boundary.",
        f"On them {tuned} {format_percent(drift.stale)} more than {anew}: {times}"
        f"{drift.batches:,} batches against {drift.retuned_batches:,}.",
    ]


def next_steps(results: RunResults) -> Iterator[tuple[str, str]]:
    """Pair each command, or file, with what it is for, in the order to take them."""
    if results.sweep is not None or results.probe is results.main:
        yield from _sweep_steps(results)
    yield from stream_steps(results, _own_workload(results))
    yield from loader_steps(results)
    yield f"batchtune report{results.as_argument} --full", "all tables (-o report.html: charts)"


def _sweep_steps(results: RunResults) -> Iterator[tuple[str, str]]:
    sweep, verification = results.sweep, results.verified(of_stream=False)
    config = str(results.folder / SAMPLER_FILE)
    folder, run = results.as_argument, results.as_option
    verify = f"batchtune verify{folder} MANIFEST{_own_workload(results)}"
    if sweep is None:
        yield f"batchtune sweep-buckets MANIFEST{run}", "find the buckets that waste least"
    elif (row := sweep.recommended_row) is None:
        if swept_kinds(sweep) == "pools":
            yield f"batchtune sweep-buckets MANIFEST{run}", "compare bucket tables, too"
        else:
            yield f"batchtune sweep-buckets MANIFEST --num-buckets 2:60{run}", "compare other numbers of buckets"
    elif verification is not None and not verification.holds:
        # Without a proposal memory was not what failed: the reasons say what to do.
        if verification.proposal is not None and verification.proposal.verified:
            yield config, "set the safe sizes there"
        elif verification.proposal is not None:
            yield f"batchtune tune MANIFEST --workload W --force{run}", "probe anew"
        yield verify, "run these batches again"
    else:
        in_pools = row.pool_size is not None
        yield config, f"the config, for {'Pooled' if in_pools else 'Bucket'}BatchSampler"
        if results.probe is None:
            yield f"batchtune probe-oom MANIFEST --workload W{run}", "measure what fits"
        elif verification is None:
            yield verify, "run these batches for real"
        others = "pools, or the best table for others" if in_pools else "the same for SpeechBrain, NeMo, ..."
        yield f"batchtune export{folder} --to FRAMEWORK", others


def _own_workload(results: RunResults) -> str:
    """Return the flags that name the user's own training step: `verify` runs none that only a file names.

    A record from a stranger may name any module's function: only what looks like a file of a training is repeated.
    """
    workload = results.probe.workload if results.probe else None
    if workload is None or workload.spec.startswith("builtin:"):
        return ""
    spec = shlex.quote(workload.spec) if ".py:" in workload.spec else "W"
    return f" --workload {spec}{' --set ...' if workload.options else ''}"


def warning_sentences(results: RunResults, *, brief: bool = False) -> list[str]:
    """Say what the results show together, then the probe's own warnings, then the loader's and the sweep's; each once.

    First comes what concerns the recommended batches, last what concerns tables that nobody need take.
    """
    return list(dict.fromkeys(_warnings(results, brief=brief)))


def _warnings(results: RunResults, *, brief: bool) -> Iterator[str]:
    sweep, stream, probe = results.sweep, results.stream, results.probe
    row = sweep.recommended_row if sweep is not None else None
    sizes = None if row is None else unproven_sizes(row)
    yield from verification_warnings(results)
    if sweep is not None and row is not None and sizes is not None:
        yield f"{sizes[0].upper()}{sizes[1:]}: {_why_unproven(sweep, row, probe)}"
    elif sweep is not None and probe is not None:
        yield from _limit_warnings(sweep, probe, "The sweep", "Sweep")
    if stream is not None and probe is not None and not (stream.recommended_row and stream.recommended_row.unproven):
        yield from _limit_warnings(stream, probe, "The stream's sweep", "Sweep the stream")
    if probe is not None:
        yield from map(with_full_stop, probe.warnings)
        unit = probe.lengths.unit
        if probe.frontier and (end := probe.frontier[-1].length) < probe.lengths.max * (1 - 1e-9):
            longest = format_length(probe.lengths.max, unit)
            yield (
                f"The frontier ends at {format_length(end, unit)}, but the longest example has {longest}. Leave longer "
                "examples out with --max-length, or give the probe more memory."
            )
        for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
            error = 0.0 if model is None else model.relative_error
            misses = f"The model of {name} misses the trials by {format_percent(error)}"
            idle = "on a machine that does nothing else."
            if name == "step time" and error > WORST_TIME_ERROR:
                yield f"{misses}, so no times are estimated and tables are compared by batches. Probe again {idle}"
            elif error > _POOR_FIT:
                yield f"{misses}: take figures that build on it as rough, and probe again {idle}"
    if stream is not None:
        yield from stream_warnings(stream)
    if results.loader is not None:
        yield from loader_warnings(results.loader, brief=brief)
    if sweep is not None:
        yield from map(with_full_stop, sweep.warnings)


def _limit_warnings(swept: Sweep | StreamSweep, probe: Probe, name: str, verb: str) -> Iterator[str]:
    """Warn if a sweep took another max_batch_length than was measured."""
    used, measured, unit = swept.max_batch_length, probe.max_batch_length, swept.lengths.unit
    took, fits = format_length(used, unit), format_length(measured, unit)
    differs = f"{name} took max_batch_length = {took}, but the probe measured that {fits} fits"
    if used > measured * (1 + 1e-9):
        yield f"{differs}: training may run out of memory. {verb} again without --max-batch-length."
    elif used < measured * _LOW_LIMIT:
        yield f"{differs}: memory is left unused. {verb} again without --max-batch-length to use it."


def _why_unproven(sweep: Sweep, row: Row, probe: Probe | None) -> str:
    """Say why batch sizes of the recommended row are not proven, and what to do."""
    if probe is None or not probe.frontier:
        return f"no batch as large was run, alone and in turns with the others. {_PROBE_AGAIN}"
    if not probe.is_proven:
        return (
            f"batchtune {probe.meta.batchtune} interpolated between the lengths that it measured, ran few batches in "
            f"turns with the others and left no margin. {_PROBE_AGAIN}"
        )
    unit, longest, end = sweep.lengths.unit, probe.frontier[-1].length, row.boundaries[-1]
    cap, multiple = probe.settings.get("max_batch_size"), sweep.settings.get("multiple_of")
    if isinstance(cap, int) and max(row.batch_sizes) > cap:
        return (
            f"no batch of more than {cap:,} examples was run (--max-batch-size). Sweep with --max-batch-size {cap} "
            "too, or run `batchtune probe-oom` without it, with --force."
        )
    if row.sizing == "length" and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        return (
            f"max_batch_length = {format_length(sweep.max_batch_length, unit)} is more than the "
            f"{format_length(probe.max_batch_length, unit)} that was measured to fit. Sweep again without "
            "--max-batch-length."
        )
    if isinstance(multiple, (int, float)) and end > longest >= probe.lengths.max:
        return (
            f"padding to a multiple of {format_number(multiple)} makes batches up to {format_length(end, unit)} long, "
            f"and none longer than {format_length(longest, unit)} was run. `batchtune tune` with --multiple-of and "
            "--force probes batches as they are padded; or leave the longest examples out with --max-length."
        )
    if longest < probe.lengths.max:
        return (
            f"no batch with examples longer than {format_length(longest, unit)} passed. Leave longer ones out with "
            "--max-length, or give the probe more memory."
        )
    return (
        "the probe ran no batch as large, alone and in turns with the others. Run `batchtune sweep-buckets` again; if "
        "that does not help, `batchtune probe-oom` with --force."
    )
