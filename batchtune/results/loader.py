"""The records of `loader.json` and `loader.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from batchtune.records import (
    Amount,
    Bytes,
    ConfigFile,
    Cost,
    CostBytes,
    CostCount,
    CostRatio,
    CostShare,
    Count,
    Gain,
    LengthsSummary,
    Record,
    Share,
    Size,
    StepSeconds,
)
from batchtune.results.shared import (
    Result,
    WorkloadRecord,
    row_at,
    wrong_rows,
    wrong_settings,
)
from batchtune.units import format_number

Argument: TypeAlias = bool | int | float | str | None
"""A value of an argument that loaders are compared by."""
Arguments: TypeAlias = dict[str, Argument]

BUSY_IDLE = 0.01
"""A step that waits for at most this share of the time is kept busy."""

# What torch's DataLoader takes for its arguments, where an export writes them.
TORCH_TYPES: dict[str, Any] = {
    "num_workers": Annotated[int, msgspec.Meta(ge=0, le=100_000)],
    "prefetch_factor": Annotated[int, msgspec.Meta(ge=1, le=10**9)] | None,
    "pin_memory": bool,
    "persistent_workers": bool,
    "multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
    "in_order": bool,
}
TORCH_ARGUMENTS = tuple(TORCH_TYPES)

LoaderOutcome = Literal[
    "ok", "error", "timeout", "crash", "oom", "shared_memory", "empty", "repeats"
]
"""How the measurement of a setting ended: `shared_memory`: /dev/shm is too small for its batches; `empty`: it delivered
no batch; `error`: an exception, in a worker or not; `crash`: a process died of something else than a lack of memory;
`repeats`: its workers deliver the same data, so its rate says nothing."""


class Demand(Record):
    """The training step's demand: how long it computes with each batch.

    Attributes:
        source: Where the times come from: the run folder's probe, or `--step-ms`.
        per: What decides a step's time: `shape`: the probe's times for the batch's own shape; `example`: the epoch's
            estimated time / its examples, times the examples in the batch; `batch`: the same time for every batch.
        step_seconds: Mean time of the step with a batch, over the delivered batches.
        device_name: The device that the step was probed on; None for `--step-ms`.
    """

    source: Literal["probe", "step-ms"]
    per: Literal["shape", "example", "batch"]
    step_seconds: StepSeconds
    device_name: str | None = None


class LoaderRow(Record):
    """One setting of the loader, and what was measured with it. None: not measured, or it failed.

    Rates are medians over trials, each over the batches that were really delivered, without the wait for the first.

    Attributes:
        arguments: Name → value, as the loader takes them.
        workers: How many processes or threads make batches, without the one that trains.
        outcome: How its last measurement ended.
        error: What failed, one or more lines; None where nothing did.
        rounds: How many rounds of successive halving it took part in.
        trials: How many of its epochs, or parts of one, were measured, after those that warm up.
        batches, examples: How many were delivered in them.
        examples_per_second, batches_per_second: The rates of a consumer that takes batches as fast
            as they come.
        length_per_second: Sum of the true lengths where they are known, else of the padded ones, in the loader's unit.
        examples_per_second_spread: (highest - lowest) / median over trials.
        first_batch_seconds: From the start of an epoch to its first batch: the median.
        wait_p50_seconds, wait_p99_seconds: The wait for one batch, without the first of each epoch.
        processors: How many the loader kept busy on average, in all its processes.
        other_processors: How many other programs kept busy meanwhile.
        memory_bytes: The most that all its processes held, each shared page counted once (psutil's proportional set
            size).
        worker_bytes: The most that the largest worker held, counted likewise.
        shared_bytes: The most that was added to /dev/shm.
        batch_bytes: Size of the largest batch.
        growth_bytes_per_batch: How much memory grew with each batch after the warm-up; 0 if no more than noise.
        gpu_idle: The share of training that the step waits for batches, measured with a consumer that takes as long for
            each batch as its step; None where that was not run.
        estimated_epoch_seconds: The time of what the loader delivers in an epoch: steps and waits,
            or without a demand, the loader alone; None where its epoch has no known end, or where
            the waits were not measured.
        equal_to_best: Whether it is within the error of the best row, by idle shares where they were measured, else by
            rates; None for a row without an idle share where others have one.
    """

    arguments: Arguments
    workers: CostCount
    outcome: LoaderOutcome
    error: str | None = None
    rounds: Count = 1
    trials: Count = 0
    batches: Count = 0
    examples: Count = 0
    examples_per_second: Gain | None = None
    batches_per_second: Gain | None = None
    length_per_second: Gain | None = None
    examples_per_second_spread: CostRatio | None = None
    first_batch_seconds: Cost | None = None
    wait_p50_seconds: Cost | None = None
    wait_p99_seconds: Cost | None = None
    processors: Cost | None = None
    other_processors: Amount | None = None
    memory_bytes: CostBytes | None = None
    worker_bytes: CostBytes | None = None
    shared_bytes: CostBytes | None = None
    batch_bytes: Bytes | None = None
    growth_bytes_per_batch: Cost | None = None
    gpu_idle: CostShare | None = None
    estimated_epoch_seconds: Cost | None = None
    equal_to_best: bool | None = None

    @property
    def name(self) -> str:
        """Which row it is, as sentences say it: `num_workers=4 prefetch_factor=2`."""
        return (
            " ".join(
                f"{name}={argument_text(value)}"
                for name, value in self.arguments.items()
            )
            or "the loader as it is"
        )

    @property
    def rate(self) -> float:
        """Examples per second, or batches where examples can't be counted; 0 where it failed."""
        return self.examples_per_second or self.batches_per_second or 0.0

    @property
    def rate_words(self) -> str:
        """Its rate with what it counts: `870.7 examples/s`, or batches where examples can't be counted."""
        unit = "examples/s"
        if self.examples_per_second is None:
            unit = "batches/s"
        return f"{format_number(self.rate)} {unit}"

    def problems(self) -> Iterator[str]:
        """Check that a setting that worked delivered a batch."""
        if self.outcome == "ok" and self.first_batch_seconds is None:
            yield "outcome is ok, but first_batch_seconds is missing"


class Reproduced(Record):
    """Whether two epochs from the same seed, each in a fresh process, gave the same batches, bit for bit.

    Attributes:
        batches: How many were compared.
        first_difference: Index of the first batch that differs; None where all are alike.
        what: How it differs, as a phrase: `log_mel has other values`.
    """

    batches: Count
    first_difference: Count | None = None
    what: str | None = None


class MeasuredWith(Record):
    """The settings of a loader's tuning, where something later reads them."""

    processors: Size = 1
    ranks_per_node: Size = 1


class LoaderTuning(Result):
    """`loader.json`: settings of a data loader, measured and held against the step.

    Attributes:
        lengths: The data of the run that the step's times come from; None without them.
        target: The user's code that makes the loader.
        kind: Which loader it is, as `batchtune.loaders` names it.
        settings: `sweep` (name → values), `seconds`, `trials`, `ranks_per_node`, `processors`, `seed`, and
            further options.
        device_name: Where batches were delivered to: the CPU, or a GPU.
        batch: The first batch, in words: `32 × 1600 (wav)`.
        epoch_batches, epoch_examples: How many one epoch has; None where its end is not known.
        demand: None where no step times are known.
        rows: In the order of `arguments`.
        recommended: Index of the recommended row; None where every setting failed.
        reproduced: None unless requested.
        interrupted: Whether the tuning was interrupted, so that settings are missing.
    """

    FORMAT = "batchtune/loader"

    lengths: LengthsSummary | None
    target: WorkloadRecord
    kind: str
    settings: dict[str, Any]
    device_name: str
    batch: str | None
    epoch_batches: Size | None
    epoch_examples: Size | None
    demand: Demand | None
    rows: list[LoaderRow]
    recommended: Count | None
    reason: str
    reproduced: Reproduced | None = None
    interrupted: bool = False
    warnings: list[str]

    def problems(self) -> Iterator[str]:
        """Check the settings, and that the recommended row worked."""
        yield from wrong_settings(self.settings, MeasuredWith)
        missing = list(wrong_rows(self.rows, recommended=self.recommended))
        yield from missing
        row = None if missing else self.recommended_row
        if row is not None and row.outcome != "ok":
            yield f"recommended is {self.recommended}, whose outcome is {row.outcome}"

    @property
    def recommended_row(self) -> LoaderRow | None:
        """The recommended row, if any."""
        return row_at(self.rows, self.recommended)

    @property
    def working_rows(self) -> list[LoaderRow]:
        """The rows that did not fail."""
        return [row for row in self.rows if row.outcome == "ok"]

    @property
    def measured_with(self) -> MeasuredWith:
        """The settings, where something reads them."""
        return msgspec.convert(self.settings, MeasuredWith)

    @property
    def demanded(self) -> float | None:
        """Examples per second that the step takes if it never waits; None where no step is known."""
        examples = sum(row.examples for row in self.rows)
        batches = sum(row.batches for row in self.rows)
        if (
            self.demand is None
            or not self.demand.step_seconds
            or not examples
            or not batches
        ):
            return None
        return examples / batches / self.demand.step_seconds

    @property
    def is_bottleneck(self) -> bool:
        """Whether the step waits, and no setting that was measured delivers as much as it takes."""
        row = self.recommended_row
        if (
            self.demand is None
            or row is None
            or row.gpu_idle is None
            or row.gpu_idle <= BUSY_IDLE
        ):
            return False
        return all(
            (row.batches_per_second or 0.0) * self.demand.step_seconds < 1
            for row in self.rows
        )

    @property
    def reproducible(self) -> bool | None:
        """Whether two epochs from the same seed were alike; None where it was not checked."""
        return (
            None
            if self.reproduced is None
            else self.reproduced.first_difference is None
        )


class LoaderEvidence(Record):
    """The evidence for the arguments of `loader.yaml`."""

    target: str
    device_name: str
    processors: Size
    ranks_per_node: Size
    examples_per_second: Amount | None
    step_seconds: (
        Annotated[
            StepSeconds,
            msgspec.Meta(description="Of a batch on average; null without a step."),
        ]
        | None
    )
    gpu_idle: Share | None


class LoaderConfig(ConfigFile):
    """The content of `loader.yaml`, in its order: the recommended arguments.

    Attributes:
        kind: Which loader takes them, as `batchtune.loaders` names it.
        arguments: Name → value.
    """

    FORMAT = "batchtune/loader-config"

    kind: str
    arguments: Arguments
    evidence: LoaderEvidence


def argument_text(value: Argument) -> str:
    """Return a value as the command line writes it: `true`, `none`, `4`, `spawn`."""
    return (
        str(value).lower() if value is None or isinstance(value, bool) else str(value)
    )
