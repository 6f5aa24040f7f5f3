"""The base of all records, their number types, and the records that training reads: `sampler.yaml`, `stream.yaml`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from typing_extensions import dataclass_transform

# With these bounds, sums and products stay far from what a float or a 64-bit integer can hold.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Size = Annotated[int, msgspec.Meta(ge=1, le=10**18)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
ByteChange = Annotated[int, msgspec.Meta(ge=-(2**60), le=2**60)]
Length = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
TargetLength = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e40)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e40)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
StepSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]
SettingSize = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=16_384)]

# What lengths count.
Unit = Literal["s", "ms", "samples", "frames", "tokens", "words", "characters", "bytes"]
Counting = Literal["characters", "words", "bytes"]
Reduction = Literal["max", "sum", "first", "count"]

# What a rule of the CI gate may do with a field of a record; `batchtune.reports.gate` reads it.
LESS_IS_BETTER = msgspec.Meta(extra={"better": "less"})
MORE_IS_BETTER = msgspec.Meta(extra={"better": "more"})
PER_CENT = msgspec.Meta(extra={"percent": True})
"""Limits may be written in per cent, as those of every `Share` may."""

Cost = Annotated[Amount, LESS_IS_BETTER]
CostRatio = Annotated[Cost, PER_CENT]
CostShare = Annotated[Share, LESS_IS_BETTER]
CostCount = Annotated[Count, LESS_IS_BETTER]
CostSize = Annotated[Size, LESS_IS_BETTER]
CostBytes = Annotated[Bytes, LESS_IS_BETTER]
Gain = Annotated[Amount, MORE_IS_BETTER]
GainRatio = Annotated[Gain, PER_CENT]

ROUNDING = 1e-6  # relative tolerance between numbers that follow from each other

Sizing = Literal["length", "frontier"]
Ordering = Literal["random", "ascending", "descending"]
SamplerKind = Literal["bucket", "pooled", "same-step"]
StreamAlgorithm = Literal["bucket", "pivot"]
"""How `BucketedStream` makes batches from its buffer."""
STREAM_ALGORITHMS: tuple[StreamAlgorithm, ...] = get_args(StreamAlgorithm)
LawCoefficients = dict[
    Literal[
        "seconds_per_token",
        "seconds_per_squared_token",
        "seconds_per_sequence",
        "seconds_per_batch",
    ],
    Amount,
]


class RecordMeta(msgspec.StructMeta):
    """Makes fields keywords, unless a record says otherwise: the one setting that records don't inherit."""

    def __new__(
        mcs, *definition: Any, kw_only: bool = True, **settings: Any
    ) -> RecordMeta:
        """Define a class of records."""
        return super().__new__(mcs, *definition, kw_only=kw_only, **settings)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,)
)
class Record(msgspec.Struct, frozen=True, metaclass=RecordMeta):
    """Base of the records: frozen, named fields."""

    VERSION = 1

    def problems(self) -> Iterator[str]:
        """Yield each contradiction between fields, as a phrase that names one."""
        return iter(())

    @property
    def flags(self) -> list[str]:
        """The fields that differ from their defaults, as options of the command line: `--max-length 30`, `--ddp`."""
        words = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{option_of(field.name)} {_as_word(value)}".strip())
        return words


_IN_UNITS = re.compile("_(seconds|bytes)$")


def option_of(field: str) -> str:
    """Return the option that sets a field: `--memory` for `memory_bytes`."""
    return f"--{_IN_UNITS.sub('', field).replace('_', '-')}"


def _as_word(value: str | float | bool) -> str:
    """Return an option's value as the command line has it; nothing for a flag."""
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.15g}"
    return shlex.quote(str(value))


class ReadingRecord(Record, omit_defaults=True):
    """How the manifest was read: the options as given, None for the others; `manifests.ReadOptions` describes them."""

    format: str | None = None
    length_key: str | None = None
    target_key: str | None = None
    target_file: str | None = None
    unit: Unit | None = None
    length_scale: str | None = None
    min_length: float | None = None
    max_length: float | None = None
    truncate: float | None = None
    skip_invalid: bool = False
    measure: Counting | None = None
    tokenizer: str | None = None
    reduce: Reduction | None = None


class LengthsSummary(Record):
    """The data set of a result.

    Attributes:
        reading: How its manifest was read; None without a manifest.
        left_out: Reason → number of examples left out: `longer than --max-length 30` → 1000.
        truncated: How many examples are longer than --truncate, and count as that long.
    """

    count: Size
    total: Amount
    min: Length
    max: Length
    unit: Unit | None
    fingerprint: str
    reading: ReadingRecord | None = None
    left_out: dict[str, Count] = {}
    truncated: Count = 0

    def problems(self) -> Iterator[str]:
        """Compare the total with the count and the longest."""
        if self.min > self.max:
            yield f"min is {self.min} and max {self.max}"
        if (
            not self.max * (1 - ROUNDING)
            <= self.total
            <= self.max * self.count * (1 + ROUNDING)
        ):
            yield f"total is {self.total}, for {self.count} examples up to {self.max}"


class HistogramBin(Record):
    """The examples with lengths in (from, to]: `from` is an exclusive lower edge, `to` an inclusive upper one."""

    from_: TargetLength = msgspec.field(name="from")
    to: Length
    count: Count


class Proof(Record):
    """The recommended batches as they ran in shuffled training, in fresh processes at the limit.

    Attributes:
        steps: Shuffled steps that passed.
        pairs: How often one shape followed another on an emptied cache; 0 where the allocator does not fragment.
        processes: Fresh processes that ran shuffled batches.
        replayed_steps, replayed_processes: As for `verify.json`.
        ooms: Batches that ran out of memory.
        tables: How many tables were run until one held, or time ended.
        highest_reserved_bytes: The most that the allocator held; None where unknown.
        alloc_retries: How often the allocator emptied its cache to go on; None where unknown.
        limit_bytes: The device's limit, as in `probe.json`.
        reason: Why the table is not proven; None: it is.
    """

    steps: Count = 0
    pairs: Count = 0
    processes: Count = 0
    replayed_steps: Count = 0
    replayed_processes: Count = 0
    ooms: Count = 0
    tables: Size = 1
    highest_reserved_bytes: Bytes | None = None
    alloc_retries: Count | None = None
    limit_bytes: Bytes
    reason: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the table is proven."""
        return self.reason is None


class SamplerEvidence(Record, forbid_unknown_fields=True):
    """The evidence for the recommendation.

    Attributes:
        fingerprint: That of the lengths that the table was made for.
        device: Name of the device that was measured; None without a probe.
        allocator: How torch took its memory, as for `probe.json`: training must do so, too. None where there is no
            choice, or without a probe.
        batches: Batches of one epoch, over all ranks of the sweep.
        padding_ratio: Padded cells / all cells.
        estimated_epoch_seconds: None without step times.
        unproven: How many buckets have a batch size that is not proven to fit (all of them until the table ran in
            shuffled training), or how many micro-batches are not; None without a probe.
        proof: How the table ran in shuffled training; None if it did not.
        margin_bytes: Memory that proven batches leave free; None if unknown.
        min_length, max_length: The limits of --min-length and --max-length: no batch with shorter or longer examples
            was counted or run. None without such a limit.
        left_out: Reason → number of examples left out.
        truncate: Where training cuts longer examples off: the sampler counts them as this long. None: nowhere.
        multiple_of: Batches were counted as padded to multiples of it; None: to their longest example.
    """

    fingerprint: str
    device: str | None
    allocator: str | None = None
    batches: Count
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None
    unproven: Count | None = None
    margin_bytes: Bytes | None = None
    min_length: Length | None = None
    max_length: Length | None = None
    left_out: dict[str, Count] = {}
    truncate: Length | None = None
    multiple_of: Length | None = None
    proof: Proof | None = None


class ConfigFile(Record, forbid_unknown_fields=True):
    """Base of the YAML files: which one it is, and its version, come first."""

    FORMAT: ClassVar[str]

    format: str
    version: int


class SamplerConfig(ConfigFile):
    """The content of `sampler.yaml`, in its order.

    Attributes:
        unit: Unit of lengths, boundaries and max_batch_length; None if unknown.
        max_batch_length: The largest padded length of a batch that the sweep allowed.
        max_batch_size: The largest of bucket_batch_sizes.
        num_buckets: Number of boundaries.
        bucket_boundaries: Inclusive upper edges, strictly ascending.
        bucket_batch_sizes: One for each boundary, at least 1.
        sampler: How batches are made: in the buckets, or in sorted pools, where the buckets say how many examples fit
            with the longest one of a batch.
        pool_size: The most examples of a pool; None in buckets.
        batch_overhead: The cost of a batch beyond its padded length, in the unit; pools are cut to minimise the total.
            None: each batch holds as many examples as fit.
        accumulate: The gradient accumulation: how many micro-batches each rank's share of an optimizer step is cut
            into. Training draws the step's examples, pool_size of them on all ranks. None for other samplers.
        own_accumulate: How many of the training's own batches, on each rank, make a step.
        equal_counts: Whether the micro-batches of a step hold the same number of examples, to within one.
        pair_cost: The cost of a pair of positions of an example, as in attention, if a position costs 1; steps are cut
            to minimise the total. None: only positions cost.
    """

    FORMAT = "batchtune/sampler"

    unit: str | None
    max_batch_length: Length
    max_batch_size: Size
    num_buckets: Size
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    shuffle: bool = True
    batch_ordering: Ordering = "random"
    drop_last: bool = False
    seed: Seed = 0
    evidence: SamplerEvidence
    sampler: SamplerKind = "bucket"
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    accumulate: Size | None = None
    own_accumulate: Size | None = None
    equal_counts: bool = False
    pair_cost: Amount | None = None

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the examples that training draws for it."""
        return self.own_accumulate is not None


class PackedConfig(ConfigFile):
    """The content of the `sampler.yaml` of training that packs, in its order.

    Attributes:
        unit: Unit of the lengths; None if unknown.
        max_tokens: The most tokens of a micro-batch.
        packer: As for `batchtune.PackedBatchSampler`.
        sampler: `same-step-packed` packs the sequences that training draws for each optimizer step.
        pool_size: The most sequences that are packed at once; for `same-step-packed`, those of a step on all ranks.
        time_law: The time of a micro-batch as measured, as the arguments of `batchtune.TimeLaw`; None: not measured.
        cut_at: Longer sequences count as this long; None: none may be longer than max_tokens.
        accumulate: Each rank's number of micro-batches is a multiple of this; a step that keeps its sequences has
            exactly this many.
        own_accumulate: How many of the training's own batches, on each rank, make such a step; None for other steps.
    """

    FORMAT = "batchtune/sampler"

    unit: str | None
    sampler: Literal["packed", "same-step-packed"]
    max_tokens: Size
    packer: str
    pool_size: Size
    time_law: LawCoefficients | None = None
    cut_at: Size | None = None
    accumulate: Size
    own_accumulate: Size | None = None
    shuffle: bool = True
    drop_last: bool = False
    seed: Seed = 0
    evidence: SamplerEvidence

    @property
    def keeps_examples(self) -> bool:
        """Whether each optimizer step has the sequences that training draws for it."""
        return self.own_accumulate is not None


class StreamConfig(ConfigFile):
    """The content of `stream.yaml`, in its order: the recommendation for `batchtune.BucketedStream`.

    Attributes:
        unit: Unit of lengths, boundaries and max_batch_length; None if unknown.
        algorithm: How batches are made from the buffer.
        buffer_size: The most examples that a worker holds.
        max_batch_length: The largest padded length of a batch that the sweep allowed.
        bucket_boundaries: Inclusive upper edges, strictly ascending.
        bucket_batch_sizes: One for each boundary: a batch holds at most that of its longest example's bucket.
        max_padding_ratio: For `pivot`: the largest fraction of a batch that may be padding; None: any.
        batches_per_epoch: Batches of a nominal epoch on each rank; None: as many as the stream
            gives.
        drop_last: Whether the remainder at the end of the stream is dropped.
    """

    FORMAT = "batchtune/stream-config"

    unit: str | None
    algorithm: StreamAlgorithm
    buffer_size: Size
    max_batch_length: Length
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    max_padding_ratio: Share | None
    shuffle: bool
    drop_last: bool
    batches_per_epoch: Size | None
    seed: Seed
    evidence: SamplerEvidence
