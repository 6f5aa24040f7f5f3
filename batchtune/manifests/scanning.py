"""Everything that is known of each example of a data set, written down: id, length, target length, source."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import numpy as np

from batchtune.errors import BatchtuneError
from batchtune.files import writing_whole
from batchtune.lengths import Lengths
from batchtune.manifests.collecting import Part, merged
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.reading import (
    Manifest,
    OnProgress,
    Task,
    label_of,
    lengths_of,
    planned,
    read_all,
    targets_of,
)

if TYPE_CHECKING:
    import pyarrow

_STORE_VERSION = 2


@dataclass(frozen=True)
class Scanned:
    """A data set as it was read.

    Attributes:
        lengths: Of all examples.
        table: A row for each, longest first: `id` (as the source names the example), `length`, `target_length`
            (where there are targets) and `source` (the file or folder).
        kept: The folder of what was read of single sources, or None.
    """

    lengths: Lengths
    table: pyarrow.Table
    kept: Path | None

    def write(self, output: Path) -> None:
        """Write the table as parquet, and remove what was kept. Raises ResultError where it can't be written."""
        with writing_whole(output) as stream:
            self._write(stream)
        if self.kept is not None:
            shutil.rmtree(self.kept, ignore_errors=True)

    def parquet(self) -> bytes:
        """Return the table as parquet."""
        stream = io.BytesIO()
        self._write(stream)
        return stream.getvalue()

    def _write(self, stream: IO[bytes]) -> None:
        import pyarrow.parquet

        pyarrow.parquet.write_table(self.table, stream, compression="zstd")


def scan(
    manifest: Manifest,
    options: ReadOptions,
    *,
    keep: Path | None = None,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Scanned:
    """Read a data set with everything that is known of each example.

    Args:
        manifest: As for `load_lengths`.
        options: Likewise.
        keep: A folder to keep what is read of single sources, where there are several, so that the same call goes on
            where it was interrupted or a source was broken; None to keep nothing.
        jobs: How many processes may read at once.
        on_progress: Called now and then.
        on_note: Called with what the user should know at once.

    Raises:
        ManifestError: As `load_lengths`; what was read is kept.
        ResultError: What was read can't be kept.
    """
    plan, tasks = planned(manifest, options, with_ids=True, on_progress=on_progress)
    count = f"{len(tasks):,} sources"
    paths = [None if keep is None or plan.alone else _kept_path(keep, task) for task in tasks]
    parts = [None if path is None else _kept(path) for path in paths]
    missing = [index for index, part in enumerate(parts) if part is None]
    if len(missing) < len(tasks):
        on_note(f"{len(tasks) - len(missing):,} of {count} were read before and are not read again.")

    def save(number: int, part: Part) -> None:
        path = paths[missing[number]]
        if path is not None and part.broken is None:
            with writing_whole(path, synced=False) as stream:  # one that is lost or damaged is read again
                stream.write(msgspec.msgpack.encode(part))

    try:
        for index, part in zip(
            missing, read_all([tasks[one] for one in missing], jobs, on_progress, save), strict=True
        ):
            parts[index] = part
        found = [part for part in parts if part is not None]
        labels, sizes = [part.label for part in found], [part.values.size for part in found]
        whole = merged(found, label_of(tasks), plan)
    except (KeyboardInterrupt, BatchtuneError):
        if held := sum(path is not None and path.exists() for path in paths):
            on_note(f"{held:,} of {count} are read and kept in {keep}: the same command goes on from there.")
        raise
    import pyarrow

    from batchtune.manifests.tables import lengths_table

    table = lengths_table(whole.ids, whole.values, targets_of(whole, plan), plan.unit)
    indices = pyarrow.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    sources = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(labels, pyarrow.string()))
    order = pyarrow.array(np.argsort(-whole.values, kind="stable"))
    table = table.append_column("source", sources).take(order)
    return Scanned(lengths_of(whole, plan, owned=False), table, None if plan.alone else keep)


def _kept_path(folder: Path, task: Task) -> Path | None:
    """Name the file for what is read of a source as it is now, with these options; None for a pipe."""
    source, plan = task.source, task.plan
    files = [source.path / name for name in source.names] if source.names is not None else [source.path]
    files += [task.target_file.path] if task.target_file is not None else []
    try:
        states = [(state.st_size, state.st_mtime_ns) for state in map(Path.stat, files)]
    except OSError:
        return None
    plan = replace(plan, options=replace(plan.options, skip_invalid=False))
    said = repr((_STORE_VERSION, plan, source.path, source.names, states))
    return folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.part" if source.rereadable else None


def _kept(path: Path) -> Part | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(path.read_bytes(), type=Part)
    return None
