"""Pages: all that a report says, in the order of its sections; the same as JSON; and what a machine offers.

To add a kind of result: a function that returns its `Section`, and a line in `SECTIONS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from batchtune.allocators import EXPANDABLE, NATIVE, asked_for, settings_in
from batchtune.reports import NextStep, RunResults
from batchtune.reports.loaders import loader_section
from batchtune.reports.measured import mismatch, probe_section, verification_section
from batchtune.reports.section import (
    Cells,
    Section,
    clean,
    facts_table,
    known,
    make_table,
)
from batchtune.reports.streams import stream_section
from batchtune.reports.sweeps import sweep_section
from batchtune.reports.training import training_section
from batchtune.results import (
    Doctor,
    DoctorCpu,
    DoctorGpu,
    DoctorTorch,
    Drift,
    LoaderTuning,
    Probe,
    Result,
    StreamSweep,
    Sweep,
    Training,
    Verdict,
    Verification,
    encode,
    meta_of,
)
from batchtune.trust import busy_with
from batchtune.units import (
    counted,
    format_length,
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


class Report(Result, frozen=True, kw_only=True):
    """The document that `batchtune report --format json` writes."""

    FORMAT: ClassVar[str] = "batchtune/report"

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
        if mismatch(run) is not None:  # it says nothing of these batches
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

    Of a run that packs, the row is that of the best padded batches, and not what is recommended.
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
