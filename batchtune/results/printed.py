"""The records that commands print with --json and write into no run folder: scan, doctor, export, the gate."""

from __future__ import annotations

from typing import Annotated, Literal

from batchtune.records import PER_CENT, HistogramBin, LengthsSummary, Record
from batchtune.results.shared import DeviceProcess, Result

Answer = Literal["holds", "fails", "error"]


class Percentiles(Record):
    """Percentiles 0, 50, 95, 99, 99.9 and 100 of the lengths, by nearest rank: each one occurs."""

    min: float
    median: float
    p95: float
    p99: float
    p999: float
    max: float


class Scan(Result):
    """The findings of `batchtune scan` about a data set's lengths.

    Attributes:
        sources: Where the lengths come from, as the user named it.
        distinct: Number of distinct lengths.
        targets: Percentiles of the target lengths, if any.
        histogram: Bins that cover all lengths, the longest first; even or log-spaced.
        left_out: Reason → number of examples left out.
        notes: The reader's findings.
        warnings: What looks wrong or wasteful, each with its remedy.
    """

    FORMAT = "batchtune/scan"

    sources: list[str]
    lengths: LengthsSummary
    distinct: int
    percentiles: Percentiles
    targets: Percentiles | None
    histogram: list[HistogramBin]
    left_out: dict[str, int]
    notes: list[str]
    warnings: list[str]


class DoctorGpu(Record):
    """A GPU, or an instance of one (MIG), as it is now; None: unknown.

    Attributes:
        device: PyTorch's name for it, such as `cuda:0`; None if PyTorch does not see it.
        processes: The processes that use it, each with its memory.
        mig: Whether it is an instance, or divided into instances.
        throttle_reasons: Why its clock is lower now than it could be.
        probe_process: The batchtune process that is probing it, if any.
        expandable_segments: Whether torch's allocator can take memory in such segments, by the driver.
        nvml_problem: What NVML, the driver's library, does not answer about it, because it lacks permission or the GPU
            can't tell.
    """

    name: str
    device: str | None
    uuid: str | None
    capability: str | None
    total_bytes: int | None
    free_bytes: int | None
    processes: list[DeviceProcess] | None
    mig: bool | None
    ecc: bool | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    throttle_reasons: list[str] | None
    probe_process: int | None
    nvml_problem: str | None = None
    expandable_segments: bool | None = None


class DoctorTorch(Record):
    """PyTorch, as imported in a process of its own.

    Attributes:
        version: None if it can't be imported.
        cuda, hip, cudnn: The versions it was built with; None: without.
        problem: Why it can't be used, or sees no GPU though it was built for one.
    """

    version: str | None
    cuda: str | None
    hip: str | None
    cudnn: str | None
    problem: str | None


class DoctorCpu(Record):
    """The CPU and its memory.

    Attributes:
        processors: Available to this process.
        load_average: How many processes ran or waited to run in the last minute; None if unknown.
        limit_problem: Why memory can't be limited and measured here, if so.
        probe_process: The batchtune process that is probing it, if any.
    """

    name: str
    processors: int
    total_bytes: int
    available_bytes: int | None
    limit_problem: str | None
    probe_process: int | None
    load_average: float | None = None


class Doctor(Result):
    """The findings of `batchtune doctor` about a machine.

    Attributes:
        driver: The NVIDIA driver's version, if any.
        nvml_problem: Why the driver can't be asked, at all or about some GPU.
        environment: The variables set that affect a training step's memory or time.
        packages: Optional package → version; None if not installed.
        warnings: What stands in the way of a probe, each with its remedy.
    """

    FORMAT = "batchtune/doctor"

    python: str
    system: str
    torch: DoctorTorch
    driver: str | None
    nvml_problem: str | None
    gpus: list[DoctorGpu]
    cpu: DoctorCpu
    environment: dict[str, str]
    packages: dict[str, str | None]
    warnings: list[str]


class Exported(Result):
    """The output of `batchtune export --json`: a recommendation as another framework's config.

    Attributes:
        framework: As `--to` names it.
        title: The framework's own name.
        file: Where it was written, or a name for it.
        content: The config or the snippet.
    """

    FORMAT = "batchtune/export"

    framework: str
    title: str
    file: str
    content: str


class Verdict(Record):
    """The gate's verdict on one rule.

    Attributes:
        rule: As given, with single spaces.
        outcome: `holds`; `fails`; or `error`: it can't be decided, which is never a pass.
        value: Value of the rule's field; None if unknown.
        limit: What the rule compares it with; for `worse` the fraction allowed, 0.02 for 2%.
        baseline: The value in the other run, for `worse`.
        message: The value and the limit, or why it can't be decided; no full stop.
    """

    rule: str
    outcome: Answer
    value: float | int | bool | None
    limit: float | bool
    baseline: float | int | None = None
    message: str


class Drift(Record):
    """What new lengths cost with the table that a run recommends.

    Attributes:
        lengths: The new ones.
        changed: Whether the fingerprint differs.
        beyond: How many of the new lengths are beyond the last boundary of the recommended table.
        batches: Batches of the new lengths with the tuned table; lengths beyond it become batches
            of one.
        retuned_batches: Batches with a table tuned for the new lengths, with the same strategy,
            sizing and number of buckets.
        epoch_seconds, retuned_epoch_seconds: The same in estimated time; None without step times.
        stale: How much more the tuned table costs than a newly tuned one, in time if known, else in batches: 0.02 is 2%
            more; at least 0.
    """

    lengths: LengthsSummary
    changed: bool
    beyond: int
    batches: int
    retuned_batches: int
    epoch_seconds: float | None
    retuned_epoch_seconds: float | None
    stale: Annotated[float, PER_CENT]
