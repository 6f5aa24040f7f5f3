"""SpeechBrain's `dynamic_bucketed_batch`: on lengths alone, batch for batch, and as a user has set it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from batchtune.buckets.advice import longer_than
from batchtune.buckets.current_settings import (
    OPTION,
    YOURS,
    GivenSettings,
    Known,
    SettingLength,
    Settings,
    SettingSize,
    read_settings,
)
from batchtune.configs import STREAM_LIMITS, Recipe, RecipeBlock, entries
from batchtune.epochs.table import Limits
from batchtune.lengths import BoolArray, FloatArray, Lengths
from batchtune.results import Share
from batchtune.streams.bucketed import (
    LengthReader,
    SortedBuffer,
    StreamBatches,
    around_pivot,
    collected,
)
from batchtune.units import PER_SECOND, counts_samples, format_length, format_number

_SAMPLE_LENGTHS = ("min_sample_len", "max_sample_len")
_PIVOT = "indices_around_random_pivot"


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """A user's current way to batch a stream, in the unit of the lengths.

    `settings` are the `current_settings` of `stream.json`; `notes` say what was assumed, and what may surprise, in
    sentences without a full stop.
    """

    batching: PivotSettings
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


class PivotSettings(Settings, frozen=True, kw_only=True):
    """The parameters of SpeechBrain's `dynamic_bucketed_batch` with `indices_around_random_pivot`, as users set them.

    A batch begins as one random example of the sorted buffer, and grows to either side, by the neighbour that pads
    least, until its padded length reaches the target or neither neighbour may join. In a recipe, the parameters are
    those of the function with its `sampler_kwargs`, or these alone.

    Attributes:
        target_batch_numel: A batch grows until its padded length is as large. Required: SpeechBrain has no default.
        max_batch_numel: No example joins that would make the padded length larger; a longer example is a batch of
            one. None: a batch overshoots its target, by one example and by how much that pads the others.
        max_batch_size: The most examples of a batch; None: any number. Below 1: one.
        max_padding_ratio: No example joins that would make padding a larger part; None: any. Below 0: batches of one.
        buffersize: A batch is made whenever this many examples are held. Below 1: only when all of the stream is held.
        drop_end: Whether to leave out the examples that are held at the end of the stream.
        min_sample_len, max_sample_len: Shorter and longer examples are left out; None: any length.
        sample_rate: How many samples a second the limits count, as a user gives it; None: the unit of the lengths.
    """

    NAME = "speechbrain"
    SIGNS = STREAM_LIMITS
    AROUND = ("buffersize", "drop_end", *_SAMPLE_LENGTHS, "sample_rate")

    target_batch_numel: SettingLength
    max_batch_numel: SettingLength | None = None
    max_batch_size: SettingSize | None = None
    max_padding_ratio: Share | None = 0.2
    buffersize: SettingSize = 1024
    drop_end: bool = False
    min_sample_len: SettingLength | None = None
    max_sample_len: SettingLength | None = None
    sample_rate: SettingLength | None = None

    def keeps(self, lengths: FloatArray) -> BoolArray:
        """Return which examples the length limits keep."""
        kept = np.ones(lengths.shape, dtype=np.bool_)
        if self.min_sample_len is not None:
            kept &= lengths >= self.min_sample_len
        if self.max_sample_len is not None:
            kept &= lengths <= self.max_sample_len
        return kept

    @classmethod
    def find(cls, recipe: Recipe) -> RecipeBlock | None:
        """Return the training's settings: those passed to the function, if the file's top has them, too."""
        return recipe.training_block(STREAM_LIMITS, STREAM_LIMITS)

    @classmethod
    def check_block(cls, recipe: Recipe, block: RecipeBlock) -> None:
        """Refuse another `sampler_fn`."""
        recipe.check_block(block)
        for mapping in block.chain:
            function = entries(mapping).get("sampler_fn")
            if function is not None and _PIVOT not in f"{function.tag}{function.value}":
                problem = (
                    f"sampler_fn is not {_PIVOT}, so its batches can't be reproduced"
                )
                raise recipe.wrong(function, problem, "Leave --current out.")

    def current(
        self, given: GivenSettings[PivotSettings], lengths: Lengths
    ) -> CurrentStream:
        """Return the settings in the unit of the lengths: numbers of samples become seconds."""
        rate = self._rate(given, lengths)
        batching = structs.replace(self, sample_rate=None)
        notes = []
        if rate is not None:
            for name in (*STREAM_LIMITS, *_SAMPLE_LENGTHS):
                samples = getattr(self, name)
                if samples is not None:
                    length = samples * PER_SECOND[lengths.unit] / rate
                    batching = structs.replace(batching, **{name: length})
            notes.append(
                f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)"
            )
        if batching.max_batch_numel is not None:
            consequence = "SpeechBrain makes each a batch of one, however long"
            notes += longer_than(
                lengths,
                batching.max_batch_numel,
                f"max_batch_numel of {YOURS},",
                consequence,
            )
        if given.from_file and "buffersize" not in given.names:
            default = batching.buffersize
            notes.append(
                f"buffersize is not in {given.source}: SpeechBrain's default, {default}, is assumed"
            )
        target = format_length(batching.target_batch_numel, lengths.unit)
        settings = f"target_batch_numel={target}, buffersize={batching.buffersize}"
        describe = f"SpeechBrain's dynamic_bucketed_batch, {settings}"
        values = structs.asdict(batching)
        del values["sample_rate"]
        if rate is not None:
            values["sample_rate"] = rate
        return CurrentStream(batching, given.record(describe, values), tuple(notes))

    def _rate(
        self, given: GivenSettings[PivotSettings], lengths: Lengths
    ) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate = self.sample_rate
        if lengths.unit not in PER_SECOND:
            if rate is not None and not given.from_file and lengths.unit != "samples":
                raise given.wrong(
                    f"sample_rate goes with lengths in seconds, but these are in {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        # A batch holds about as many of them as of samples, so the size tells nothing.
        if lengths.unit == "ms":
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        limit = (
            self.target_batch_numel
            if self.max_batch_numel is None
            else self.max_batch_numel
        )
        if not counts_samples(limit, lengths.longest):
            return None if given.from_file else rate
        if rate is None:
            raise given.wrong(
                f"a limit of {format_number(limit)} seems to be in samples, but the lengths are in {lengths.unit}",
                "Add sample_rate=16000 to the settings, or give the limits in the unit of the lengths.",
            )
        return rate


def speechbrain_batches(
    lengths: npt.ArrayLike, settings: PivotSettings, random: random.Random
) -> StreamBatches:
    """Return the batches that SpeechBrain's `dynamic_bucketed_batch` makes of a stream with these lengths.

    They equal SpeechBrain's, example for example, and leave `random` in the same state, if its `random` has the same
    state before. SpeechBrain draws from the process-wide `random`, which a DataLoader reseeds in each worker from
    torch's seed; without workers its state is arbitrary unless the program seeds it.

    Examples that the length limits leave out count as read. The examples of a batch are the longest first, as
    SpeechBrain hands them to its collate_fn. Lengths that are not whole numbers are added up in SpeechBrain's order:
    rounding decides between neighbours that pad equally.

    `lengths`, shape (examples,), are in the order of the stream and in the unit of the settings.
    Source: `speechbrain.dataio.iterators`, SpeechBrain 1.1.

    Raises:
        ValueError: Two neighbours in the buffer are of length 0, where SpeechBrain raises a ZeroDivisionError.
    """
    values = np.asarray(lengths, dtype=np.float64)
    kept = np.flatnonzero(settings.keeps(values))
    reader = LengthReader(values[kept])

    def examples_read() -> int:
        # Anything after the last valid example is read only when the stream has ended.
        if reader.ended:
            return values.size
        return int(kept[reader.count - 1]) + 1

    batches = collected(_batches(reader, kept.size, settings, random), examples_read)
    return replace(batches, examples=kept[batches.examples])


def _batches(
    reader: LengthReader, total: int, settings: PivotSettings, random: random.Random
) -> Iterator[list[int]]:
    """Yield each batch of a stream of `total` examples, as places in it, the longest example first."""
    max_cells = settings.max_batch_numel
    if max_cells is None:
        max_cells = math.inf
    max_examples: float | None = settings.max_batch_size
    if max_examples is None:
        max_examples = math.inf
    max_padding = settings.max_padding_ratio
    if max_padding is None:
        max_padding = math.inf
    target = settings.target_batch_numel

    def admits(count: int, longest: float) -> bool:
        return count * longest <= max_cells

    def grows(count: int, longest: float) -> bool:
        return count < max_examples and count * longest < target

    held = SortedBuffer()
    buffer_size = settings.buffersize if settings.buffersize > 0 else total + 1
    for number in count(1):
        if not reader.ended:
            held.fill(reader, buffer_size)
        if reader.ended and (settings.drop_end or not held.places):
            return
        pivot = random.randint(0, len(held.places) - 1)
        try:
            ends = around_pivot(held.lengths, pivot, admits, max_padding, grows)
        except ZeroDivisionError:
            raise ValueError(
                f"batch {number}: SpeechBrain's padding_ratio divides by zero, as two examples are of length 0; leave "
                "them out with min_sample_len"
            ) from None
        batch = held.take(*ends)
        batch.reverse()
        yield batch


def speechbrain_limit(lengths: Lengths, limits: Limits) -> float:
    """Return the max_batch_numel with which every batch that can occur fits.

    A batch whose longest example is u holds at most min(S, ⌊M / u⌋) examples, S the largest batch size, and B(u) fit:
    so M < (B(u) + 1) u for all u with B(u) < S, unless there are no more than B(u) examples up to u. M is at most
    max_batch_length.
    """
    histogram = lengths.histogram
    fitting = limits.largest_sizes(histogram.lengths)
    largest = np.minimum(limits.max_batch_size or np.inf, histogram.cumulative)
    too_large = ((fitting + 1) * histogram.lengths)[fitting < largest]
    if too_large.size == 0:
        return limits.max_batch_length
    # Six digits, which round by at most 5e-6.
    below = float(f"{too_large.min() * (1 - 6e-6):.6g}")
    return min(limits.max_batch_length, below)


_STREAMS: Known[PivotSettings] = Known(
    kinds=(PivotSettings,),
    hint=(
        f"Write {OPTION} key=value,key=value or the path of a SpeechBrain YAML. Known are the arguments of "
        f"SpeechBrain's dynamic_bucketed_batch: {', '.join(PivotSettings.__struct_fields__)}."
    ),
    lacking="settings of dynamic_bucketed_batch (target_batch_numel)",
)


def stream_current(text: str, lengths: Lengths) -> CurrentStream:
    """Read and check a user's current way to batch a stream, and turn it into the unit of the lengths.

    The text is as in `read_settings`; in a recipe, `buffersize` and others may also stand in a mapping around the one
    with `target_batch_numel`. Numbers may be products.

    SpeechBrain counts what `len_fn` returns, as a rule samples of audio. Limits that no batch of lengths in seconds
    can have are divided by `sample_rate`, which may stand among the settings; on the command line it always divides.

    Raises as `read_settings` does, also for lengths in another unit.
    """
    given = read_settings(text, _STREAMS)
    return given.settings.current(given, lengths)
