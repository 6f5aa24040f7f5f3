"""The sources that a user's words mean: files, patterns, lists, folders, and data sets that Hugging Face saved."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
from braceexpand import braceexpand

from batchtune.errors import ManifestError, UsageError, listed, shortened
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.formats.json import JSON_LINES
from batchtune.manifests.source import STDIN, Source, missing
from batchtune.units import counted

# Manifests only in a folder of nothing else: next to audio or shards such files are not manifests.
_JSON_KIND = {"JSON files": (".json", ".json.gz")}
_FILES_AT_ONCE = 2000
_MOST_EXPANSIONS = 1_000_000
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")
_OUTSIDE_BRACES = re.compile(r",(?![^{}]*\})")
# NeMo's own braces, which shells leave alone: shard__OP_0..7_CL_.tar.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NEMO_BRACES = re.compile(r"_OP_([^{}]*?)_CL_")


def expand(named: str | Path | Sequence[str | Path], wanted: str | None) -> list[Source]:
    """Return the sources that a user's words mean.

    Each may be a file; `-`; a folder; a pattern (`*`, `?`, `[…]`); braces (`shard-{000..127}.tar`,
    `{train,dev}.json`), also as NeMo writes them (`_OP_0..7_CL_`); or several of these, separated by commas.
    What exists is taken as it is, whatever characters its name has. In a folder, this takes the files of the format
    `wanted` or, if that is None, of the only kind in it.

    Raises ManifestError if one of them means nothing, or a folder has no supported files, or several formats.
    """
    specs = [named] if isinstance(named, (str, Path)) else named
    sources: list[Source] = []
    for spec in map(str, specs):
        sources += _sources_named(spec, wanted)
    if not sources:
        raise ManifestError("no manifest is named", "Name a file, a folder or - for standard input.")
    first_by_file: dict[object, Source] = {}
    for source in sources:
        first = first_by_file.setdefault((os.path.realpath(source.path), source.names), source)
        if first is not source:
            message = f"duplicate input: {source.path} is named more than once"
            if first.path != source.path:
                message += f", once as {first.path}"
            raise ManifestError(message, "Name each file once.")
    return sources


def _sources_named(spec: str, wanted: str | None) -> Iterator[Source]:
    if not spec:
        raise ManifestError("the name of a manifest is empty", "Is a variable of the shell not set?")
    if _exists(spec):
        yield from _sources_at(Path(spec), wanted)
        return
    if _URL.match(spec):
        raise UsageError(
            f"{shortened(spec)} is a URL, and manifests are read from files",
            "Download it first, or write it to batchtune's standard input: `curl URL | batchtune ... -`.",
        )
    for name in _expanded_braces(spec):
        if name == str(STDIN):
            yield Source(STDIN)
        elif _exists(name) or not glob.has_magic(name):
            yield from _sources_at(Path(name), wanted)
        else:
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                hint = "Check the pattern; quote it, so that the shell leaves it alone."
                raise ManifestError(f"nothing matches {spec}", hint)
            for match in matches:
                yield from _sources_at(Path(match), wanted, is_named=False)


def _exists(name: str) -> bool:
    try:
        os.stat(name)
    except OSError:
        return False
    except ValueError:  # a NUL character, or half a surrogate pair
        hint = "It contains a character that no file name can have."
        raise ManifestError(f"{shortened(name)} can't name a manifest", hint) from None
    return name != str(STDIN)


def _expanded_braces(spec: str) -> list[str]:
    """Return the names that braces (bash's and NeMo's), and commas outside them, stand for."""
    pattern = _NEMO_BRACES.sub(r"{\1}", spec)
    count = 0
    for part in _OUTSIDE_BRACES.split(pattern):
        count += math.prod(abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(part))
    if count > _MOST_EXPANSIONS:
        hint = f"At most {_MOST_EXPANSIONS:,} can be named at once."
        raise ManifestError(f"{shortened(spec)} means more than {_MOST_EXPANSIONS:,} files", hint)
    if pattern.count("{") != pattern.count("}"):
        return [spec]
    names = braceexpand(f"{{{pattern},}}", escape=False)
    return [name.strip() for name in names if name.strip()] or [spec]


def _sources_at(path: Path, wanted: str | None, *, is_named: bool = True) -> list[Source]:
    if path.is_dir():
        return _sources_in(path, wanted)
    for member in FORMATS.values():
        if member.of_folder and wanted in (None, member.name) and member.folder_kind is not None:
            _, endings = member.folder_kind
            if path.name.lower().endswith(endings):  # such as one audio file
                if not path.exists():
                    raise missing(path)
                return [Source(path.parent, (path.name,))]
    return [Source(path, is_named=is_named)]


def _sources_in(folder: Path, wanted: str | None) -> list[Source]:
    saved_files = hf_files(folder)
    if saved_files is not None:
        return [Source(path) for path in saved_files]
    names = _files_below(folder)
    members = [member for member in FORMATS.values() if wanted is None or member.name == wanted]
    known_names: list[str] = []
    for member in members:
        known_names += member.folder_names
    kinds = dict(member.folder_kind for member in members if member.folder_kind is not None)
    if wanted is None or not kinds:
        for name in known_names:
            for spelling in (name, f"{name}.gz"):
                if spelling in names:
                    return [Source(folder / spelling, is_named=False)]
    names_by_kind = _by_kind(names, kinds)
    if not names_by_kind and (not kinds or JSON_LINES[0] in kinds):
        names_by_kind = _by_kind(names, _JSON_KIND)
    if len(names_by_kind) > 1:
        counts = [counted(len(files), kind.removesuffix("s")) for kind, files in names_by_kind.items()]
        hint = "Say which is the data set, with --format or with a pattern such as 'FOLDER/*.tar'."
        raise ManifestError(f"{folder} is a folder with several formats: {', '.join(counts)}", hint)
    for kind, files in names_by_kind.items():
        if any(member.of_folder and member.folder_kind == (kind, kinds.get(kind)) for member in members):
            return [Source(folder, chunk) for chunk in _chunks(names)]
        return [Source(folder / name, is_named=False) for name in files]
    supported = "supported files" if wanted is None else f"files of the format {wanted}"
    hint = "Supported: audio files, tar shards, Parquet, Arrow or JSON files, a data set that Hugging Face's datasets"
    hint = f"{hint} saved, a Kaldi folder ({', '.join(known_names)}). Or name a file."
    raise ManifestError(f"{folder} is a folder that contains no {supported}", hint)


def _by_kind(names: Sequence[str], kinds: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return kind → the names with one of its endings, without kinds that have none."""
    names_by_kind = {}
    for kind, endings in kinds.items():
        files = [name for name in names if name.lower().endswith(endings)]
        if files:
            names_by_kind[kind] = files
    return names_by_kind


def _files_below(folder: Path) -> list[str]:
    """Return all files below a folder but hidden ones, relative to it, sorted."""

    def refuse(error: OSError) -> None:
        raise ManifestError(f"{error.filename} can't be listed: {error.strerror}", "Ask for the right to read it.")

    names = []
    entered: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real_path = os.path.realpath(parent)
        if real_path in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(parent, folder)
        names += [os.path.normpath(os.path.join(below, name)) for name in files if not name.startswith(".")]
    return sorted(names, key=lambda name: (_stem(name), name))


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


_STATE = "state.json"
_INFO = "dataset_info.json"
_DICT = "dataset_dict.json"
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
    state_path = folder / _STATE
    if not state_path.is_file():
        if (folder / _DICT).is_file():
            raise _of_splits(folder)
        return None
    try:
        state: _State = _decoded(state_path, _State)
    except ManifestError:
        if (folder / _INFO).is_file():
            raise
        return None  # another program's state.json
    if state.indices:
        hint = "Save it again: load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW)."
        raise ManifestError(f"{folder} keeps the order of its rows in a file of its own, which is not read", hint)
    if not state.data_files:
        raise ManifestError(f"{state_path} names no data files", _SAVE_AGAIN)
    for file in state.data_files:
        name = file.filename
        base_names = {PurePosixPath(name).name, PureWindowsPath(name).name}
        if name in ("", ".", "..") or "\0" in name or base_names != {name}:
            hint = f"All data files must lie in the folder itself. {_SAVE_AGAIN}"
            raise ManifestError(f"{state_path} names {shortened(name)}, which is not a plain file name", hint)
        if file.skip or file.take is not None:
            raise ManifestError(f"{state_path} takes only a part of the rows of {shortened(name)}", _SAVE_AGAIN)
        if not (folder / name).is_file():
            hint = "Copy the folder whole, or save it again."
            raise ManifestError(f"{folder / name} is absent, though {_STATE} names it", hint)
    return [folder / file.filename for file in state.data_files]


def _of_splits(folder: Path) -> ManifestError:
    splits = _decoded(folder / _DICT, dict[str, list[str]]).get("splits") or []
    message = f"{folder} is a DatasetDict, a folder of several data sets; its splits: {listed(splits) or 'none'}"
    hint = _SAVE_AGAIN
    if splits:
        hint = f"Name one of them, for example {folder / splits[0]}."
    return ManifestError(message, hint)


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(Source(path, is_named=False).content(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"{path} is not as datasets writes it: {error}", _SAVE_AGAIN) from None
