"""The section on a sweep of bucket tables and pools: what to set, what that saves, and why batches may not fit."""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.lengths import SPEECH_UNITS
from batchtune.reports.rows import (
    advantage,
    batches_words,
    compared,
    fixed_baseline,
    is_better,
    padding,
    savings,
    swept_kinds,
    without_times,
)
from batchtune.reports.section import SweptSection
from batchtune.reports.sweep_tables import sweep_comparison, sweep_tables
from batchtune.reports.table import Fact, Table
from batchtune.reports.trade_offs import pool_sentences, trade_off_sentences
from batchtune.results import SAMPLER_FILE, Probe, Row, Sweep, unproven_sizes
from batchtune.units import format_length, format_number, format_percent, format_seconds, format_size, with_full_stop

_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."


class SweepSection(SweptSection[Sweep]):
    """The section on `sweep.json`."""

    subject, command = "The sweep", "Sweep"

    def headline(self) -> str:
        """Say what to set, and compare it with the first alternative: `: 1.34 times faster than NAME`."""
        sweep, row = self.result, self.result.recommended_row
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

    def sentences(self) -> Iterator[str]:
        """Say what the recommended row saves, with the evidence for it, and why it is recommended."""
        sweep, row, fixed = self.result, self.result.recommended_row, fixed_baseline(self.result)
        if self.brief:
            if row is not None and row.estimated_epoch_seconds is None:
                yield f"{without_times(swept_kinds(sweep))}; the time saved may be much less."
            yield from self.evidence()
            return
        if row is None:
            if fixed is not None:
                size = format_number(fixed.batch_size)
                yield f"A fixed batch size of {size} needs {batches_words(fixed.batches)} for an epoch."
            yield from self.evidence()
            return
        yield from savings(sweep, row, compared(sweep), swept_kinds(sweep))
        yield from self.evidence()
        yield _above_bound(sweep, row)
        yield padding(row, compared(sweep))
        if sweep.reason:
            yield f"Why: {with_full_stop(sweep.reason)}"
        if row.pool_size is not None:
            yield from pool_sentences(sweep, row)
        yield from trade_off_sentences(sweep)

    def evidence(self) -> Iterator[str]:
        """Say what was run, how much memory that leaves, and whether the user's own config does as well."""
        yield from super().evidence()
        sweep, row, probe, now = self.result, self.result.recommended_row, self.run.probe, self.result.current
        if row is None:
            return
        if (sizes := unproven_sizes(row)) is not None:
            yield f"{sizes[0].upper()}{sizes[1:]}: the warnings say why."
        elif row.unproven is not None:
            left = "; how much memory that leaves free is not known"
            if probe is not None and probe.margin is not None and (free := probe.margin.bytes):
                share = format_percent(free / probe.device.limit_bytes)
                left = f", and leaves {format_size(free)} ({share} of the limit) free"
            yield f"Every batch size was run, or is no larger than one that was{left}."
        if now is not None and sweep.current_fits is not False:  # if it does not fit, a warning says so
            timed = row.estimated_epoch_seconds is not None and now.estimated_epoch_seconds is not None
            is_equal = timed and row.equal_to_best and now.equal_to_best  # the headline says so
            if not is_equal and is_better(now, row):
                what = "table" if row.pool_size is None else "pools"
                yield f"Your current config is better than the recommended {what}: keep it."

    @property
    def limit_note(self) -> str:
        """Which samplers need max_batch_length, if the recommended one does not."""
        row = self.result.recommended_row
        return ", for samplers without a batch size per bucket" if row and row.sizing == "frontier" else ""

    def tables(self) -> Iterator[Table]:
        """As for every section."""
        yield from sweep_tables(self.result, self.run.probe)

    def comparison(self) -> Iterator[Table]:
        """As for every section."""
        if (row := self.result.recommended_row) is not None:
            yield sweep_comparison(self.result, row)

    def urgent_warnings(self) -> Iterator[str]:
        """As for every section on a sweep; first whether batch sizes are not proven, and why."""
        row = self.result.recommended_row
        if row is not None and (sizes := unproven_sizes(row)) is not None:
            yield f"{sizes[0].upper()}{sizes[1:]}: {_why_unproven(self.result, row, self.run.probe)}"
        yield from super().urgent_warnings()

    def steps(self) -> Iterator[Fact]:
        """As for every section."""
        run, row = self.run, self.result.recommended_row
        verified = run.verified(of_stream=False)
        config, verify = str(run.folder / SAMPLER_FILE), f"batchtune verify{run.as_argument} MANIFEST"
        verify += self.workload_flags
        if row is None:
            if swept_kinds(self.result) == "pools":
                yield f"batchtune sweep-buckets MANIFEST{run.as_option}", "compare bucket tables, too"
            else:
                command = f"batchtune sweep-buckets MANIFEST --num-buckets 2:60{run.as_option}"
                yield command, "compare other numbers of buckets"
        elif verified is not None and not verified.holds:
            # Without a batch that failed the reasons say what to do.
            if verified.failures:
                yield f"batchtune tune MANIFEST --workload W --force{run.as_option}", "probe again"
            yield verify, "run these batches again"
        else:
            in_pools = row.pool_size is not None
            yield config, f"the config, for {'Pooled' if in_pools else 'Bucket'}BatchSampler"
            if run.probe is None:
                yield f"batchtune probe-oom MANIFEST --workload W{run.as_option}", "measure what fits"
            elif verified is None:
                yield verify, "run these batches for real"
            frameworks = "SpeechBrain, NeMo" if self.result.lengths.unit in SPEECH_UNITS else "fairseq, PyTorch"
            others = "pools, or the best table for others" if in_pools else f"the same for {frameworks}, ..."
            yield f"batchtune export{run.as_argument} --to FRAMEWORK", others


def _above_bound(sweep: Sweep, row: Row) -> str:
    bound, seconds = sweep.lower_bound, row.estimated_epoch_seconds
    what, ratios = [batches_words(bound.batches)], [row.batches / bound.batches]
    if bound.estimated_epoch_seconds and seconds:
        what.append(f"an estimated {format_seconds(bound.estimated_epoch_seconds)}")
        ratios.append(seconds / bound.estimated_epoch_seconds)
    above = " and ".join(format_percent(max(0.0, ratio - 1)) for ratio in ratios)
    nothing = "no bucket table" if swept_kinds(sweep) == "tables" else "neither bucket tables nor pools"
    return f"The bound that {nothing} can beat is {' and '.join(what)}: this is {above} above it."


def _why_unproven(sweep: Sweep, row: Row, probe: Probe | None) -> str:
    """Say why batch sizes of the recommended row are not proven, and what to do."""
    if probe is None or not probe.frontier:
        return f"no batch as large was run, alone and in turns with the others. {_PROBE_AGAIN}"
    if not probe.is_proven:
        return (
            "the probe was interrupted before its batches ran in turns. The same `batchtune probe-oom` continues it; "
            "then run `batchtune sweep-buckets` again."
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
