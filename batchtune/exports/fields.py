"""What the templates of exports say: the data, the row, what was left out, and the arguments of the data loader."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Tuned, batches_per_rank
from batchtune.loaders import kind_of
from batchtune.results import (
    LOADER_CONFIG_FILE,
    TORCH_ARGUMENTS,
    Argument,
    Arguments,
    ReadingRecord,
    Row,
    StreamRow,
    StreamSweep,
    Sweep,
    argument_text,
    unproven_sizes,
)
from batchtune.units import counted, format_length, format_number, format_percent, format_seconds, format_size

# The defaults of torch's DataLoader: an argument with its default needs no remark if it can't be expressed.
_DEFAULTS: Arguments = {"prefetch_factor": 2, "pin_memory": False, "persistent_workers": False, "in_order": True}
# Arguments that torch refuses without workers, or that do nothing then.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")


class LengthLimits(NamedTuple):
    """The limits of the tuned lengths (--min-length, --max-length), both inclusive, in their unit; None without one.

    `left_out` says how many examples were left out or truncated, and why, as sentences without a full stop.
    `positive`: lengths of 0 are left out, too.
    """

    shortest: float | None
    longest: float | None
    left_out: tuple[str, ...] = ()
    positive: bool = False

    @classmethod
    def of(cls, sweep: Sweep | StreamSweep) -> LengthLimits:
        """Return the limits of a sweep's lengths; raise ResultError if some are beyond them: the file was edited."""
        lengths = sweep.lengths
        reading = lengths.reading or ReadingRecord()
        low = reading.min_length
        high = reading.max_length
        if (low is not None and low > lengths.min) or (high is not None and high < lengths.max):
            raise ResultError(
                "The sweep is damaged: its lengths are beyond --min-length or --max-length",
                "Sweep again.",
            )
        if low is not None and low <= 0:
            low = None
        if high is not None and not math.isfinite(high):
            high = None
        remarks = []
        if lengths.left_out:
            reasons = "; ".join(f"{counted(count, 'example')}, {reason}" for reason, count in lengths.left_out.items())
            remarks.append(f"Left out at tuning: {reasons}. No batch with them was counted or run")
        if reading.truncate is not None:
            limit = format_length(reading.truncate, lengths.unit)
            verb = "counts" if lengths.truncated == 1 else "count"
            remarks.append(
                f"Truncated at tuning: {counted(lengths.truncated, 'example')} longer than {limit} (--truncate) "
                f"{verb} as that long. Truncate in training, too, before batches are made"
            )
        return cls(low, high, tuple(remarks))

    @classmethod
    def of_stream(cls, sweep: StreamSweep) -> LengthLimits:
        """Return the limits of a stream's lengths, up to the longest that was tuned with, unless longer are truncated.

        A stream may hold examples that the sweep has not seen. No batch with a longer one was counted or run.
        """
        limits = cls.of(sweep)
        reading = sweep.lengths.reading
        longest = limits.longest
        if longest is None and (reading is None or reading.truncate is None):
            longest = sweep.lengths.max
        return limits._replace(longest=longest, positive=True)

    def __bool__(self) -> bool:
        return self.positive or self.shortest is not None or self.longest is not None

    def scaled(self, factor: float) -> LengthLimits:
        """Return the limits in another unit, without floating-point noise."""
        return self._replace(shortest=_scaled(self.shortest, factor), longest=_scaled(self.longest, factor))

    def condition(self, name: str) -> str:
        """Return a Python condition that keeps what was tuned with: `1.0 <= name <= 30.0`, `0 < name <= 24.5`."""
        condition = name
        if self.shortest is not None:
            condition = f"{self.shortest!r} <= {condition}"
        elif self.positive:
            condition = f"0 < {condition}"
        if self.longest is not None:
            condition += f" <= {self.longest!r}"
        return condition


def _scaled(limit: float | None, factor: float) -> float | None:
    return None if limit is None else float(f"{limit * factor:.12g}")


class Loading(NamedTuple):
    """The recommended arguments of torch's DataLoader, `num_workers` first; empty without a recommendation.

    `others` are arguments of the user's own function; `about` says what was measured, without a full stop.
    """

    arguments: dict[str, Any]
    others: Arguments
    about: str

    @classmethod
    def of(cls, tuned: Tuned) -> Loading:
        """Return the arguments that a run recommends."""
        loader = tuned.loader
        if loader is None or not kind_of(loader.kind).IS_DATALOADER:
            return cls({}, {}, "")
        row = loader.recommended_row
        if row is None or row.arguments.get("num_workers") is None:
            return cls({}, {}, "")
        known = [name for name in TORCH_ARGUMENTS if row.workers or name not in _OF_WORKERS]
        arguments = {name: value for name in known if (value := row.arguments.get(name)) is not None}
        others = {name: value for name, value in row.arguments.items() if name not in TORCH_ARGUMENTS}
        waits = ""
        if row.gpu_idle is not None:
            waits = f", and a step that waits for data {format_percent(row.gpu_idle)} of the time"
        about = f"The loader's arguments are those of {LOADER_CONFIG_FILE}, as `batchtune tune-loader` measured them: "
        return cls(arguments, others, f"{about}{row.rate_words}{waits}")

    @property
    def workers(self) -> int | None:
        """`num_workers`; None without a recommendation."""
        return self.arguments.get("num_workers")

    def remarks(self, who: str = "", expresses: Collection[str] = TORCH_ARGUMENTS) -> list[str]:
        """Say what was measured, and name the arguments that `who` can't express, or that are not the DataLoader's."""
        beyond = {name: value for name, value in self.arguments.items() if name not in expresses}
        remarks = [self.about] if self.arguments else []
        if named := _named({name: value for name, value in beyond.items() if _DEFAULTS.get(name) != value}):
            remarks.append(f"{who} has no setting for what else was recommended: {named}")
        if named := _named(self.others):
            remarks.append(f"Also recommended, for the function that was tuned: {named}")
        return remarks

    def beside(self, workers: str) -> Iterator[str]:
        """Yield the arguments besides `num_workers` as Python code that is right without workers, too."""
        for name, value in self.arguments.items():
            if name == "persistent_workers" and value is True:
                yield f"{name}={workers} > 0"
            elif name in ("prefetch_factor", "multiprocessing_context"):
                yield f"{name}={_literal(value)} if {workers} else None"
            elif name != "num_workers":
                yield f"{name}={_literal(value)}"


def _named(arguments: Arguments) -> str:
    return ", ".join(f"{name}={argument_text(value)}" for name, value in arguments.items())


def _literal(value: Argument) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def table_fields(
    chosen: Chosen[Row], tuned: Tuned, framework: str | None = None, workers: str = "num_workers"
) -> dict[str, Any]:
    """Return what the templates of bucket tables have in common.

    `framework` pads batches to the longest example; without it, the user's collate function pads. `workers` is the
    Python expression for `num_workers`.
    """
    sweep = tuned.needed_sweep
    loading = Loading.of(tuned)
    return {
        "about_row": about_row(chosen.row, sweep),
        **_sweep_fields(chosen, sweep, framework),
        "seed": sweep.settings.get("seed", 0),
        "workers": 4 if loading.workers is None else loading.workers,
        "beside": list(loading.beside(workers)),
        "loading": loading.remarks(),
    }


def stream_fields(chosen: Chosen[StreamRow], tuned: Tuned, framework: str | None = None) -> dict[str, Any]:
    """Return what the templates of streams have in common; `framework` as for `table_fields`."""
    sweep = tuned.needed_stream
    loading = Loading.of(tuned)
    row = chosen.row
    streamed = sweep.streamed
    remarks = loading.remarks()
    swept = max(1, streamed.workers)
    if loading.workers not in (None, swept):
        remarks.append(
            f"The figures above are those of {swept} workers, the loader's of {loading.workers}: each has shards and a "
            f"buffer of its own. `batchtune sweep-stream` with --workers {loading.workers} sweeps for them"
        )
    return {
        "about_row": _about_stream(row, sweep),
        **_sweep_fields(chosen, sweep, framework),
        "limits": LengthLimits.of_stream(sweep),
        "batches": batches_per_rank(row, sweep),
        "memory": format_size(row.buffer_bytes),
        "seed": streamed.seed,
        "shard_shuffle": streamed.shuffle_shards or False,
        "sample_shuffle": streamed.shuffle_buffer or False,
        "workers": swept if loading.workers is None else loading.workers,
        "beside": list(loading.beside("num_workers")),
        "loading": remarks,
    }


def _sweep_fields(
    chosen: Chosen[Row] | Chosen[StreamRow], sweep: Sweep | StreamSweep, framework: str | None
) -> dict[str, Any]:
    lengths = sweep.lengths
    multiple = sweep.settings.get("multiple_of")
    device = f", measured on {sweep.device_name}" if sweep.device_name else ""
    padded = []
    if multiple is not None:
        who = "collate_fn must pad to them"
        if framework is not None:
            who = f"{framework} pads to the longest example unless the collate function does more"
        of = format_length(multiple, lengths.unit)
        padded.append(f"Batches were counted as padded to multiples of {of} (--multiple-of); {who}")
    return {
        "about_data": f"Tuned by batchtune for {counted(lengths.count, 'example')} with lengths in "
        f"{lengths.unit or 'an unknown unit'} (fingerprint {lengths.fingerprint[:12]}){device}",
        "row": chosen.row,
        "remarks": chosen.remarks,
        "limits": LengthLimits.of(sweep),
        "unit": lengths.unit,
        "padded": padded,
    }


def about_row(row: Row, sweep: Sweep) -> str:
    """Say what the row is, what an epoch costs with it, and how many of its sizes are not proven, in a sentence."""
    which = f"{row.strategy} with {counted(len(row.boundaries), 'bucket')}"
    if row.pool_size is not None:
        which = f"pools of {counted(row.pool_size, 'example')}"
    sized = f"max_batch_length {format_length(sweep.max_batch_length, sweep.lengths.unit)}"
    if row.sizing == "frontier":
        sized = "sized by the frontier"
    on_ranks = ""
    if sweep.world_size > 1:
        on_ranks = f" on {format_number(sweep.world_size)} ranks as batchtune's sampler deals them"
    text = f"{which}, {sized}: {_epoch(row, on_ranks)}"
    unproven = unproven_sizes(row)
    if unproven is not None:
        text += f"; {unproven} (`batchtune report` says why)"
    return text


def _about_stream(row: StreamRow, sweep: StreamSweep) -> str:
    places = []
    if sweep.world_size > 1:
        places.append(counted(sweep.world_size, "rank"))
    if sweep.streamed.workers > 1:
        places.append(counted(sweep.streamed.workers, "worker"))
    where = f" on {' with '.join(places)}" if places else ""
    if len(places) == 2:
        where += " each"
    text = f"{row.name}: {_epoch(row, where)}"
    if row.unproven:
        text += f"; {format_number(row.unproven)} of them are larger than what is proven to fit"
    return text


def _epoch(row: Row | StreamRow, where: str) -> str:
    text = f"{format_number(row.batches)} batches an epoch{where}"
    if row.estimated_epoch_seconds:
        text += f", {format_seconds(row.estimated_epoch_seconds)} by the probe's step times"
    return f"{text}, {row.padding_ratio:.1%} padding"
