"""Everything that is known of each example of a data set, written down: id, length, target length, source."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from batchtune.errors import BatchtuneError
from batchtune.files import writing_whole
from batchtune.lengths import Lengths
from batchtune.manifests.collecting import Part, merged
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.planning import Plan
from batchtune.manifests.reading import (
    Manifest,
    OnProgress,
    Task,
    label_of,
    planned,
    read_all,
)

if TYPE_CHECKING:
    import pyarrow

_STORE_VERSION = 1


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
        """Writes the table as parquet, and removes what was kept. Raises ResultError where it can't be written."""
        with writing_whole(output) as stream:
            self._write(stream)
        if self.kept is not None:
            shutil.rmtree(self.kept, ignore_errors=True)

    def parquet(self) -> bytes:
        """The table as parquet."""
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
    """Reads a data set with everything that is known of each example.

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
    store = _Store(keep, options, plan) if keep is not None and len(tasks) > 1 else None
    try:
        parts = _read(tasks, store, jobs, on_progress, on_note)
        sizes = [part.lengths.size for part in parts]
        whole = merged(parts, label_of(tasks), options, plan.keys)
    except (KeyboardInterrupt, BatchtuneError):
        if store is not None and (held := store.held()):
            count = f"{held:,} of {len(tasks):,} sources"
            on_note(f"{count} are read and kept in {store.folder}: the same command goes on from there.")
        raise
    table = _table(whole, parts, sizes, plan)
    lengths = Lengths.of(
        whole.lengths,
        whole.targets,
        unit=plan.unit,
        left_out=dict(whole.left_out),
        notes=(*plan.notes, *whole.notes),
    )
    return Scanned(lengths, table, store.folder if store is not None else None)


def _table(whole: Part, parts: Sequence[Part], sizes: Sequence[int], plan: Plan) -> pyarrow.Table:
    import pyarrow

    from batchtune.manifests.tables import lengths_table

    labels = pyarrow.array([part.label for part in parts], pyarrow.string())
    indices = pyarrow.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    table = lengths_table(whole.ids or [], whole.lengths, whole.targets, plan.unit)
    table = table.append_column("source", pyarrow.DictionaryArray.from_arrays(indices, labels))
    return table.take(pyarrow.array(np.argsort(-whole.lengths, kind="stable")))


def _read(
    tasks: Sequence[Task],
    store: _Store | None,
    jobs: int,
    on_progress: OnProgress | None,
    on_note: Callable[[str], None],
) -> list[Part]:
    parts = [store.load(task) if store is not None else None for task in tasks]
    missing = [index for index, part in enumerate(parts) if part is None]
    if len(missing) < len(tasks):
        on_note(f"{len(tasks) - len(missing):,} of {len(tasks):,} sources were read before and are not read again.")
    with contextlib.closing(read_all([tasks[index] for index in missing], jobs, on_progress)) as found:
        for index, part in found:
            parts[missing[index]] = part
            if store is not None and part.broken is None:
                store.save(tasks[missing[index]], part)
    return [part for part in parts if part is not None]


class _Store:
    """What was read of single sources, in files of their own, until the whole is written.

    A source that has changed since, or is read with other options, has another name there and is read again.

    Args:
        folder: Where they are.
        options: What the user said.
        plan: What the first source decided.
    """

    def __init__(self, folder: Path, options: ReadOptions, plan: Plan) -> None:
        self.folder = folder
        self._said = repr((_STORE_VERSION, replace(options, skip_invalid=False), plan))

    def held(self) -> int:
        """How many sources are kept."""
        return sum(1 for _ in self.folder.glob("*.parquet"))

    def load(self, task: Task) -> Part | None:
        """What was read of a source, or None."""
        path = self._path(task)
        if path is None or not path.exists():
            return None
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
            told = json.loads(table.schema.metadata[b"part"])
            part = Part(
                label=told["label"],
                lengths=table["length"].to_numpy(),
                targets=table["target_length"].to_numpy() if "target_length" in table.column_names else None,
                ids=table["id"].to_pylist(),
                rows=told["rows"],
                invalid=Counter(told["invalid"]),
                shown=told["shown"],
                left_out=Counter(told["left_out"]),
            )
        except (pyarrow.ArrowException, OSError, KeyError, TypeError, ValueError):
            return None  # damaged: it is read anew
        return part

    def save(self, task: Task, part: Part) -> None:
        """Keeps what was read of a source. Raises ResultError if that can't be written."""
        import pyarrow
        import pyarrow.parquet

        path = self._path(task)
        if path is None:
            return
        columns = {"id": pyarrow.array(part.ids, pyarrow.string()), "length": part.lengths}
        if part.targets is not None:
            columns["target_length"] = part.targets
        told = {
            "label": part.label,
            "rows": part.rows,
            "invalid": part.invalid,
            "shown": part.shown,
            "left_out": part.left_out,
        }
        table = pyarrow.table(columns).replace_schema_metadata({"part": json.dumps(told)})
        with writing_whole(path, synced=False) as stream:  # one that is lost or damaged is read again
            pyarrow.parquet.write_table(table, stream)

    def _path(self, task: Task) -> Path | None:
        state = list(_states(task))
        if not state:
            return None
        digest = hashlib.sha256(repr((self._said, task.input.path, task.input.names, state)).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.parquet"


def _states(task: Task) -> Iterator[tuple[int, int]]:
    """Size and time of the last change of each file that a source is read from; nothing where they can't be had."""
    paths = [task.input.path] if task.input.names is None else [task.input.path / name for name in task.input.names]
    with contextlib.suppress(OSError):
        yield from [
            (state.st_size, state.st_mtime_ns)
            for path in (*paths, *(one.path for one in task.targets))
            for state in (path.stat(),)
        ]
