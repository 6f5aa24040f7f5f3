"""A manifest → its lengths, sorted or in its own order, or written down: the one way through, whatever the format."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
import numpy as np

from batchtune.errors import BatchtuneError, ManifestError, UsageError
from batchtune.files import writing_whole
from batchtune.lengths import Lengths, Shard, StreamLengths
from batchtune.manifests.collecting import OnProgress, Part, Task, merged, read_part, too_large
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.inputs import expand
from batchtune.manifests.options import ReadOptions, check_choice
from batchtune.manifests.planning import Plan, first_plan, measure_of, reader_of
from batchtune.manifests.source import Source
from batchtune.processes.pool import run_in_processes
from batchtune.units import counted

_DEFAULTS = ReadOptions()
# Below that, starting other processes takes longer than they save.
_WORTH_BYTES = 64 * 1024 * 1024
_STORE_VERSION = 3

Manifest: TypeAlias = "str | Path | Sequence[str | Path]"


def load_lengths(
    manifest: Manifest, options: ReadOptions = _DEFAULTS, *, jobs: int = 1, on_progress: OnProgress | None = None
) -> Lengths:
    """Read the lengths of a data set, with their unit, the number left out by reason, and notes for the user.

    Args:
        manifest: A file in one of `FORMATS`, plain or compressed; a folder; a pattern; several of these, as one
            data set. See `batchtune.manifests.inputs.expand`.
        options: The user's.
        jobs: How many processes may read several sources at once. More than one starts new interpreters: not for
            scripts without `if __name__ == "__main__"`.
        on_progress: Called now and then.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options name no known format, or one column twice.
    """
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    return replace(merged(read_all(tasks, jobs, on_progress), plan).sorted(plan), reading=options.record())


def load_stream(
    manifest: Manifest, options: ReadOptions = _DEFAULTS, *, jobs: int = 1, on_progress: OnProgress | None = None
) -> StreamLengths:
    """Read the lengths of a data set in the order in which they are stored.

    Tar shards, and each of several files, are shards. Arguments and errors are those of `load_lengths`.
    """
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    keyed = FORMATS[plan.format].sharded
    tasks = [task._replace(plan=replace(task.plan, with_ids=keyed)) for task in tasks]
    parts = read_all(tasks, jobs, on_progress)
    shards: list[Shard] = []
    if keyed or (len(tasks) > 1 and all(task.source.names is None for task in tasks)):
        for task, part in zip(tasks, parts, strict=True):
            shards.append(Shard(part.label, len(part.lengths) // 8, task.source.size, part.broken is not None))
    whole = merged(parts, plan)
    values = whole.values.copy()
    targets = whole.target_values
    return StreamLengths(
        lengths=replace(whole.sorted(plan), reading=options.record()),
        values=values,
        targets=None if targets is None else targets.copy(),
        shards=shards,
        repeated_ids=len(whole.ids) - len(set(whole.ids)) if keyed else None,
    )


def load_ordered_lengths(manifest: Manifest, options: ReadOptions = _DEFAULTS) -> StreamLengths:
    """Read the lengths of a data set so that entry i is the length of example i.

    Raises as `load_lengths` does, and UsageError if the options leave examples out.
    """
    limits = ("skip_invalid", "min_length", "max_length")
    if given := [f"--{name}".replace("_", "-") for name in limits if getattr(options, name) not in (None, False)]:
        message = f"{' and '.join(given)} would leave out examples that the data set still has: entry i of the lengths"
        hint = "Leave them out of the data set and its manifest instead."
        raise UsageError(f"{message} would no longer be that of example i", hint)
    return load_stream(manifest, options)


def scan(
    manifest: Manifest,
    options: ReadOptions,
    output: Path | IO[bytes],
    *,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Lengths:
    """Read a data set, and write a Parquet table with a row for each example, longest first.

    Its columns are `id` (as the source names the example), `length`, `target_length` (where there are targets) and
    `source` (the file or folder). If there are several sources and `output` is a file, each source's examples are
    kept in the folder OUTPUT.parts until the table is written, so that the same call goes on where it was interrupted
    or a source was broken. `on_note` gets messages for the user; the other arguments are those of `load_lengths`.

    Raises as `load_lengths` does, and ResultError if the table, or a part of it, can't be written.
    """
    import pyarrow.parquet

    from batchtune.manifests.tables import lengths_table

    plan, tasks = planned(manifest, options, with_ids=True, on_progress=on_progress)
    store: _Store | None = None
    if isinstance(output, Path) and not plan.alone:
        store = _Store(output.with_name(f"{output.name}.parts"), tasks)
    try:
        parts = _read_stored(tasks, store, jobs, on_progress, on_note)
        labels = [part.label for part in parts]
        sizes = [part.values.size for part in parts]
        whole = merged(parts, plan)
    except (KeyboardInterrupt, BatchtuneError):
        held = 0 if store is None else store.count()
        if held:
            kept = f"{held:,} of {len(tasks):,} sources are read and kept"
            on_note(f"{kept} in {output}.parts: the same command goes on from there.")
        raise
    table = lengths_table(whole.ids, whole.values, whole.target_values, plan.unit)
    indices = pyarrow.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    sources = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(labels, pyarrow.string()))
    table = table.append_column("source", sources).take(pyarrow.array(np.argsort(-whole.values, kind="stable")))
    with writing_whole(output) if isinstance(output, Path) else contextlib.nullcontext(output) as stream:
        pyarrow.parquet.write_table(table, stream, compression="zstd")
    if store is not None:
        shutil.rmtree(store.folder, ignore_errors=True)
    return whole.sorted(plan)


def _read_stored(
    tasks: Sequence[Task],
    store: _Store | None,
    jobs: int,
    on_progress: OnProgress | None,
    on_note: Callable[[str], None],
) -> list[Part]:
    """Read the sources that are not in the store, and store them."""
    if store is None:
        return read_all(tasks, jobs, on_progress)
    parts = store.load()
    if parts:
        on_note(f"{len(parts):,} of {len(tasks):,} sources were read before and are not read again.")
    missing = [index for index in range(len(tasks)) if index not in parts]

    def save(number: int, part: Part) -> None:
        store.save(missing[number], part)

    read = read_all([tasks[index] for index in missing], jobs, on_progress, save)
    parts.update(zip(missing, read, strict=True))
    return [parts[index] for index in range(len(tasks))]


class _Store:
    """The examples of sources, kept in a folder, so that an interrupted scan goes on."""

    def __init__(self, folder: Path, tasks: Sequence[Task]) -> None:
        self.folder = folder
        self._paths = [_part_path(folder, task) for task in tasks]

    def load(self) -> dict[int, Part]:
        """Return index of a source → its examples; without those that are absent or damaged."""
        parts = {}
        for index, path in enumerate(self._paths):
            if path is not None and path.is_file():
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    parts[index] = msgspec.msgpack.decode(path.read_bytes(), type=Part)
        return parts

    def save(self, index: int, part: Part) -> None:
        """Keep the examples of a source that was read to its end."""
        path = self._paths[index]
        if path is not None and part.broken is None:
            with writing_whole(path, synced=False) as stream:  # one that is lost or damaged is read again
                stream.write(msgspec.msgpack.encode(part))

    def count(self) -> int:
        """Return how many sources are kept."""
        return sum(path is not None and path.exists() for path in self._paths)


def _part_path(folder: Path, task: Task) -> Path | None:
    """Name the file for the examples of a source as it is now, read with these options; None for a pipe."""
    source = task.source
    files = [source.path]
    if source.names is not None:
        files = [source.path / name for name in source.names]
    if task.target_file is not None:
        files.append(task.target_file.path)
    try:
        states = [(state.st_size, state.st_mtime_ns) for state in map(Path.stat, files)]
    except OSError:
        return None
    plan = replace(task.plan, options=replace(task.plan.options, skip_invalid=False))
    text = repr((_STORE_VERSION, plan, source.path, source.names, states))
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.part" if source.rereadable else None


def planned(
    manifest: Manifest, options: ReadOptions, *, with_ids: bool = False, on_progress: OnProgress | None = None
) -> tuple[Plan, list[Task]]:
    """Decide how a data set is read, source by source. Raises as `load_lengths` does."""
    check_choice("format", options.format, FORMATS)
    sources = expand(manifest, options.format)
    first = sources[0]
    if on_progress is not None:
        first.report = lambda share: on_progress(share, 0)
    try:
        reader = reader_of(first, options.format)
        plan = first_plan(reader, options)
    except MemoryError:
        raise too_large(first) from None
    notes = list(plan.notes)
    named = [manifest] if isinstance(manifest, (str, Path)) else manifest
    if len(named) == len(sources) == 1 and first.names is None and Path(named[0]).is_dir():
        notes.insert(0, f"Of the folder, {first.path.name} is read.")
    target_files: list[Source] = []
    if options.target_file is not None:
        target_files = expand(options.target_file, None)
        if len(target_files) != len(sources):
            message = f"{counted(len(target_files), 'target file')} for {counted(len(sources), 'manifest')}"
            raise ManifestError(message, "Name one target file for each manifest, in the same order.")
        measure = measure_of(target_files[0], reader, options)
        plan = replace(plan, measures=(*plan.measures, measure))
        notes.append(f"Target lengths are the {measure.texts or 'numbers'} in {options.target_file}.")
    label = str(first.path)
    if not all(source.names is not None and source.path == first.path for source in sources[1:]):
        label += f" and {len(sources) - 1:,} more"
    plan = replace(plan, notes=tuple(notes), label=label, with_ids=with_ids, alone=len(sources) == 1)
    return plan, [Task(plan, *pair) for pair in itertools.zip_longest(sources, target_files)]


def read_all(
    tasks: Sequence[Task],
    jobs: int,
    on_progress: OnProgress | None,
    on_part: Callable[[int, Part], None] = lambda index, part: None,
) -> list[Part]:
    """Read the sources, by several processes where that is worth it; `on_part` gets index and part as they come.

    Raises ManifestError if the only source can't be read (with several, its part says so), or if a process that read
    alone was killed.
    """
    sizes = [task.source.size for task in tasks]
    parts: dict[int, Part] = {}

    def report(share: float = 0.0, rows: int = 0, size: int = 0) -> None:
        if on_progress is not None:
            done = sum(sizes[index] for index in parts)
            examples = sum(part.rows for part in parts.values())
            on_progress((done + share * size) / sum(sizes), examples + rows)

    def take(index: int, part: Part) -> None:
        parts[index] = part
        report()
        on_part(index, part)

    if jobs == 1 or len(tasks) <= 1 or sum(sizes) < _WORTH_BYTES or not all(task.source.rereadable for task in tasks):
        for index, task in enumerate(tasks):
            take(index, read_part(task, partial(report, size=sizes[index])))
        return [parts[index] for index in range(len(tasks))]
    try:
        run_in_processes(read_part, dict(enumerate(tasks)), min(jobs, len(tasks)), take, report)
    except BrokenProcessPool:
        # What a process had read may be lost with it, so only a source that it had alone can be blamed.
        lost = [index for index in range(len(tasks)) if index not in parts]
        for index in lost:
            _read_alone(index, tasks[index], take, report)
        note = "One of the reading processes was killed, likely for lack of memory."
        parts[0].notes.append(f"{note} What was lost with it was read again by one process, as with --jobs 1.")
    return [parts[index] for index in range(len(tasks))]


def _read_alone(index: int, task: Task, take: Callable[[int, Part], None], report: Callable[[], None]) -> None:
    """Read a source in a process of its own. Raises ManifestError if that is killed."""
    try:
        run_in_processes(read_part, {index: task}, 1, take, report)
    except BrokenProcessPool:
        hint = "Most likely the kernel ended it for lack of memory (`dmesg` tells). Free some, or raise the container's"
        hint = f"{hint} limit; then run the same command again, with --jobs 1."
        message = f"{task.source.path}: the only process that read was killed while it read this"
        raise ManifestError(message, hint) from None
