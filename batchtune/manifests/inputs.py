"""What the user names → the sources to read: braces, patterns, lists, folders, and Hugging Face's data sets."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.manifests.base import Format
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.formats.json import JSON_LINES
from batchtune.manifests.source import STDIN, Source
from batchtune.units import counted

# Of a folder in which nothing else lies: next to audio or shards such files are no manifests.
_JSON, _JSON_ENDINGS = "JSON files", (".json", ".json.gz")
_FILES_AT_ONCE = 2000
_MOST_EXPANSIONS = 1_000_000
# NeMo's own braces, which shells leave alone: shard__OP_0..7_CL_.tar.
_OPEN, _CLOSE = "_OP_", "_CL_"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")


@dataclass(frozen=True, slots=True)
class Input:
    """One source of a data set.

    Attributes:
        path: A file or `STDIN`, or the folder in which the files are.
        names: Relative to the folder; None for a file.
        kept: The source, once it is open: what was found out about it, or copied from a pipe, is not lost.
    """

    path: Path
    names: tuple[str, ...] | None = None
    kept: list[Source] = field(default_factory=list, compare=False, repr=False)

    def open(self) -> Source:
        """Raises ManifestError if it can't be read."""
        if self.kept:
            return self.kept[0]
        self.kept.append(Source(self.path, self.names))
        return self.kept[0]

    def __reduce__(self) -> tuple[type[Input], tuple[Path, tuple[str, ...] | None]]:
        """For another process, which opens the source itself."""
        return Input, (self.path, self.names)

    @property
    def size(self) -> int:
        """Bytes to read, 0 where that is not known; for files of which only headers are, a rough guess."""
        if self.names is not None:
            return len(self.names) * 16_384
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def expand(named: str | Path | Sequence[str | Path], wanted: str | None) -> list[Input]:
    """The sources that a user's words mean.

    Each may be a file; `-`; a folder; a pattern (`*`, `?`, `[…]`); braces (`shard-{000..127}.tar`,
    `{train,dev}.json`), also as NeMo writes them (`_OP_0..7_CL_`); or several of these, separated by commas.
    What exists is taken as it is, whatever characters its name has.

    Args:
        named: What the user gave, one or several.
        wanted: A format that the user named, which decides what is looked for in a folder.

    Raises:
        ManifestError: One of them means nothing, or a folder holds nothing known, or several kinds.
    """
    specs = [named] if isinstance(named, (str, Path)) else list(named)
    if any(str(spec) == "" for spec in specs):
        raise ManifestError("the name of a manifest is empty", "Is a variable of the shell not set?")
    if any("\0" in str(spec) for spec in specs):
        raise ManifestError("the name of a manifest holds a NUL character", "No file can have such a name.")
    found = [one for spec in specs for one in _expanded(str(spec), wanted)]
    if not found:
        raise ManifestError("no manifest is named", "Name a file, a folder or - for standard input.")
    if len(found) > 1:
        _refuse_twice(found)
    return found


def _refuse_twice(found: Sequence[Input]) -> None:
    seen: dict[tuple[str, tuple[str, ...] | None], Input] = {}
    for one in found:
        first = seen.setdefault((os.path.realpath(one.path), one.names), one)
        if first is not one:
            spelt = "" if first.path == one.path else f", once as {first.path}"
            raise ManifestError(f"{one.path} is named more than once{spelt}", "Its examples would count twice.")


def _expanded(spec: str, wanted: str | None) -> Iterator[Input]:
    if spec == str(STDIN):
        yield Input(STDIN)
    elif os.path.exists(spec):
        yield from _inputs(Path(spec), wanted)
    elif "," in spec and (parts := _split(spec)) != [spec]:
        for part in parts:
            yield from _expanded(part, wanted)
    else:
        for path in _braces(_plain_braces(spec), spec):
            yield from _globbed(path, spec, wanted)


def _globbed(path: str, spec: str, wanted: str | None) -> Iterator[Input]:
    if os.path.exists(path) or not glob.has_magic(path):
        yield from _inputs(Path(path), wanted)
        return
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise ManifestError(
            f"nothing matches {spec}", "Check the pattern; quote it, so that the shell leaves it alone."
        )
    for match in matches:
        yield from _inputs(Path(match), wanted)


def _split(spec: str) -> list[str]:
    """The parts between commas outside braces."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(spec):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append(spec[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, spec[start:]) if part.strip()]


def _plain_braces(spec: str) -> str:
    if _OPEN in spec and _CLOSE in spec:
        return spec.replace(_OPEN, "{").replace(_CLOSE, "}")
    return spec


def _braces(pattern: str, spec: str) -> list[str]:
    """As bash expands them: a range keeps the leading zeros of its ends."""
    pieces = _BRACES.split(pattern)
    choices = [_choices(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    total = 1
    for options in choices:
        total *= len(options)
    if total > _MOST_EXPANSIONS:
        raise ManifestError(f"{spec} means {total:,} files", f"At most {_MOST_EXPANSIONS:,} can be named at once.")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(inside: str) -> Sequence[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= _MOST_EXPANSIONS:
        raise ManifestError(f"{{{inside}}} means {abs(last - first) + 1:,} names", "Check the ends of the range.")
    padded = any(len(end) > 1 and end.startswith("0") for end in match.groups())
    width = max(map(len, match.groups())) if padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]


def _inputs(path: Path, wanted: str | None) -> Iterator[Input]:
    if path.is_dir():
        yield from _folder(path, wanted)
    elif any(_reads_file(one, path.name) for one in FORMATS.values() if wanted in (None, one.name)):
        if not path.exists():
            raise ManifestError(f"{path} does not exist", "Check the path.")
        yield Input(path.parent, (path.name,))
    else:
        yield Input(path)


def _folder(folder: Path, wanted: str | None) -> Iterator[Input]:
    arrows = hf_files(folder)
    if arrows is not None:
        yield from map(Input, arrows)
        return
    names = _files(folder)
    formats = sorted((one for one in FORMATS.values() if one.folder_kind is not None), key=lambda one: one.of_folder)
    asked = [one for one in formats if one.name == wanted]
    if not asked:
        known = (name for one in FORMATS.values() for known in one.folder_names for name in (known, f"{known}.gz"))
        if (first := next((name for name in known if name in names), None)) is not None:
            yield Input(folder / first)
            return
    kinds = dict(one.folder_kind for one in asked or formats if one.folder_kind is not None)
    held = {kind: found for kind, ends in kinds.items() if (found := [one for one in names if _ends(one, ends)])}
    if not held and (not asked or JSON_LINES[0] in kinds):
        held = {_JSON: found} if (found := [name for name in names if name.endswith(_JSON_ENDINGS)]) else {}
    if len(held) > 1:
        listed = ", ".join(counted(len(found), kind.removesuffix("s")) for kind, found in held.items())
        raise ManifestError(
            f"{folder} is a folder in which different things lie: {listed}",
            "Say which is the data set, with --format or with a pattern such as 'FOLDER/*.tar'.",
        )
    if not held:
        listed = ", ".join(name for one in FORMATS.values() for name in one.folder_names)
        raise ManifestError(
            f"{folder} is a folder in which nothing {f'of the format {wanted}' if wanted else 'known'} lies",
            "Known: audio files, tar shards, parquet, arrow or JSON files, a data set that Hugging Face's "
            f"datasets saved, a Kaldi folder ({listed}). Or name a file.",
        )
    if any(one.of_folder and one.folder_kind and one.folder_kind[0] in held for one in formats):
        yield from (Input(folder, chunk) for chunk in _chunks(names))
    else:
        yield from (Input(folder / name) for found in held.values() for name in found)


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return name.lower().endswith(endings)


def _reads_file(member: Format, name: str) -> bool:
    """Whether a format that reads folders reads this file of one."""
    return member.of_folder and member.folder_kind is not None and _ends(name, member.folder_kind[1])


def _files(folder: Path) -> list[str]:
    """All files below a folder, relative to it, sorted; hidden ones are none."""
    found = []

    def refuse(error: OSError) -> None:
        raise ManifestError(f"{error.filename} can't be listed: {error.strerror}", "Ask for the right to read it.")

    entered: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        if real in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(parent, folder)
        prefix = "" if below == "." else f"{below}/"
        found += [prefix + name for name in files if not name.startswith(".")]
    return sorted(found, key=lambda name: (_stem(name), name))


def _chunks(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The names in handy numbers; files of one stem stay together."""
    chunk: list[str] = []
    for _, group in itertools.groupby(names, key=_stem):
        chunk += group
        if len(chunk) >= _FILES_AT_ONCE:
            yield tuple(chunk)
            chunk = []
    if chunk:
        yield tuple(chunk)


def _stem(name: str) -> str:
    """What files of one example have in common: `x` of x.wav and x.normalized.txt, with the folder."""
    folder, base = os.path.split(name)
    return os.path.join(folder, base.split(".", 1)[0])


_STATE = "state.json"
_INFO = "dataset_info.json"
_DICT = "dataset_dict.json"
_LARGEST_JSON = 256 * 1024 * 1024
_LISTED = 20
_ANEW = "Save the data set anew with save_to_disk."

Record = TypeVar("Record")


class _DataFile(msgspec.Struct):
    filename: str
    skip: int | None = None
    take: int | None = None


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def hf_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a data set that `Dataset.save_to_disk` wrote, in the order of its rows.

    They are named in the folder's `state.json`; see `Dataset.save_to_disk` and `Dataset.load_from_disk` of the
    package datasets.

    Args:
        folder: Any folder.

    Returns:
        The files, or None if datasets did not save the folder.

    Raises:
        ManifestError: It was, but can't be read: it holds several splits, says that its rows are to be taken in
            another order than they stand in, is damaged, or names files that are absent or outside the folder.
    """
    if not (folder / _STATE).is_file():
        _refuse_splits(folder)
        return None
    try:
        state = _read(folder / _STATE, _State)
    except ManifestError:
        if (folder / _INFO).is_file():
            raise
        return None  # another program's state.json
    if state.indices:
        raise ManifestError(
            f"{folder} keeps the order of its rows in a file of its own, which is not read",
            "Save it anew: load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW).",
        )
    if not state.data_files:
        raise ManifestError(f"{folder / _STATE} names no data files", _ANEW)
    return [_found(folder, file) for file in state.data_files]


def _refuse_splits(folder: Path) -> None:
    path = folder / _DICT
    if not path.is_file():
        return
    splits = _read(path, _Splits).splits
    if not splits:
        raise ManifestError(f"{folder} is a DatasetDict without splits", _ANEW)
    listed = [shortened(split) for split in splits[:_LISTED]]
    if len(splits) > _LISTED:
        listed.append(f"and {len(splits) - _LISTED} more")
    raise ManifestError(
        f"{folder} is a DatasetDict, a folder of several data sets; its splits: {', '.join(listed)}",
        f"Name one of them, for example {folder / splits[0]}.",
    )


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_JSON + 1)
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror or error}", _ANEW) from None
    if len(data) > _LARGEST_JSON:
        raise ManifestError(f"{path} is far too large for what datasets writes", _ANEW)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"{path} is not as datasets writes it: {error}", _ANEW) from None


def _found(folder: Path, file: _DataFile) -> Path:
    name = file.filename
    plain = name not in ("", ".", "..") and "\0" not in name
    if not plain or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        raise ManifestError(
            f"{folder / _STATE} names {shortened(name)}, which is no plain file name",
            "All data files must lie in the folder itself. " + _ANEW,
        )
    if file.skip or file.take is not None:
        raise ManifestError(f"{folder / _STATE} takes only a part of the rows of {shortened(name)}", _ANEW)
    path = folder / name
    if not path.is_file():
        raise ManifestError(f"{path} is absent, though {_STATE} names it", "Copy the folder whole, or save it anew.")
    return path
