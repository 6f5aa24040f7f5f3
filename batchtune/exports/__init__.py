"""Turn a recommendation into one framework's config.

To add a framework: a function in `RENDERS` of a module, and a line in `_KNOWN`.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any, Generic, NamedTuple

from batchtune.errors import (
    ResultError,
    UsageError,
    did_you_mean,
    shortened,
    without_commands,
)
from batchtune.loaders import kind_of
from batchtune.results import (
    LOADER_CONFIG_FILE,
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    TORCH_ARGUMENTS,
    Algorithm,
    AnyFigures,
    EpochFigures,
    LoaderTuning,
    PackedRow,
    PackingSweep,
    Probe,
    ReadingRecord,
    Row,
    StreamRow,
    StreamSweep,
    Sweep,
    Swept,
    argument_text,
    cost_of,
    unproven_sizes,
)
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_seconds,
    format_size,
    with_full_stop,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run, as exports see it.

    `config` and `stream_config` are the paths of its `sampler.yaml` and `stream.yaml`, as a snippet should name them.
    """

    sweep: Sweep | None = None
    stream: StreamSweep | None = None
    probe: Probe | None = None
    loader: LoaderTuning | None = None
    config: str = f"batchtune-run/{SAMPLER_FILE}"
    stream_config: str = f"batchtune-run/{STREAM_CONFIG_FILE}"

    @property
    def training_notes(self) -> list[str]:
        """What training needs to take memory as the probe did, as for `Device`."""
        return [] if self.probe is None else self.probe.device.training_notes

    @property
    def needed_sweep(self) -> Sweep:
        """The sweep, for an export of a bucket table; raises ResultError without one."""
        if self.sweep is None:
            raise self._lacks(SWEEP_FILE, "sweep-buckets MANIFEST")
        return self.sweep

    @property
    def needed_stream(self) -> StreamSweep:
        """The sweep of a stream, for an export of one; raises ResultError without one."""
        if self.stream is None:
            raise self._lacks(STREAM_FILE, "sweep-stream SOURCE")
        return self.stream

    def _lacks(self, file: str, command: str) -> ResultError:
        run = str(PurePosixPath(self.config).parent)
        return ResultError(
            f"{run} holds no {file}: nothing is recommended yet",
            f"`batchtune {command} --run {shlex.quote(run)}` writes it.",
        )


class Export(NamedTuple):
    """The recommendation as a config for one framework.

    Attributes:
        name: The value of `--to`.
        title: The framework's own name.
        file: What to call the file.
        render: Returns the config or snippet for a tuned run, ready to write, with comments on what the framework can't
            express. Raises ResultError if the run lacks the sweep, or the framework can express no row or no such unit.
    """

    name: str
    title: str
    file: str
    render: Callable[[Tuned], str]


@dataclass(frozen=True, slots=True)
class Chosen(Generic[AnyFigures]):
    """The best row that a framework can express.

    `remarks`, sentences without a full stop, say how it differs from the recommended row, and what that costs.
    """

    row: AnyFigures
    remarks: tuple[str, ...] = ()


def recommended_row(sweep: Swept[AnyFigures]) -> AnyFigures:
    """Return the row that the sweep recommends; raise ResultError if it recommends nothing."""
    if sweep.recommended_row is None:
        raise ResultError(
            f"The sweep recommends nothing: {sweep.reason}",
            "Sweep with other settings, such as --num-buckets or --buffer-size, or keep your current ones.",
        )
    return sweep.recommended_row


def choose_table(
    sweep: Sweep,
    framework: str,
    expresses: Callable[[Row], bool] = lambda row: True,
    why: str = "",
) -> Chosen[Row]:
    """Choose the best bucket table that the framework can run, as `_choose` does; `why` says what rules others out.

    Only batchtune's own sampler runs pools: where they are recommended, the best table is the one that the sweep names
    next to them.
    """
    next_best = None
    if sweep.recommended_table is not None:
        next_best = sweep.rows[sweep.recommended_table]
    if recommended_row(sweep).uses_pools:
        why = "only batchtune's own sampler runs pools"
    if recommended_row(sweep).keeps_examples:
        why = "only batchtune's own sampler keeps the examples of each optimizer step"

    def is_expressed(row: Row) -> bool:
        return not row.uses_pools and expresses(row)

    return _choose(sweep, framework, is_expressed, why, next_best)


def choose_stream(
    sweep: StreamSweep, framework: str, *runs: Algorithm
) -> Chosen[StreamRow]:
    """Choose the best row of the algorithms that the framework runs, as `_choose` does."""
    why = f"it only runs the algorithm {' or '.join(runs)}"
    return _choose(
        sweep, framework, lambda row: row.algorithm in runs, why, sweep.speechbrain_row
    )


def _choose(
    sweep: Swept[AnyFigures],
    framework: str,
    expresses: Callable[[AnyFigures], bool],
    why: str,
    next_best: AnyFigures | None,
) -> Chosen[AnyFigures]:
    """Choose the recommended row if the framework can run it, else the next best if it can run that.

    If it can't, prefer rows whose batch sizes are all proven, then the lowest estimated time (number of batches, if a
    time is unknown), then the fewest buckets. Raises ResultError if the sweep recommends
    nothing, or holds no row that the framework can express.
    """
    recommended = recommended_row(sweep)
    if expresses(recommended):
        return Chosen(recommended)
    expressed = [row for row in sweep.rows if expresses(row)]
    if not expressed:
        raise ResultError(
            f"{framework} can run no row of the sweep: {why}",
            "Sweep again with all strategies and algorithms.",
        )
    timed = sweep.has_times

    def preference(row: AnyFigures) -> tuple[bool, float, int]:
        return bool(row.unproven), cost_of(row, timed=timed), len(row.boundaries)

    row = min(expressed, key=preference)
    if next_best is not None and expresses(next_best):
        row = next_best
    more = cost_of(row, timed=timed) / (cost_of(recommended, timed=timed) or 1.0) - 1
    what = "time" if timed else "batches"
    remark = (
        f"batchtune recommends {_described(recommended)}, which {framework} can't express: {why}. This is "
        f"{_described(row)}: {more:+.1%} {what}"
    )
    if (
        isinstance(row, Row)
        and isinstance(recommended, Row)
        and (recommended.keeps_examples or sweep.min_steps is not None)
    ):
        remark += f". An epoch has {counted(row.steps, 'optimizer step')} with it, not {recommended.steps:,}"
        if recommended.keeps_examples:
            remark += ", and their examples differ: `sweep-buckets --keep steps` finds a table that keeps their number"
    return Chosen(row, (remark,))


def batches_per_rank(row: StreamRow, sweep: StreamSweep) -> int:
    """Return the batches of a nominal epoch on each rank."""
    if row is sweep.recommended_row and sweep.batches_per_rank:
        return sweep.batches_per_rank
    return max(1, row.batches // sweep.world_size)


def _described(row: EpochFigures) -> str:
    """Return a row's name and what an epoch costs: `bucket with a buffer of 1024 (120 batches, 3 s an epoch)`."""
    cost = f"{format_number(row.batches)} batches"
    if row.estimated_epoch_seconds:
        cost += f", {format_seconds(row.estimated_epoch_seconds)} an epoch"
    return f"{row.sized_name} ({cost})"


# Name of --to → the framework's own name; its file.
_KNOWN = {
    "speechbrain": ("SpeechBrain", "dynamic_batch_sampler.yaml"),
    "nemo": ("NeMo", "train_ds.yaml"),
    "lhotse": ("Lhotse", "lhotse_sampler.py"),
    "espnet": ("ESPnet", "batchtune_espnet.yaml"),
    "fairseq": ("fairseq", "batchtune_fairseq.txt"),
    "transformers": ("Transformers", "batchtune_transformers.py"),
    "accelerate": ("Accelerate", "batchtune_accelerate.py"),
    "lightning": ("Lightning", "batchtune_lightning.py"),
    "pytorch": ("PyTorch", "batchtune_pytorch.py"),
    "speechbrain-stream": (
        "SpeechBrain with WebDataset",
        "speechbrain_stream.py",
    ),
    "webdataset": ("WebDataset", "webdataset_stream.py"),
    "hf-streaming": (
        "Hugging Face streaming data sets",
        "hf_stream.py",
    ),
    "lhotse-shar": ("Lhotse Shar", "lhotse_shar.py"),
    "nemo-tarred": ("NeMo with tarred data", "tarred_train_ds.yaml"),
    "verl": ("verl", "batchtune_verl.txt"),
    "openrlhf": ("OpenRLHF", "batchtune_openrlhf.txt"),
    "slime": ("slime", "batchtune_slime.txt"),
    "trl": ("TRL", "batchtune_trl.py"),
    "axolotl": ("axolotl", "batchtune_axolotl.yaml"),
}
FRAMEWORKS: tuple[str, ...] = tuple(_KNOWN)


def export_of(name: str) -> Export:
    """Return the export for a framework; raise UsageError if the name is unknown."""
    if name not in _KNOWN:
        hint = f"{did_you_mean(name.lower(), FRAMEWORKS)}Known frameworks: {', '.join(FRAMEWORKS)}."
        raise UsageError(f"unknown framework {shortened(name)}", hint)
    from batchtune.exports import frameworks, run_configs

    title, file = _KNOWN[name]
    renders = frameworks.RENDERS | run_configs.RENDERS
    return Export(name=name, title=title, file=file, render=renders[name])


def configs_of(tuned: Tuned) -> dict[str, str]:
    """Return the recommendation as batchtune's own files and for each framework that can express it, by title."""
    from batchtune.exports.run_configs import own_config, render_loader_yaml

    renders: dict[str, Callable[[], str]] = {
        SAMPLER_FILE: lambda: own_config(tuned.needed_sweep, tuned.probe),
        STREAM_CONFIG_FILE: lambda: own_config(tuned.needed_stream, tuned.probe),
    }
    if tuned.loader is not None:
        renders[LOADER_CONFIG_FILE] = partial(render_loader_yaml, tuned.loader)
    for export in map(export_of, FRAMEWORKS):
        renders[export.title] = partial(export.render, tuned)
    configs: dict[str, str] = {}
    for title, render in renders.items():
        with suppress(ResultError):
            configs[title] = render()
    return configs


# Fills the templates of exports: what they say of the data, the row, what was left out and the data loader.
#
# No text of a hostile result file gets out of its comment.

_WIDTH = 100


def one_line(text: str) -> str:
    r"""Put text on one line: characters that end a comment (\n, \r, U+0085, U+2028, ...) or hide become escapes."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


class Written(str):
    """Text that a template inserts as it is, without escapes."""


def from_template(name: str, **values: Any) -> str:
    """Fill a template of this package; `one_line` makes all values that are text harmless, except `Written`.

    The filter `comments` makes a comment of each paragraph of a text; `paragraphs` joins sentences to such a text.
    """
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchtune.exports"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters.update(
        comments=_comments,
        paragraphs=_paragraphs,
        number=number,
        in_unit=format_length,
        thousands="{:,}".format,
        counted=counted,
        argument=argument_text,
        compact=format_number,
        percent="{:.1%}".format,
        seconds=format_seconds,
        flow=flow_list,
        broken=broken,
        literal=_literal,
    )
    return environment


def _comments(text: str) -> str:
    """Return each paragraph of a text as a `#` comment."""
    comments = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words:
            comments += textwrap.wrap(
                with_full_stop(words),
                _WIDTH,
                initial_indent="# ",
                subsequent_indent="# ",
                break_on_hyphens=False,
            )
    return "".join(f"{line.rstrip()}\n" for line in comments)


def _paragraphs(sentences: Iterable[str]) -> Written:
    return Written("\n\n".join(map(one_line, sentences)))


def broken(line: str, beneath: str = "    ") -> Written:
    """Wrap a list's line between its entries; the next lines begin with `beneath`."""
    return Written(
        textwrap.fill(
            line,
            _WIDTH,
            subsequent_indent=beneath,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _literal(value: object) -> Written:
    """Return a text, number or truth value as a Python literal in ASCII."""
    text = ascii(value)
    if text == f"'{value}'" and '"' not in text:
        text = f'"{value}"'
    return Written(text)


def number(value: float) -> str:
    """Write a number as YAML 1.1 and 1.2 read it, without an exponent.

    hyperpyyaml rewrites numbers, and ruamel.yaml's round trip drops a digit of those with an exponent.
    """
    if value == int(value):
        return str(int(value))
    return format(Decimal(repr(float(value))), "f")


def flow_list(values: Sequence[float]) -> str:
    """Write `[3.995, 5.825, 15.0]`: with a decimal point in all numbers, if one needs it."""
    texts = [number(value) for value in values]
    if any("." in text for text in texts):
        texts = [text if "." in text else f"{text}.0" for text in texts]
    return f"[{', '.join(texts)}]"


class LengthLimits(NamedTuple):
    """The limits of the tuned lengths (--min-length, --max-length), both inclusive, in their unit; None without one.

    `positive`: lengths of 0 are left out, too.
    """

    shortest: float | None
    longest: float | None
    positive: bool = False

    @classmethod
    def of(cls, sweep: Swept[Any]) -> LengthLimits:
        """Return the limits of a sweep's lengths."""
        reading = sweep.lengths.reading or ReadingRecord()
        return cls(reading.min_length or None, reading.max_length)

    @classmethod
    def of_stream(cls, sweep: StreamSweep) -> LengthLimits:
        """Return the limits of a stream's lengths, up to the longest that was tuned with, unless longer are truncated.

        A stream may hold examples that the sweep has not seen. No batch with a longer one was counted or run.
        """
        limits = cls.of(sweep)._replace(positive=True)
        reading = sweep.lengths.reading
        if limits.longest is not None or (
            reading is not None and reading.truncate is not None
        ):
            return limits
        return limits._replace(longest=sweep.lengths.max)

    @property
    def known(self) -> bool:
        """Whether there is any limit."""
        return self.positive or self.shortest is not None or self.longest is not None

    def scaled(self, factor: float) -> LengthLimits:
        """Return the limits in another unit, without floating-point noise."""
        return self._replace(
            shortest=_scaled(self.shortest, factor),
            longest=_scaled(self.longest, factor),
        )

    def named(self, shortest: str, longest: str) -> dict[str, float]:
        """Return the limits that are set, by a framework's names for them."""
        limits = {shortest: self.shortest, longest: self.longest}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def condition(self, name: str) -> str:
        """Return a Python condition for the tuned examples: `1.0 <= name <= 30.0`, `0 < name <= 24.5`."""
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


def _loader_fields(tuned: Tuned, expresses: Collection[str]) -> dict[str, Any]:
    """Return the recommended arguments of torch's DataLoader: those that a framework can express, and those `beyond`.

    `loader_row` is the recommended row, None without a recommendation.
    """
    row = None
    if tuned.loader is not None and kind_of(tuned.loader.kind).IS_DATALOADER:
        row = tuned.loader.recommended_row
    if row is None:
        return {"loader": {}, "loader_row": None}
    arguments = {
        name: value for name, value in row.arguments.items() if value is not None
    }
    return {
        "loader": {name: arguments[name] for name in expresses if name in arguments},
        "loader_row": row,
        "beyond": {
            name: value for name, value in arguments.items() if name not in expresses
        },
    }


def table_fields(
    chosen: Chosen[Row], tuned: Tuned, expresses: Collection[str] = TORCH_ARGUMENTS
) -> dict[str, Any]:
    """Return what the templates of bucket tables have in common.

    `expresses` are the arguments of the DataLoader that the framework can set.
    """
    sweep = tuned.needed_sweep
    return {
        **_fields(chosen.row, chosen.remarks, sweep, tuned, expresses),
        "unproven_sizes": unproven_sizes(chosen.row),
    }


def packed_fields(
    tuned: Tuned, packing: PackingSweep, expresses: Collection[str] = TORCH_ARGUMENTS
) -> dict[str, Any]:
    """Return what the templates of packed micro-batches have in common; arguments and keys as for `table_fields`."""
    sweep = tuned.needed_sweep
    return {
        **_fields(packing.row, (), sweep, tuned, expresses),
        "packing": packing,
        "accumulate": sweep.settings.accumulate or 1,
    }


def stream_fields(
    chosen: Chosen[StreamRow],
    tuned: Tuned,
    expresses: Collection[str] = TORCH_ARGUMENTS,
) -> dict[str, Any]:
    """Return what the templates of streams have in common; arguments as for `table_fields`."""
    sweep = tuned.needed_stream
    row = chosen.row
    settings = sweep.settings
    workers = max(1, settings.workers)
    fields = _fields(row, chosen.remarks, sweep, tuned, expresses)
    return {
        **fields,
        "workers": workers,
        "limits": LengthLimits.of_stream(sweep),
        "batches": batches_per_rank(row, sweep),
        "memory": format_size(row.buffer_bytes),
        "shard_shuffle": settings.shuffle_shards or False,
        "sample_shuffle": settings.shuffle_buffer or False,
        "loader": fields["loader"] or {"num_workers": workers},
    }


def _fields(
    row: EpochFigures | PackedRow,
    remarks: Iterable[str],
    sweep: Swept[Any],
    tuned: Tuned,
    expresses: Collection[str],
) -> dict[str, Any]:
    """Return what all templates have in common."""
    return {
        "row": row,
        "sweep": sweep,
        "lengths": sweep.lengths,
        "unit": sweep.lengths.unit,
        "ranks": sweep.world_size,
        "remarks": [*tuned.training_notes, *remarks],
        "limits": LengthLimits.of(sweep),
        "seed": sweep.settings.seed,
        **_loader_fields(tuned, expresses),
    }
