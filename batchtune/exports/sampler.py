"""`sampler.yaml`: the recommendation for batchtune's own sampler, and for any program that can read YAML."""

from __future__ import annotations

import io
import math
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from batchtune.errors import ResultError, shortened
from batchtune.results import (
    Amount,
    Bytes,
    Count,
    Length,
    Probe,
    ReadingRecord,
    Record,
    Seed,
    Share,
    Size,
    Sweep,
)

_LINE_WIDTH = 100
_HEADER = """\
# batchtune's recommendation for a batch sampler: an example belongs to the first bucket whose
# boundary is not below its length; batches of that bucket have the batch size in the same place.
"""
_LISTS = ("bucket_boundaries", "bucket_batch_sizes")
_AGAIN = "Make it anew with `batchtune sweep-buckets`."


class Evidence(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the recommendation stands on.

    Attributes:
        fingerprint: Of the lengths: the table holds for these data.
        device: Name of the device that was measured; None where the sweep had no probe.
        batches: Batches of one epoch, over all ranks that the sweep was made for.
        padding_ratio: Padded cells / all cells.
        estimated_epoch_seconds: None where no step times are known.
        unproven: How many buckets have a batch size that is not proven to fit; None where nothing was probed.
        margin_bytes: Memory that proven batches leave free; None where it is not known.
        min_length, max_length: Shorter and longer examples were left out (--min-length, --max-length): no batch with
            them was counted or run. None without such a limit.
        left_out: Reason → number of examples that were left out; empty where none was, or in older files.
        multiple_of: Batches were counted as padded to multiples of it; None: to their longest example.
    """

    fingerprint: str
    device: str | None
    batches: Count
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None
    unproven: Count | None = None
    margin_bytes: Bytes | None = None
    min_length: Length | None = None
    max_length: Length | None = None
    left_out: dict[str, Count] = msgspec.field(default_factory=dict)
    multiple_of: Length | None = None

    @property
    def filters(self) -> str | None:
        """The limits as on the command line, `--min-length 1 --max-length 30`; None without any."""
        return ReadingRecord(min_length=self.min_length, max_length=self.max_length).filters


class SamplerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `sampler.yaml`, in its order.

    Attributes:
        unit: What lengths, boundaries and max_batch_length count; None where it is unknown.
        max_batch_length: The largest padded length of a batch that the sweep allowed.
        max_batch_size: The largest of bucket_batch_sizes.
        num_buckets: Number of boundaries.
        bucket_boundaries: Inclusive upper edges, strictly ascending.
        bucket_batch_sizes: One for each boundary, at least 1.
    """

    FORMAT: ClassVar[str] = "batchtune/sampler"
    VERSION: ClassVar[int] = 1

    format: str
    version: int
    unit: str | None
    max_batch_length: Length
    max_batch_size: Size
    num_buckets: Size
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    shuffle: bool
    batch_ordering: Literal["random", "ascending", "descending"]
    drop_last: bool
    seed: Seed
    evidence: Evidence


def sampler_config(sweep: Sweep, probe: Probe | None = None) -> SamplerConfig:
    """The sweep's recommended row as a sampler config.

    Args:
        sweep: The sweep.
        probe: What it was made with; None where it had none.

    Raises:
        ResultError: The sweep recommends no row, or its recommended row or its seed is damaged.
    """
    if sweep.recommended is None:
        raise ResultError(
            f"The sweep recommends no bucket table: {sweep.reason}",
            "Sweep more bucket counts with --num-buckets, or keep the fixed batch size.",
        )
    if not 0 <= sweep.recommended < len(sweep.rows):
        raise ResultError(f"The sweep recommends row {sweep.recommended} of {len(sweep.rows)}", _AGAIN)
    seed = sweep.settings.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ResultError(f"The sweep's seed is no whole number: {shortened(seed)}", _AGAIN)
    row = sweep.rows[sweep.recommended]
    reading = sweep.lengths.reading or ReadingRecord()
    config = SamplerConfig(
        format=SamplerConfig.FORMAT,
        version=SamplerConfig.VERSION,
        unit=sweep.lengths.unit,
        max_batch_length=sweep.max_batch_length,
        max_batch_size=max(row.batch_sizes, default=0),
        num_buckets=len(row.boundaries),
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        shuffle=True,
        batch_ordering="random",
        drop_last=False,
        seed=seed,
        evidence=Evidence(
            fingerprint=sweep.lengths.fingerprint,
            device=sweep.device_name,
            batches=row.batches,
            padding_ratio=row.padding_ratio,
            estimated_epoch_seconds=row.estimated_epoch_seconds,
            unproven=row.unproven,
            margin_bytes=probe.margin.bytes if probe is not None and probe.margin is not None else None,
            min_length=reading.min_length,
            max_length=reading.max_length,
            left_out=sweep.lengths.left_out,
            multiple_of=_multiple_of(sweep),
        ),
    )
    _check(config, "The sweep's recommended row is damaged", _AGAIN)
    return config


def _multiple_of(sweep: Sweep) -> float | None:
    multiple = sweep.settings.get("multiple_of")
    return float(multiple) if isinstance(multiple, (int, float)) and not isinstance(multiple, bool) else None


def render_sampler_yaml(config: SamplerConfig) -> str:
    """The config as YAML; the same config gives the same bytes, and reading gives the same config."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    document = CommentedMap(msgspec.to_builtins(config))
    for name in _LISTS:
        document[name] = CommentedSeq(document[name])
        document[name].fa.set_flow_style()
    yaml = YAML()
    yaml.Representer = _representer()
    # Long lines first, for the lists to be broken below: YAML's own breaks leave spaces at the ends of lines.
    yaml.width = sys.maxsize
    stream = io.StringIO()
    yaml.dump(document, stream)
    lines = [_HEADER, *(_broken(line) for line in stream.getvalue().splitlines(keepends=True))]
    return "".join(lines)


def _representer() -> type[Any]:
    """How values are written where YAML leaves a choice.

    None as `null`; 1e-05 as `1.0e-05`, which readers of YAML 1.1 too take for a number; a string with line breaks
    or control characters with escapes, because not all of them survive in plain or single quotes (U+0085).
    """
    from ruamel.yaml.representer import RoundTripRepresenter

    class Representer(RoundTripRepresenter):
        pass

    def represent_none(representer: Representer, _: None) -> Any:
        return representer.represent_scalar("tag:yaml.org,2002:null", "null")

    def represent_float(representer: Representer, value: float) -> Any:
        text = repr(value)
        text = text if "." in text else text.replace("e", ".0e")
        return representer.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_str(representer: Representer, value: str) -> Any:
        style = None if value.isprintable() else '"'
        return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Representer.add_representer(str, represent_str)
    Representer.add_representer(type(None), represent_none)
    Representer.add_representer(float, represent_float)
    return Representer


def _broken(line: str) -> str:
    """A list's line, broken between its numbers where it is too long; other lines as they are."""
    if not line.startswith(tuple(f"{name}: [" for name in _LISTS)):
        return line
    return (
        textwrap.fill(line, _LINE_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"
    )


def read_sampler_yaml(path: Path) -> SamplerConfig:
    """Reads and checks a `sampler.yaml`.

    Raises:
        ResultError: Missing, unreadable, no YAML, of another format, newer, or damaged; the message names
            the field.
    """
    document = _load(path)
    found = document.get("format") if isinstance(document, dict) else None
    if found != SamplerConfig.FORMAT:
        named = f"has the format {found[:60]!r}" if isinstance(found, str) else "has a format that is no name"
        what = "has no format" if found is None else named
        raise ResultError(
            f"{path} {what}; a file of the format {SamplerConfig.FORMAT!r} is needed here",
            "Give the sampler.yaml that `batchtune sweep-buckets` wrote.",
        )
    version = document.get("version")
    if isinstance(version, int) and version > SamplerConfig.VERSION:
        raise ResultError(
            f"{path} has version {version} of {shortened(found)}; "
            f"this batchtune knows versions up to {SamplerConfig.VERSION}",
            "Install a newer batchtune.",
        )
    mend = "Mend the field, or make the file anew with `batchtune sweep-buckets`."
    try:
        config = msgspec.convert(document, type=SamplerConfig)
    except msgspec.ValidationError as error:
        raise ResultError(f"{path} is damaged: {error}", mend) from error
    _check(config, f"{path} is damaged", mend)
    return config


def _load(path: Path) -> Any:
    """The YAML document as plain values: a file can make nothing else, and can't grow beyond its size."""
    from batchtune.plain_yaml import parse_yaml, plain_value, read_text

    if not path.exists():
        raise ResultError(f"{path} does not exist", "`batchtune sweep-buckets` writes it.")
    return plain_value(parse_yaml(read_text(path, str(path), _AGAIN), str(path)))


def _check(config: SamplerConfig, what: str, hint: str) -> None:
    """Checks what the types can't say.

    Raises:
        ResultError: `what`, and which field is wrong.
    """
    boundaries, sizes = config.bucket_boundaries, config.bucket_batch_sizes
    if not boundaries:
        raise ResultError(f"{what}: bucket_boundaries is empty", hint)
    if len(sizes) != len(boundaries):
        raise ResultError(f"{what}: {len(sizes)} bucket_batch_sizes for {len(boundaries)} bucket_boundaries", hint)
    if config.num_buckets != len(boundaries):
        raise ResultError(
            f"{what}: num_buckets is {config.num_buckets}, but there are {len(boundaries)} bucket_boundaries",
            hint,
        )
    if not all(math.isfinite(boundary) and boundary > 0 for boundary in boundaries):
        raise ResultError(f"{what}: bucket_boundaries must be positive and finite", hint)
    for index in range(1, len(boundaries)):
        if not boundaries[index - 1] < boundaries[index]:
            raise ResultError(
                f"{what}: bucket_boundaries must ascend, but entry {index} ({boundaries[index]}) follows "
                f"{boundaries[index - 1]}",
                hint,
            )
    for index, size in enumerate(sizes):
        if size < 1:
            raise ResultError(f"{what}: entry {index} of bucket_batch_sizes is {size}; 1 is the least", hint)
    if config.seed < 0:
        raise ResultError(f"{what}: seed is {config.seed}; 0 is the least", hint)
    if config.max_batch_size != max(sizes):
        raise ResultError(
            f"{what}: max_batch_size is {config.max_batch_size}, but the largest of bucket_batch_sizes is {max(sizes)}",
            hint,
        )
    if not (math.isfinite(config.max_batch_length) and config.max_batch_length > 0):
        raise ResultError(f"{what}: max_batch_length must be positive and finite", hint)
