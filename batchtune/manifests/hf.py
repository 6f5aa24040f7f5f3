"""A folder that Hugging Face's datasets saved: which Arrow files are its rows, in order."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeVar

import msgspec

from batchtune.errors import ManifestError, shortened

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
        The files, or None where the folder is none that datasets saved.

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
