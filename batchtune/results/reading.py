"""Reads and writes result files: versioned JSON, whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from batchtune.errors import ResultError, shortened
from batchtune.files import read_regular, write_whole
from batchtune.results.shared import Meta, Record, Result

RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
PROBE_FILE = "probe.json"
SWEEP_FILE = "sweep.json"
SAMPLER_FILE = "sampler.yaml"
VERIFY_FILE = "verify.json"

R = TypeVar("R", bound=Result)

# What JSON may hold as it is and a terminal acts on: control characters, changes of writing direction; and what GitHub
# takes for a command.
_ACTIVE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]|(?<=##)\\[")


def meta_of(kind: type[Result]) -> Meta:
    """Return the `meta` that a newly written file of this kind carries."""
    from batchtune import __version__

    return Meta(format=kind.FORMAT, version=kind.VERSION, batchtune=__version__)


def encode(result: Result) -> bytes:
    """Return a result as the bytes of its file, which do nothing to a terminal or a log that shows them."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    return _ACTIVE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.decode()).encode() + b"\n"


def write_result(path: Path, result: Result) -> None:
    """Write a result file into a run folder, whole or not at all; a link in its place is not followed.

    Raises:
        ResultError: The file can't be written.
    """
    write_whole(path, encode(result), follow=False)


# Of a result file: a sweep of all bucket counts up to 1000 has less.
LARGEST_BYTES = 256 << 20


class _Envelope(msgspec.Struct):
    meta: Meta


def read_result(path: Path, kind: type[R]) -> R:
    """Read a result file, and check that it is of this kind, no newer than known, and that its numbers can be.

    Raises:
        ResultError: Missing, unreadable, not of this kind, newer, edited or damaged; the message names the field.
    """
    again = "Make it anew with the command that wrote it."
    data = read_regular(path, LARGEST_BYTES, again)
    try:
        meta = msgspec.json.decode(data, type=_Envelope).meta
        if meta.format != kind.FORMAT:
            raise ResultError(f"{path} is a {shortened(meta.format)} file; a {kind.FORMAT!r} file is needed here")
        if meta.version > kind.VERSION:
            raise ResultError(
                f"{path} has version {meta.version} of {shortened(meta.format)}, written by batchtune "
                f"{shortened(meta.batchtune)}; this batchtune knows versions up to {kind.VERSION}",
                "Install a newer batchtune.",
            )
        found = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ResultError(f"{path} is edited or damaged: {error}", again) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path} is damaged: {error}", again) from error
    for problem in _problems(found):
        raise ResultError(f"{path} is edited or damaged: {problem}", again)
    return found


def _problems(record: Record, place: str = "") -> Iterator[str]:
    """Yield what is wrong with a record, then with those that it holds."""
    yield from (f"{place}{problem}" for problem in record.problems())
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Record):
            yield from _problems(value, f"{place}{name}: ")
        elif isinstance(value, list) and value and isinstance(value[0], Record):
            for index, one in enumerate(value):
                yield from _problems(one, f"{place}{name}, entry {index}: ")
