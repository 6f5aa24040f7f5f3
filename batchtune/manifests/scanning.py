"""Everything that is known of each example of a data set, written down: id, length, target length, source."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from batchtune.errors import BatchtuneError
from batchtune.files import writing_whole
from batchtune.lengths import Lengths
from batchtune.manifests import reading
from batchtune.manifests.collecting import Part, merged
from batchtune.manifests.options import ReadOptions

_STORE_VERSION = 2


def scan(
    manifest: reading.Manifest,
    options: ReadOptions,
    output: Path | IO[bytes],
    *,
    jobs: int = 1,
    on_progress: reading.OnProgress | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Lengths:
    """Read a data set, and write a Parquet table with a row for each example, longest first.

    Its columns are `id` (as the source names the example), `length`, `target_length` (where there are targets) and
    `source` (the file or folder). If there are several sources and `output` is a file, what is read of each source is
    kept in the folder OUTPUT.parts until the table is written, so that the same call goes on where it was interrupted
    or a source was broken. `on_note` is called with what the user should know at once; the other arguments are those
    of `load_lengths`.

    Raises:
        ManifestError, UsageError: As `load_lengths`.
        ResultError: The table, or what is read, can't be written.
    """
    import pyarrow.parquet

    from batchtune.manifests.tables import lengths_table

    plan, tasks = reading.planned(manifest, options, with_ids=True, on_progress=on_progress)
    kept = output.with_name(f"{output.name}.parts") if isinstance(output, Path) and not plan.alone else None
    paths = [None if kept is None else _path(kept, task) for task in tasks]
    parts = [None if path is None else _read_before(path) for path in paths]
    missing = [index for index, part in enumerate(parts) if part is None]
    count = f"{len(tasks):,} sources"
    if len(missing) < len(tasks):
        on_note(f"{len(tasks) - len(missing):,} of {count} were read before and are not read again.")

    def keep(number: int, part: Part) -> None:
        path = paths[missing[number]]
        if path is not None and part.broken is None:
            with writing_whole(path, synced=False) as stream:  # one that is lost or damaged is read again
                stream.write(msgspec.msgpack.encode(part))

    try:
        found = reading.read_all([tasks[index] for index in missing], jobs, on_progress, keep)
        for index, part in zip(missing, found, strict=True):
            parts[index] = part
        found = [part for part in parts if part is not None]
        labels, sizes = [part.label for part in found], [part.values.size for part in found]
        whole = merged(found, plan)
    except (KeyboardInterrupt, BatchtuneError):
        if held := sum(path is not None and path.exists() for path in paths):
            on_note(f"{held:,} of {count} are read and kept in {kept}: the same command goes on from there.")
        raise
    table = lengths_table(whole.ids, whole.values, whole.target_values, plan.unit)
    indices = pyarrow.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    sources = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(labels, pyarrow.string()))
    table = table.append_column("source", sources).take(pyarrow.array(np.argsort(-whole.values, kind="stable")))
    with writing_whole(output) if isinstance(output, Path) else contextlib.nullcontext(output) as stream:
        pyarrow.parquet.write_table(table, stream, compression="zstd")
    if kept is not None:
        shutil.rmtree(kept, ignore_errors=True)
    return whole.sorted(plan)


def _path(folder: Path, task: reading.Task) -> Path | None:
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


def _read_before(path: Path) -> Part | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(path.read_bytes(), type=Part)
    return None
