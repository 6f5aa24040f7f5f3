"""What the reader of a report should look after, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.reports.run import RunResults
from batchtune.reports.verification import verification_warnings
from batchtune.results import Probe, Row, Sweep, unproven_sizes
from batchtune.trust import WORST_TIME_ERROR
from batchtune.units import format_length, format_number, format_percent, with_full_stop

# Less than this part of what fits is worth a word; a rounded limit is not.
_LOW_LIMIT = 0.95

_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."

# A fit that misses its own measurements by more can't be trusted between them.
_POOR_FIT = 0.1


def warning_sentences(results: RunResults) -> list[str]:
    """Say what the results show side by side, the probe's own warnings, then the sweep's; each once.

    First comes what concerns the recommended batches, last what concerns tables that nobody need take.
    """
    warnings: list[str] = list(verification_warnings(results))
    if results.sweep is not None:
        not_run = _not_run(results.sweep, results.probe)
        warnings += not_run
        if results.probe is not None and not not_run:
            warnings += _limit_warnings(results.probe, results.sweep)
    if results.probe is not None:
        warnings += _probe_warnings(results.probe)
    if results.sweep is not None:
        warnings += [with_full_stop(text) for text in results.sweep.warnings]
    return list(dict.fromkeys(warnings))


def _not_run(sweep: Sweep, probe: Probe | None) -> list[str]:
    """Say which batch sizes of the recommended row are not proven, why, and what to do; nothing where all are."""
    row = sweep.recommended_row
    sizes = None if row is None else unproven_sizes(row)
    if row is None or sizes is None:
        return []
    why, remedy = _why_not_run(sweep, row, probe)
    return [f"{sizes[0].upper()}{sizes[1:]}: {why}. {remedy}"]


def _why_not_run(sweep: Sweep, row: Row, probe: Probe | None) -> tuple[str, str]:
    if probe is None or not probe.frontier:
        return "no batch as large was run, alone and in turns with the others", _PROBE_AGAIN
    if not probe.is_proven:
        return (
            f"batchtune {probe.meta.batchtune} interpolated between the lengths that it measured, ran few batches in "
            "turns with the others and left no margin",
            _PROBE_AGAIN,
        )
    unit, longest = sweep.lengths.unit, probe.frontier[-1].length
    cap, multiple = probe.settings.get("max_batch_size"), sweep.settings.get("multiple_of")
    if isinstance(cap, int) and max(row.batch_sizes) > cap:
        return (
            f"no batch of more than {cap:,} examples was run (--max-batch-size)",
            f"Sweep with --max-batch-size {cap} too, or run `batchtune probe-oom` without it, with --force.",
        )
    if row.sizing == "length" and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        return (
            f"max_batch_length = {format_length(sweep.max_batch_length, unit)} is more than the "
            f"{format_length(probe.max_batch_length, unit)} that was measured to fit",
            "Sweep again without --max-batch-length.",
        )
    if isinstance(multiple, (int, float)) and row.boundaries[-1] > longest >= probe.lengths.max:
        return (
            f"padding to a multiple of {format_number(multiple)} makes batches up to "
            f"{format_length(row.boundaries[-1], unit)} long, and none longer than {format_length(longest, unit)} was "
            "run",
            "`batchtune tune` with --multiple-of and --force probes batches as they are padded; or leave the longest "
            "examples out with --max-length.",
        )
    if longest < probe.lengths.max:
        return (
            f"no batch with examples longer than {format_length(longest, unit)} passed",
            "Leave longer ones out with --max-length, or give the probe more memory.",
        )
    return (
        "the probe ran no batch as large, alone and in turns with the others",
        "Run `batchtune sweep-buckets` again; if that does not help, `batchtune probe-oom` with --force.",
    )


def _probe_warnings(probe: Probe) -> Iterator[str]:
    yield from (with_full_stop(text) for text in probe.warnings)
    if probe.frontier and probe.frontier[-1].length < probe.lengths.max * (1 - 1e-9):
        unit = probe.lengths.unit
        yield (
            f"The frontier ends at {format_length(probe.frontier[-1].length, unit)}, but the longest example "
            f"has {format_length(probe.lengths.max, unit)}. Leave longer examples out with --max-length, or "
            "give the probe more memory."
        )
    for name, model in (("peak memory", probe.models.peak_bytes), ("step time", probe.models.step_seconds)):
        if name == "step time" and model is not None and model.relative_error > WORST_TIME_ERROR:
            yield (
                f"The model of step time misses the trials by {format_percent(model.relative_error)}, so no times are "
                "estimated and tables are compared by batches. Probe again on a machine that does nothing else."
            )
        elif model is not None and model.relative_error > _POOR_FIT:
            yield (
                f"The model of {name} misses the trials by {format_percent(model.relative_error)}: take "
                "figures that build on it as rough, and probe again on a machine that does nothing else."
            )


def _limit_warnings(probe: Probe, sweep: Sweep) -> Iterator[str]:
    unit = sweep.lengths.unit
    used = format_length(sweep.max_batch_length, unit)
    measured = format_length(probe.max_batch_length, unit)
    if sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        yield (
            f"The sweep took max_batch_length = {used}, but the probe measured that {measured} fits: "
            "training may run out of memory. Sweep again without --max-batch-length."
        )
    elif sweep.max_batch_length < probe.max_batch_length * _LOW_LIMIT:
        yield (
            f"The sweep took max_batch_length = {used}, but the probe measured that {measured} fits: "
            "memory is left unused. Sweep again without --max-batch-length to use it."
        )
