"""Pages: all that a report says, in the order of its sections; the same as JSON; and what a machine offers.

To add a kind of result: a function that returns its `Section`, and a line in `SECTIONS`.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from batchtune.allocators import EXPANDABLE, NATIVE, asked_for, settings_in
from batchtune.lengths import Histogram, Lengths, ceil_div
from batchtune.reports import NextStep, RunResults
from batchtune.reports.measured import (
    is_current,
    probe_section,
    training_section,
    verification_section,
)
from batchtune.reports.reading import loader_section, stream_section
from batchtune.reports.section import (
    Cells,
    Section,
    Table,
    clean,
    facts_table,
    format_share,
    known,
    make_table,
)
from batchtune.reports.sweeps import sweep_section
from batchtune.results import (
    Doctor,
    DoctorCpu,
    DoctorGpu,
    DoctorTorch,
    Drift,
    Exported,
    LoaderConfig,
    LoaderTuning,
    PackedConfig,
    Percentiles,
    Probe,
    Record,
    Result,
    Run,
    SamplerConfig,
    Scan,
    StreamConfig,
    StreamSweep,
    Sweep,
    Training,
    TrainingStart,
    TrainingStep,
    Trial,
    Verdict,
    Verification,
    encode,
    meta_of,
)
from batchtune.trust import busy_with
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_percent,
    format_seconds,
    format_size,
)

# Field of `RunResults` → what makes its section. The first that a run has is its main result.
SECTIONS: dict[str, Callable[[RunResults], Section]] = {
    "sweep": sweep_section,
    "stream": stream_section,
    "probe": probe_section,
    "loader": loader_section,
    "training": training_section,
}
_WORST_FIRST = ("error", "fails", "holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content; all strings are cleaned: one line, no control characters.

    Attributes:
        next_steps: A command, or a file, and its purpose, in the order to take them; only a brief report shows them.
    """

    title: str
    sections: Sequence[Section]
    next_steps: Sequence[NextStep] = ()

    @property
    def lead(self) -> list[str]:
        """The first sentences of the sections, all that a brief report shows; the first of them is the headline."""
        lead: list[str] = []
        for section in self.sections:
            lead += section.sentences[: section.brief]
        return lead

    @property
    def summary(self) -> list[str]:
        """All sentences, the lead first."""
        summary = self.lead
        for section in self.sections:
            summary += section.sentences[section.brief :]
        return summary

    @property
    def warnings(self) -> list[str]:
        """All warnings, each once."""
        warnings: dict[str, None] = {}
        for section in self.sections:
            warnings |= dict.fromkeys(section.warnings)
        return list(warnings)


class Report(Result):
    """The document that `batchtune report --format json` writes."""

    FORMAT = "batchtune/report"

    summary: list[str]
    warnings: tuple[str, ...] = ()
    probe: Probe | None
    sweep: Sweep | None
    verification: Verification | None = None
    verdicts: tuple[Verdict, ...] = ()
    drift: Drift | None = None
    stream: StreamSweep | None = None
    loader: LoaderTuning | None = None
    training: Training | None = None


def build_page(run: RunResults) -> Page:
    """Lay out a run's results: what went wrong first, then the main result, then what supports it."""
    main, *others = [
        make(run) for name, make in SECTIONS.items() if getattr(run, name) is not None
    ]
    sections = [main]
    for section in others:  # next to a sweep, the limit that was probed is no news
        brief = 0 if section.title == "Probe" else 1
        sections.append(replace(section, brief=brief))
    if run.verification is not None:
        verification = verification_section(run)
        if not is_current(run, run.verification):  # it says nothing of these batches
            sections.append(replace(verification, brief=0))
        elif run.verification.holds:
            sections.insert(1, verification)
        else:  # what the recommended batches save is no news then
            sections = [
                verification,
                *(replace(section, brief=0) for section in sections),
            ]
    if run.lengths is not None:
        sections.append(_data_section(run))
    if run.verdicts:
        sections.insert(0, verdict_section(run.verdicts))
    next_steps: list[NextStep] = []
    for section in sections:
        next_steps += section.next_steps
    next_steps.append(
        (
            f"batchtune report{run.as_argument} --full",
            "all tables (-o report.html: charts)",
        )
    )
    page = make_page(f"batchtune report: {run.name}", sections)
    return replace(
        page, next_steps=[(clean(command), purpose) for command, purpose in next_steps]
    )


def render(results: RunResults) -> str:
    """Return a run's report as JSON: the summary, the warnings and the result files, whole.

    The same results give the same bytes, wherever the run folder is.
    """
    page = build_page(results)
    report = Report(
        meta=meta_of(Report),
        summary=page.summary,
        warnings=tuple(page.warnings),
        probe=results.probe,
        sweep=results.sweep,
        verification=results.verification,
        verdicts=results.verdicts,
        drift=results.drift,
        stream=results.stream,
        loader=results.loader,
        training=results.training,
    )
    return encode(report).decode()


def build_verification_page(run: RunResults) -> Page:
    """Lay out a run's verification alone."""
    sections = [verification_section(run)]
    if run.lengths is not None:
        sections.append(_data_section(run))
    return replace(
        make_page(f"batchtune verify: {run.name}", sections),
        next_steps=build_page(run).next_steps,
    )


def make_page(title: str, sections: Iterable[Section]) -> Page:
    """Return a page whose strings can do nothing to the place where they are shown."""
    cleaned = [
        replace(  # its tables are clean
            section,
            sentences=[clean(sentence) for sentence in section.sentences],
            warnings=[clean(warning) for warning in section.warnings],
        )
        for section in sections
    ]
    return Page(title=clean(title), sections=cleaned)


def verdict_section(verdicts: Sequence[Verdict]) -> Section:
    """Return the gate's verdicts, in a sentence and in a table with the worst first."""
    ordered = sorted(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.outcome))
    rows = [
        {"verdict": verdict.outcome, "fails if": verdict.rule, "found": verdict.message}
        for verdict in ordered
    ]
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    sentence = f"Rules: {outcomes['holds']} of {len(verdicts)} hold."
    failing = [verdict.rule for verdict in ordered if verdict.outcome == "fails"]
    if failing:
        sentence += f" Failing: {', '.join(failing)}."
    if outcomes["error"]:
        sentence += f" {outcomes['error']} can't be judged."
    return Section(
        title="Rules",
        sentences=[sentence],
        tables=[
            make_table(
                "Rules",
                rows,
                left=["verdict", "fails if", "found"],
                brief=True,
            )
        ],
    )


def _data_section(run: RunResults) -> Section:
    """Return what to report on the lengths, and on how other lengths differ from them."""
    lengths = run.lengths
    assert lengths is not None
    unit = lengths.unit
    news: list[str] = []
    if run.drift is not None:
        packs = run.sweep is not None and run.sweep.packed is not None
        news += drift_sentences(run.drift, packs=packs)
    if lengths.truncated:
        longest = format_length(lengths.max, unit)
        news.append(
            f"{counted(lengths.truncated, 'example')} longer than {longest} (--truncate) count as that long: truncate "
            "in training, too."
        )
    total = format_length(lengths.total, unit)
    if unit == "s" and lengths.total >= 60:
        total += f" ({format_seconds(lengths.total)})"
    described = (
        f"{counted(lengths.count, 'example')} of {format_length(lengths.min, unit)} to "
        f"{format_length(lengths.max, unit)}, {total} in all"
    )
    if not unit:
        described += "; the unit is unknown"
    return Section(title="Data", sentences=[*news, f"{described}."], brief=len(news))


def drift_sentences(drift: Drift, *, packs: bool = False) -> list[str]:
    """Say how the other lengths differ from those of the run, and what that costs with the recommended row.

    For a run that packs, the row is that of the best padded batches, not the recommended one.
    """
    row = (
        "the best padded row, which is not the packing,"
        if packs
        else "the recommendation"
    )
    examples = counted(drift.lengths.count, "example")
    if not drift.changed:
        return [f"The manifest has the same lengths as the run: {examples}."]
    costs = f"{drift.batches:,} batches against {drift.retuned_batches:,}"
    if drift.epoch_seconds is not None and drift.retuned_epoch_seconds is not None:
        seconds = format_seconds(drift.retuned_epoch_seconds)
        costs = (
            f"{format_seconds(drift.epoch_seconds)} against {seconds} an epoch, {costs}"
        )
    return [
        f"The lengths of the manifest ({examples}) differ from those of the run, with "
        f"{counted(drift.beyond, 'example')} beyond the last boundary.",
        f"On these lengths, {row} costs {format_percent(drift.stale)} more than a newly tuned one: {costs}.",
    ]


def doctor_page(doctor: Doctor) -> Page:
    """Return versions, devices, settings, packages and warnings."""
    devices = [gpu.device for gpu in doctor.gpus if gpu.device]
    devices.append("cpu")
    versions = {
        "batchtune": doctor.meta.batchtune,
        "Python": f"{doctor.python} on {doctor.system}",
        "PyTorch": _torch(doctor.torch),
        "Driver": known(doctor.driver, lambda version: f"NVIDIA {version}"),
        "NVML": doctor.nvml_problem,
        "GPUs": str(len(doctor.gpus)),
        "--device auto": f"takes {devices[0]}",
    }
    tables = [facts_table("Software", versions)]
    tables += [
        facts_table(
            gpu.device or f"GPU {gpu.uuid}, which PyTorch does not see",
            _gpu(gpu, settings_in(doctor.environment)),
        )
        for gpu in doctor.gpus
    ]
    tables.append(facts_table("cpu", _cpu(doctor.cpu)))
    if doctor.environment:
        tables.append(facts_table("Settings", doctor.environment))
    packages = {
        name: version or "not installed" for name, version in doctor.packages.items()
    }
    tables.append(facts_table("Packages", packages))
    return make_page(
        "batchtune doctor",
        [
            Section(
                title="",
                sentences=[],
                tables=tables,
                warnings=doctor.warnings,
            )
        ],
    )


def _torch(torch: DoctorTorch) -> str:
    versions = {
        "": torch.version,
        "CUDA ": torch.cuda,
        "ROCm ": torch.hip,
        "cuDNN ": torch.cudnn,
    }
    words = [
        f"{name}{version}" for name, version in versions.items() if version is not None
    ]
    if torch.problem is not None:
        words.append(f"does not work: {torch.problem}")
    return ", ".join(words)


def _gpu(gpu: DoctorGpu, settings: str) -> Cells:
    """Return the facts on a GPU; `settings` are those of the environment for the allocator."""
    users = None
    if gpu.processes is not None:
        users = (
            busy_with(gpu.processes)
            or "nobody, or only processes that hold almost nothing"
        )
    clock = known(gpu.sm_clock_mhz, lambda mhz: f"{mhz:,} MHz")
    if clock is not None and gpu.max_sm_clock_mhz:
        clock += f" of at most {gpu.max_sm_clock_mhz:,} MHz"
    if clock is not None and gpu.throttle_reasons:
        clock += f", lowered now: {', '.join(gpu.throttle_reasons)}"

    def allocator(works: bool) -> str:
        users = asked_for(settings)
        if not works and users in (None, EXPANDABLE):
            return f"takes {NATIVE}: expandable segments don't work"
        return f"takes {users or EXPANDABLE}: expandable segments work"

    switch = {None: None, True: "on", False: "off"}
    return {
        "name": gpu.name,
        "compute capability": gpu.capability,
        "UUID": gpu.uuid,
        "memory": known(gpu.total_bytes, format_size),
        "free": known(gpu.free_bytes, format_size),
        "used by": users,
        "a probe": _probe(gpu.probe_process),
        "MIG": switch[gpu.mig],
        "ECC": switch[gpu.ecc],
        "--allocator auto": known(gpu.expandable_segments, allocator),
        "clock": clock,
        "NVML": known(
            gpu.nvml_problem, lambda problem: f"does not answer everything: {problem}"
        ),
    }


def _cpu(cpu: DoctorCpu) -> Cells:
    return {
        "name": f"{cpu.name}, {counted(cpu.processors, 'processor')}",
        "memory": format_size(cpu.total_bytes),
        "available": known(cpu.available_bytes, format_size),
        "memory limit": known(
            cpu.limit_problem, lambda problem: f"does not work: {problem}"
        )
        or "works",
        "load average": known(
            cpu.load_average, lambda load: f"{load:.1f} in the last minute"
        ),
        "a probe": _probe(cpu.probe_process),
    }


def _probe(process: int | None) -> str:
    return (
        known(process, lambda pid: f"process {pid} is running one") or "none is running"
    )


# JSON Schemas (draft 2020-12) of the files that commands write, described by the records' docstrings.


class DescribedFile(NamedTuple):
    """The record in a file, the name of the file, and what it holds."""

    record: type[Record]
    file: str
    summary: str


SCHEMAS = {
    "run": DescribedFile(Run, "run.json", "the conditions of a run folder's trials"),
    "probe": DescribedFile(
        Probe, "probe.json", "what fits on the device, and what a batch costs"
    ),
    "sweep": DescribedFile(
        Sweep, "sweep.json", "the bucket tables compared, and the recommended one"
    ),
    "stream": DescribedFile(
        StreamSweep,
        "stream.json",
        "the ways to batch a stream compared, and the recommended one",
    ),
    "stream-config": DescribedFile(
        StreamConfig,
        "stream.yaml",
        "the recommendation for a stream; YAML with this content",
    ),
    "loader": DescribedFile(
        LoaderTuning,
        "loader.json",
        "the settings of a data loader compared, and the recommended one",
    ),
    "loader-config": DescribedFile(
        LoaderConfig, "loader.yaml", "the recommended arguments of a loader; YAML"
    ),
    "verify": DescribedFile(
        Verification, "verify.json", "what running the recommended batches showed"
    ),
    "trials": DescribedFile(
        Trial, "trials.jsonl, each line", "one batch shape that was measured"
    ),
    "training": DescribedFile(
        TrainingStart, "training.jsonl, first line", "the start of a recording"
    ),
    "training-step": DescribedFile(
        TrainingStep, "training.jsonl, each further line", "one training step"
    ),
    "sampler": DescribedFile(
        SamplerConfig,
        "sampler.yaml",
        "the recommendation; YAML with the same content as JSON",
    ),
    "packed-sampler": DescribedFile(
        PackedConfig,
        "sampler.yaml of training that packs",
        "the recommended packer; YAML with the same content as JSON",
    ),
    "report": DescribedFile(
        Report,
        "report --format json, tune --json",
        "the summary of a run, and its result files",
    ),
    "export": DescribedFile(
        Exported, "export --json", "the recommendation as another framework's config"
    ),
    "scan": DescribedFile(
        Scan, "scan --json", "what the lengths of a data set look like"
    ),
    "doctor": DescribedFile(Doctor, "doctor --json", "what a machine offers"),
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a file, by its name in `SCHEMAS`; each record is described by its docstring."""
    record = SCHEMAS[name].record
    described = msgspec.json.schema(record)
    for definition in described["$defs"].values():
        definition["description"] = inspect.cleandoc(definition["description"])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": _identifier(name),
        "title": f"batchtune: {SCHEMAS[name].file}",
        **described,
    }
    # A file has its format and version in `meta`, or at its top; a line of a journal has none.
    if hasattr(record, "FORMAT"):
        declared = {
            "format": {"const": record.FORMAT},
            "version": {"minimum": 1, "maximum": record.VERSION},
        }
        has_meta = "meta" in record.__struct_fields__
        schema["properties"] = (
            {"meta": {"properties": declared}} if has_meta else declared
        )
    return schema


def schema_list() -> list[dict[str, Any]]:
    """Return what the schemas are of."""
    return [
        {
            "name": name,
            "file": schema.file,
            "description": schema.summary,
            "version": schema.record.VERSION,
            "id": _identifier(name),
        }
        for name, schema in SCHEMAS.items()
    ]


def _identifier(name: str) -> str:
    """Return the `$id` of a schema, which ends in the version of its files."""
    return f"urn:batchtune:schema:{name}:{SCHEMAS[name].record.VERSION}"


# The survey of a data set: how its lengths are spread, and what in them hurts batching.

_BINS = 20
_BAR = 30  # characters of the longest bar of the histogram
_PER_SECOND = {"s": 1, "ms": 1000, "samples": 16_000}
_COUNTS = ("samples", "frames", "tokens", "words", "characters", "bytes")
# Medians beyond these are no ordinary data: a sequence shorter than 0.05 s holds no syllable and no two windows of
# speech features; one of over 3 h is longer than long podcasts, meetings and lectures.
_SHORTEST_SECONDS = 0.05
_LONGEST_SECONDS = 3 * 3600.0
# Warn of the longest examples if they are this many times as long as nearly all others.
_OUTLYING = 1.5


def survey(lengths: Lengths, sources: Sequence[str] = ()) -> Scan:
    """Look at the lengths of a data set: their spread, a histogram, and what looks wrong or wasteful.

    Percentiles are by nearest rank: the smallest length that at least that share of the examples does not exceed. Each
    warning says what is wrong, then the remedy. `sources` tell the record's reader where the lengths come from.
    """
    spread = _percentiles(lengths.histogram)
    targets = None
    if lengths.runs.targets is not None:
        targets = _percentiles(Histogram.of(lengths.runs.targets, lengths.runs.counts))
    return Scan(
        meta=meta_of(Scan),
        sources=list(sources),
        lengths=lengths.summary(),
        distinct=lengths.histogram.lengths.size,
        percentiles=spread,
        targets=targets,
        histogram=lengths.bins(_BINS)[::-1],
        left_out=dict(lengths.left_out),
        notes=list(lengths.notes),
        warnings=[*_wrong_unit(lengths, spread.median), *_outliers(lengths, spread)],
    )


def _percentiles(histogram: Histogram) -> Percentiles:
    def nearest_rank(thousandths: int) -> float:
        rank = max(1, ceil_div(histogram.count * thousandths, 1000))
        return float(histogram.at(rank - 1))

    return Percentiles(
        min=nearest_rank(0),
        median=nearest_rank(500),
        p95=nearest_rank(950),
        p99=nearest_rank(990),
        p999=nearest_rank(999),
        max=nearest_rank(1000),
    )


def _wrong_unit(lengths: Lengths, median: float) -> Iterator[str]:
    """Warn of lengths that can't be what their unit says."""
    unit = lengths.unit or ""
    remedy = "Is the unit right? --unit names it, and --length-scale converts (1/16000 for samples at 16 kHz to s)."
    if (
        unit in _PER_SECOND
        and not _SHORTEST_SECONDS <= median / _PER_SECOND[unit] <= _LONGEST_SECONDS
    ):
        seconds = format_seconds(median / _PER_SECOND[unit])
        yield f"A median of {format_length(median, unit)} is {seconds} for one example. {remedy}"
    values = lengths.runs.values
    fractions = values[np.abs(values - np.rint(values)) > 0.01]
    if unit in _COUNTS and fractions.size:
        yield (
            f"{unit.capitalize()} come in whole numbers, but some lengths are not whole, such as "
            f"{format_number(float(fractions[0]))}. {remedy}"
        )


def _outliers(lengths: Lengths, spread: Percentiles) -> Iterator[str]:
    """Warn of a few examples much longer than all others: one in a thousand, or in a hundred in small data sets."""
    rare = spread.p999 if lengths.count >= 1000 else spread.p99
    if rare * _OUTLYING >= spread.max:
        return
    digits = 2 - math.floor(math.log10(rare))
    limit = math.ceil(rare * 10.0**digits) / 10.0**digits
    longer = lengths.count_beyond(limit)
    so_far = lengths.histogram.total_of(
        np.array([lengths.count - longer, lengths.count])
    )
    share = 1 - float(so_far[0] / so_far[1])
    yield (
        f"{counted(longer, 'example')} longer than {format_length(limit, lengths.unit)}, up to "
        f"{format_length(spread.max, lengths.unit)}, alone decide how large a fixed batch can be. --max-length "
        f"{limit:.15g} leaves them out, {format_share(share)} of the total length."
    )


def survey_sentences(scan: Scan) -> Iterator[str]:
    """Say how many, how long and how much, how they are spread, and what was left out."""
    summary = scan.lengths
    total = format_length(summary.total, summary.unit)
    if summary.unit in ("s", "ms"):
        total = format_seconds(summary.total / _PER_SECOND[summary.unit])
    yield (
        f"{counted(summary.count, 'length')} in descending order: {format_length(summary.max, summary.unit)} to "
        f"{format_length(summary.min, summary.unit)}, {total} in all."
    )
    yield f"Percentiles: {_percentile_words(scan.percentiles)}; {counted(scan.distinct, 'distinct length')}."
    if scan.targets is not None:
        targets = (
            f"{format_number(scan.targets.max)} to {format_number(scan.targets.min)}"
        )
        yield f"Targets: {targets}; {_percentile_words(scan.targets)}."
    for reason, count in scan.left_out.items():
        yield f"Left out: {counted(count, 'example')}, {reason}."
    if summary.truncated:
        longest = format_length(summary.max, summary.unit)
        yield f"Truncated: {counted(summary.truncated, 'example')} count as {longest} long."
    yield from scan.notes


def _percentile_words(spread: Percentiles) -> str:
    values = {
        "median": spread.median,
        "p95": spread.p95,
        "p99": spread.p99,
        "p99.9": spread.p999,
    }
    return ", ".join(f"{name} {format_number(value)}" for name, value in values.items())


def survey_section(scan: Scan) -> Section:
    """Return the whole survey, with a histogram."""
    sentences = list(survey_sentences(scan))
    return Section(
        title="Lengths",
        sentences=sentences,
        brief=len(sentences),
        tables=[_histogram(scan)],
        warnings=scan.warnings,
    )


def _histogram(scan: Scan) -> Table:
    unit = scan.lengths.unit
    largest = max(bin_.count for bin_ in scan.histogram)
    rows = [
        {
            "from": format_length(bin_.from_, unit),
            "to": format_length(bin_.to, unit),
            "examples": f"{bin_.count:,}",
            "share": format_percent(bin_.count / scan.lengths.count),
            "": "█" * math.ceil(_BAR * bin_.count / largest),
        }
        for bin_ in scan.histogram
    ]
    return make_table("Lengths", rows, left=[""])
