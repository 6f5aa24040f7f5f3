"""The sources that a user's words mean: files, patterns, lists, folders, and data sets that Hugging Face saved."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgspec

from batchtune.errors import ManifestError, listed, shortened
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.formats.json import JSON_LINES
from batchtune.manifests.source import STDIN, Source, missing
from batchtune.units import counted

# Manifests only in a folder of nothing else: next to audio or shards such files are not manifests.
_JSON = ("JSON files", (".json", ".json.gz"))
_FILES_AT_ONCE = 2000
_MOST_EXPANSIONS = 1_000_000
# Commas outside braces separate names.
_NAME = re.compile(r"(?:\{[^{}]*\}|[^,])+")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")
# NeMo's own braces, which shells leave alone: shard__OP_0..7_CL_.tar.
_NEMO_BRACES = re.compile(r"_OP_([^{}]*?)_CL_")


def expand(named: str | Path | Sequence[str | Path], wanted: str | None) -> list[Source]:
    """Return the sources that a user's words mean.

    Each may be a file; `-`; a folder; a pattern (`*`, `?`, `[…]`); braces (`shard-{000..127}.tar`,
    `{train,dev}.json`), also as NeMo writes them (`_OP_0..7_CL_`); or several of these, separated by commas.
    What exists is taken as it is, whatever characters its name has. In a folder, this takes the files of the format
    `wanted` or, if that is None, of the only kind in it.

    Raises ManifestError if one of them means nothing, or a folder holds nothing known, or several kinds.
    """
    found: list[Source] = []
    for spec in map(str, [named] if isinstance(named, (str, Path)) else named):
        if not spec:
            raise ManifestError("the name of a manifest is empty", "Is a variable of the shell not set?")
        try:
            os.stat(spec)
        except OSError:
            pass  # perhaps a pattern
        except ValueError:  # a NUL character, or half a surrogate pair
            hint = "It holds a character that no file name can have."
            raise ManifestError(f"{shortened(spec)} can't name a manifest", hint) from None
        found += _expanded(spec, wanted)
    if not found:
        raise ManifestError("no manifest is named", "Name a file, a folder or - for standard input.")
    seen: dict[object, Source] = {}
    for one in found:
        first = seen.setdefault((os.path.realpath(one.path), one.names), one)
        if first is not one:
            spelt = "" if first.path == one.path else f", once as {first.path}"
            raise ManifestError(f"{one.path} is named more than once{spelt}", "Its examples would count twice.")
    return found


def _expanded(spec: str, wanted: str | None) -> Iterator[Source]:
    if spec == str(STDIN):
        yield Source(STDIN)
    elif os.path.exists(spec):
        yield from _sources(Path(spec), wanted)
    elif "," in spec and (parts := [part.strip() for part in _NAME.findall(spec) if part.strip()]) != [spec]:
        for part in parts:
            yield from _expanded(part, wanted)
    else:
        for name in _braces(spec):
            plain = os.path.exists(name) or not glob.has_magic(name)
            matches = [name] if plain else sorted(glob.glob(name, recursive=True))
            for match in matches:
                yield from _sources(Path(match), wanted, is_named=plain)
            if not matches:
                hint = "Check the pattern; quote it, so that the shell leaves it alone."
                raise ManifestError(f"nothing matches {spec}", hint)


def _braces(spec: str) -> list[str]:
    """Expand braces as bash does: a range keeps the leading zeros of its ends."""
    choices: list[Sequence[str]] = []
    total = 1
    for index, piece in enumerate(_BRACES.split(_NEMO_BRACES.sub(r"{\1}", spec))):
        options: Sequence[object] = [piece]
        width = 0
        if index % 2 and (match := _RANGE.fullmatch(piece)):
            first, last = map(int, match.groups())
            step = 1 if last >= first else -1
            options = range(first, last + step, step)
            if any(len(end) > 1 and end.startswith("0") for end in match.groups()):
                width = max(map(len, match.groups()))
        elif index % 2:
            options = piece.split(",") if "," in piece else [f"{{{piece}}}"]
        total *= len(options)
        if total > _MOST_EXPANSIONS:
            raise ManifestError(f"{spec} means {total:,} files", f"At most {_MOST_EXPANSIONS:,} can be named at once.")
        choices.append([str(option).zfill(width) for option in options])
    return list(map("".join, itertools.product(*choices)))


def _sources(path: Path, wanted: str | None, *, is_named: bool = True) -> list[Source]:
    if path.is_dir():
        return _folder(path, wanted)
    kinds = [one.folder_kind for one in FORMATS.values() if one.of_folder and wanted in (None, one.name)]
    if not any(kind is not None and path.name.lower().endswith(kind[1]) for kind in kinds):
        return [Source(path, is_named=is_named)]
    if not path.exists():
        raise missing(path)
    return [Source(path.parent, (path.name,))]  # such as one audio file


def _folder(folder: Path, wanted: str | None) -> list[Source]:
    if (arrows := hf_files(folder)) is not None:
        return [Source(path) for path in arrows]
    names = _files(folder)
    formats = sorted(FORMATS.values(), key=lambda one: one.of_folder)
    kinds = dict(one.folder_kind for one in formats if one.folder_kind is not None and one.name == wanted)
    known = [name for one in formats for name in one.folder_names]
    if not kinds:
        both = (name + ending for name in known for ending in ("", ".gz"))
        if (first := next((name for name in both if name in names), None)) is not None:
            return [Source(folder / first, is_named=False)]
    held = _held(names, kinds or dict(one.folder_kind for one in formats if one.folder_kind is not None))
    if not held and (not kinds or JSON_LINES[0] in kinds):
        held = _held(names, dict([_JSON]))
    if len(held) > 1:
        each = ", ".join(counted(len(found), kind.removesuffix("s")) for kind, found in held.items())
        hint = "Say which is the data set, with --format or with a pattern such as 'FOLDER/*.tar'."
        raise ManifestError(f"{folder} is a folder in which different things lie: {each}", hint)
    if not held:
        message = f"{folder} is a folder in which nothing {f'of the format {wanted}' if wanted else 'known'} lies"
        hint = "Known: audio files, tar shards, parquet, arrow or JSON files, a data set that Hugging Face's datasets"
        raise ManifestError(message, f"{hint} saved, a Kaldi folder ({', '.join(known)}). Or name a file.")
    ((kind, found),) = held.items()
    if any(one.of_folder and one.folder_kind is not None and one.folder_kind[0] == kind for one in formats):
        return [Source(folder, chunk) for chunk in _chunks(names)]
    return [Source(folder / name, is_named=False) for name in found]


def _held(names: Sequence[str], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    held = {kind: [name for name in names if name.lower().endswith(endings)] for kind, endings in kinds.items()}
    return {kind: found for kind, found in held.items() if found}


def _files(folder: Path) -> list[str]:
    """List all files below a folder but hidden ones, relative to it, sorted."""

    def refuse(error: OSError) -> None:
        raise ManifestError(f"{error.filename} can't be listed: {error.strerror}", "Ask for the right to read it.")

    found = []
    entered: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        if real in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(parent, folder)
        found += [os.path.normpath(os.path.join(below, name)) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda name: (_stem(name), name))


def _chunks(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield some names at a time; files of one stem stay together."""
    chunk: list[str] = []
    for _, group in itertools.groupby(names, key=_stem):
        chunk += group
        if len(chunk) >= _FILES_AT_ONCE:
            yield tuple(chunk)
            chunk = []
    if chunk:
        yield tuple(chunk)


def _stem(name: str) -> str:
    """Return the name that files of one example share, with the folder: `x` of x.wav and x.normalized.txt."""
    folder, base = os.path.split(name)
    return os.path.join(folder, base.split(".", 1)[0])


_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
_SAVE_AGAIN = "Save the data set again with save_to_disk."


class _DataFile(msgspec.Struct):
    filename: str
    skip: int | None = None
    take: int | None = None


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)


def hf_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a data set that datasets' `Dataset.save_to_disk` wrote, in order, or None.

    Raises ManifestError for several splits, rows that are reordered by a file of their own, or a damaged folder.
    """
    if not (folder / _STATE).is_file():
        if not (folder / _DICT).is_file():
            return None
        splits = _read(folder / _DICT, dict[str, list[str]]).get("splits") or []
        message = f"{folder} is a DatasetDict, a folder of several data sets; its splits: {listed(splits) or 'none'}"
        raise ManifestError(message, f"Name one of them, for example {folder / splits[0]}." if splits else _SAVE_AGAIN)
    try:
        state: _State = _read(folder / _STATE, _State)
    except ManifestError:
        if (folder / _INFO).is_file():
            raise
        return None  # another program's state.json
    if state.indices:
        hint = "Save it again: load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW)."
        raise ManifestError(f"{folder} keeps the order of its rows in a file of its own, which is not read", hint)
    if not state.data_files:
        raise ManifestError(f"{folder / _STATE} names no data files", _SAVE_AGAIN)
    for file in state.data_files:
        name = file.filename
        if name in ("", ".", "..") or "\0" in name or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
            hint = f"All data files must lie in the folder itself. {_SAVE_AGAIN}"
            raise ManifestError(f"{folder / _STATE} names {shortened(name)}, which is not a plain file name", hint)
        if file.skip or file.take is not None:
            raise ManifestError(f"{folder / _STATE} takes only a part of the rows of {shortened(name)}", _SAVE_AGAIN)
        if not (folder / name).is_file():
            hint = "Copy the folder whole, or save it again."
            raise ManifestError(f"{folder / name} is absent, though {_STATE} names it", hint)
    return [folder / file.filename for file in state.data_files]


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(Source(path, is_named=False).content(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"{path} is not as datasets writes it: {error}", _SAVE_AGAIN) from None
