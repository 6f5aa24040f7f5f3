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
)
from batchtune.reports.section import SweptSection
from batchtune.reports.sweep_tables import comparison_table, sweep_tables
from batchtune.reports.table import Fact, Table
from batchtune.reports.trade_offs import pool_sentences, trade_off_sentences
from batchtune.results import SAMPLER_FILE, Probe, Row, Sweep, unproven_sizes
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
    with_full_stop,
)

_PROBE_AGAIN = "Run `batchtune probe-oom` again with --force, then `batchtune sweep-buckets`."


class SweepSection(SweptSection[Sweep]):
    """The section on `sweep.json`."""

    subject = "The sweep"
    command = "Sweep"

    def sentences(self) -> Iterator[str]:
        """Say what to set, what proves that it fits, why it is recommended, and what it saves."""
        sweep = self.result
        row = sweep.recommended_row
        if row is None:
            yield from self._nothing_recommended()
            return
        yield self._headline(row)
        yield from self.doubts(swept_kinds(sweep))
        yield from self.truncation()
        yield from self._proof(row)
        yield from self._current_is_better(row)
        if sweep.reason:
            yield f"Why: {with_full_stop(sweep.reason)}"
        yield from savings(sweep, row, compared(sweep), timed=self.has_reliable_times)
        yield _above_bound(sweep, row)
        yield padding(row, compared(sweep))
        if row.pool_size is not None:
            yield from pool_sentences(sweep, row)
        yield from trade_off_sentences(sweep, row)

    def _nothing_recommended(self) -> Iterator[str]:
        sweep = self.result
        if swept_kinds(sweep) == "pools":
            yield with_full_stop(sweep.reason[:1].upper() + sweep.reason[1:]) or "No pools are recommended."
        elif sweep.reason:
            yield f"No bucket table is recommended: {with_full_stop(sweep.reason)}"
        else:
            yield "No bucket table is recommended."
        fixed = fixed_baseline(sweep)
        if fixed is not None:
            size = format_number(fixed.batch_size)
            yield f"A fixed batch size of {size} needs {batches_words(fixed.batches)} for an epoch."
        yield from self.truncation()

    def _headline(self, row: Row) -> str:
        """Say what to set, and compare it with the first alternative: `: 1.34 times faster than NAME`."""
        sweep = self.result
        what = row.name
        if row.pool_size is None:
            what = f"{counted(len(row.boundaries), 'bucket')} ({row.strategy})"
        sizes = f"max_batch_length = {format_length(sweep.max_batch_length, sweep.lengths.unit)}"
        if row.sizing == "frontier":  # its batches go beyond max_batch_length, which is what fits at every length
            sizes = "measured batch sizes"
        return f"Set {what} with {sizes}{advantage(row, compared(sweep), timed=self.has_reliable_times)}."

    def _proof(self, row: Row) -> Iterator[str]:
        """Say whether the batches were run, and how much memory that leaves."""
        probe = self.run.probe
        unproven = unproven_sizes(row)
        if unproven is not None:
            yield f"{_capital(unproven)}: the warnings say why."
        elif row.unproven is not None:
            left = "; how much memory that leaves free is not known"
            if probe is not None and probe.margin is not None and probe.margin.bytes:
                share = format_percent(probe.margin.bytes / probe.device.limit_bytes)
                left = f", and leaves {format_size(probe.margin.bytes)} ({share} of the limit) free"
            yield f"Every batch size was run, or is no larger than one that was{left}."

    def _current_is_better(self, row: Row) -> Iterator[str]:
        current = self.result.current
        if current is None or self.result.current_fits is False:  # if it does not fit, a warning says so
            return
        timed = self.has_reliable_times
        is_equal = timed and row.equal_to_best and current.equal_to_best  # the headline says so
        if not is_equal and is_better(current, row, timed=timed):
            kind = "table" if row.pool_size is None else "pools"
            yield f"Your current config is better than the recommended {kind}: keep it."

    @property
    def limit_note(self) -> str:
        """Which samplers need max_batch_length, if the recommended one does not."""
        row = self.result.recommended_row
        return ", for samplers without a batch size per bucket" if row and row.sizing == "frontier" else ""

    def tables(self) -> Iterator[Table]:
        """As for every section."""
        row = self.result.recommended_row
        if row is not None:
            yield comparison_table(self.result, row, timed=self.has_reliable_times)
        yield from sweep_tables(self.result, self.run.probe)

    def warnings(self) -> Iterator[str]:
        """As for every section on a sweep; first whether batch sizes are not proven, and why."""
        row = self.result.recommended_row
        unproven = None if row is None else unproven_sizes(row)
        if row is not None and unproven is not None:
            yield f"{_capital(unproven)}: {_why_unproven(self.result, row, self.run.probe)}"
        yield from super().warnings()

    def steps(self) -> Iterator[Fact]:
        """As for every section."""
        run = self.run
        row = self.result.recommended_row
        verified = run.verified(of_stream=False)
        verify = f"batchtune verify{run.as_argument} MANIFEST{self.workload_flags}"
        if row is None:
            if swept_kinds(self.result) == "pools":
                yield f"batchtune sweep-buckets MANIFEST{run.as_option}", "compare bucket tables, too"
            else:
                command = f"batchtune sweep-buckets MANIFEST --num-buckets 2:60{run.as_option}"
                yield command, "compare other numbers of buckets"
            return
        if verified is not None and not verified.holds:
            if verified.failures:  # otherwise the reasons say what to do
                yield f"batchtune tune MANIFEST --workload W --force{run.as_option}", "probe again"
            yield verify, "run these batches again"
            return
        yield str(run.folder / SAMPLER_FILE), f"the config, for {'Pooled' if row.pool_size else 'Bucket'}BatchSampler"
        if run.probe is None:
            yield f"batchtune probe-oom MANIFEST --workload W{run.as_option}", "measure what fits"
        elif verified is None:
            yield verify, "run these batches for real"
        export = f"batchtune export{run.as_argument} --to FRAMEWORK"
        if row.pool_size is not None:
            yield export, "pools, or the best table for others"
        elif self.result.lengths.unit in SPEECH_UNITS:
            yield export, "the same for SpeechBrain, NeMo, ..."
        else:
            yield export, "the same for fairseq, PyTorch, ..."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _above_bound(sweep: Sweep, row: Row) -> str:
    """Say how far the recommended row is from the cost that nothing can beat."""
    bound = sweep.lower_bound
    above = format_percent(max(0.0, row.batches / bound.batches - 1))
    text = f"Lower bound: {batches_words(bound.batches)}; this needs {above} more."
    if not bound.estimated_epoch_seconds or not row.estimated_epoch_seconds:
        return text
    above_time = format_percent(max(0.0, row.estimated_epoch_seconds / bound.estimated_epoch_seconds - 1))
    return f"{text} In time: {format_seconds(bound.estimated_epoch_seconds)}; this takes {above_time} more."


def _why_unproven(sweep: Sweep, row: Row, probe: Probe | None) -> str:
    """Say why batch sizes of the recommended row are not proven, and what to do."""
    if probe is None or not probe.frontier:
        return f"no batch as large was run, alone and in turns with the others. {_PROBE_AGAIN}"
    if not probe.is_proven:
        return (
            "the probe was interrupted before its batches ran in turns. The same `batchtune probe-oom` continues it; "
            "then run `batchtune sweep-buckets` again."
        )
    unit = sweep.lengths.unit
    longest = probe.frontier[-1].length
    last_boundary = row.boundaries[-1]
    most_examples = probe.settings.get("max_batch_size")
    if isinstance(most_examples, int) and max(row.batch_sizes) > most_examples:
        return (
            f"no batch of more than {most_examples:,} examples was run (--max-batch-size). Sweep with --max-batch-size "
            f"{most_examples} too, or run `batchtune probe-oom` without it, with --force."
        )
    if row.sizing == "length" and sweep.max_batch_length > probe.max_batch_length * (1 + 1e-9):
        return (
            f"max_batch_length = {format_length(sweep.max_batch_length, unit)} is more than the "
            f"{format_length(probe.max_batch_length, unit)} that was measured to fit. Sweep again without "
            "--max-batch-length."
        )
    if last_boundary > longest:
        return (
            f"batches are up to {format_length(last_boundary, unit)} long, and none longer than "
            f"{format_length(longest, unit)} was run. Leave longer examples out with --max-length, give the probe more "
            "memory, or, with --multiple-of, run `batchtune tune` with --force: it probes batches as they are padded."
        )
    return (
        "the probe ran no batch as large, alone and in turns with the others. Run `batchtune sweep-buckets` again; if "
        "that does not help, `batchtune probe-oom` with --force."
    )
