"""A report's warnings, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.verification import verification_warnings
from batchtune.results import Probe, Row, Sweep, unproven_sizes
from batchtune.trust import WORST_TIME_ERROR
from batchtune.units import format_length, format_number, format_percent, with_full_stop

# Less than this part of what fits is worth a word; a rounded limit is not.
_LOW_LIMIT = 0.95
# A fit that misses its own measurements by more can't be trusted between them.
_POOR_FIT = 0.1
_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."


def warning_sentences(results: RunResults) -> list[str]:
    """Say what the results show together, then the probe's own warnings, then the sweep's; each once.

    First comes what concerns the recommended batches, last what concerns tables that nobody need take.
    """
    sweep, probe = results.sweep, results.probe
    warnings = list(verification_warnings(results))
    row = sweep.recommended_row if sweep is not None else None
    sizes = None if row is None else unproven_sizes(row)
    if sweep is not None and row is not None and sizes is not None:
        warnings.append(f"{sizes[0].upper()}{sizes[1:]}: {_why_unproven(sweep, row, probe)}")
    elif sweep is not None and probe is not None:
        warnings += _limit_warnings(probe, sweep)
    if probe is not None:
        warnings += _probe_warnings(probe)
    if sweep is not None:
        warnings += map(with_full_stop, sweep.warnings)
    return list(dict.fromkeys(warnings))


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


def _limit_warnings(probe: Probe, sweep: Sweep) -> Iterator[str]:
    used, measured = sweep.max_batch_length, probe.max_batch_length
    took, fits = (format_length(limit, sweep.lengths.unit) for limit in (used, measured))
    differs = f"The sweep took max_batch_length = {took}, but the probe measured that {fits} fits"
    if used > measured * (1 + 1e-9):
        yield f"{differs}: training may run out of memory. Sweep again without --max-batch-length."
    elif used < measured * _LOW_LIMIT:
        yield f"{differs}: memory is left unused. Sweep again without --max-batch-length to use it."


def _probe_warnings(probe: Probe) -> Iterator[str]:
    yield from map(with_full_stop, probe.warnings)
    if probe.frontier and probe.frontier[-1].length < probe.lengths.max * (1 - 1e-9):
        ends, longest = (format_length(x, probe.lengths.unit) for x in (probe.frontier[-1].length, probe.lengths.max))
        yield (
            f"The frontier ends at {ends}, but the longest example has {longest}. Leave longer examples out with "
            "--max-length, or give the probe more memory."
        )
    for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
        if model is None or model.relative_error <= _POOR_FIT:
            continue
        misses = f"The model of {name} misses the trials by {format_percent(model.relative_error)}"
        idle = "on a machine that does nothing else."
        if model is probe.models.step_seconds and model.relative_error > WORST_TIME_ERROR:
            yield f"{misses}, so no times are estimated and tables are compared by batches. Probe again {idle}"
        else:
            yield f"{misses}: take figures that build on it as rough, and probe again {idle}"
