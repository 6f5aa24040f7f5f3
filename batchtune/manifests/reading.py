"""A manifest → its lengths, sorted or in its own order, or written down: the one way through, whatever the format."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import multiprocessing
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.errors import BatchtuneError, ManifestError, UsageError
from batchtune.files import writing_whole
from batchtune.lengths import FloatArray, Lengths, Unit
from batchtune.manifests.base import Format, Place, Rows
from batchtune.manifests.collecting import Part, merged
from batchtune.manifests.inputs import expand
from batchtune.manifests.planning import (
    Plan,
    ReadOptions,
    check_format,
    keyed_targets,
    measure_of,
    plan_of,
    reader_of,
)
from batchtune.manifests.source import Source
from batchtune.units import counted

_DEFAULTS = ReadOptions()
# Below that, starting other processes takes longer than they save.
_WORTH_BYTES = 64 * 1024 * 1024
_LONGEST_WAIT_SECONDS = 1.0
_STORE_VERSION = 3

Manifest: TypeAlias = "str | Path | Sequence[str | Path]"
# Called with the share of the bytes that is read, from 0 to 1, and the number of examples.
OnProgress = Callable[[float, int], None]


def load_lengths(
    manifest: Manifest, options: ReadOptions = _DEFAULTS, *, jobs: int = 1, on_progress: OnProgress | None = None
) -> Lengths:
    """Read the lengths of a data set, with their unit, the number left out by reason, and notes for the user.

    Text is read block by block (a JSON list: whole), of audio and tensors only the headers, and of the rows only
    numbers are kept.

    Args:
        manifest: A file in one of `FORMATS`, plain or compressed; a folder; a pattern; several of these, as one
            data set. See `batchtune.manifests.inputs.expand`.
        options: The user's.
        jobs: How many processes may read at once where there are several sources. More than one starts new
            interpreters: not for scripts without `if __name__ == "__main__"`.
        on_progress: Called now and then.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options name no known format, or one column twice.
    """
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    return replace(merged(read_all(tasks, jobs, on_progress), plan).sorted(plan), reading=options.record())


class OrderedLengths(NamedTuple):
    """Lengths and target lengths (None without), shape (count,) each, by index of the example; the lengths' unit."""

    values: FloatArray
    targets: FloatArray | None
    unit: Unit | None


def load_ordered_lengths(manifest: Manifest, options: ReadOptions = _DEFAULTS) -> OrderedLengths:
    """Read the lengths of a data set so that entry i is the length of example i.

    Raises:
        ManifestError, UsageError: As `load_lengths`, or the options leave examples out.
    """
    limits = {
        "--skip-invalid": options.skip_invalid or None,
        "--min-length": options.min_length,
        "--max-length": options.max_length,
    }
    if leaving := [name for name, value in limits.items() if value is not None]:
        raise UsageError(
            f"{' and '.join(leaving)} would leave out examples that the data set still has: entry i of the "
            "lengths would no longer be that of example i",
            "Leave them out of the data set and its manifest instead.",
        )
    plan, tasks = planned(manifest, options)
    whole = merged(read_all(tasks, 1, None), plan)
    return OrderedLengths(whole.values, whole.target_values, plan.unit)


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
    or a source was broken. `on_note` is called with what the user should know at once; the other arguments are those
    of `load_lengths`.

    Raises:
        ManifestError, UsageError: As `load_lengths`.
        ResultError: The table, or a part of it, can't be written.
    """
    import pyarrow.parquet

    from batchtune.manifests.tables import lengths_table

    plan, tasks = planned(manifest, options, with_ids=True, on_progress=on_progress)
    folder = output.with_name(f"{output.name}.parts") if isinstance(output, Path) and not plan.alone else None
    paths = [None if folder is None else _part_path(folder, task) for task in tasks]
    parts: dict[int, Part] = {}
    for index, path in enumerate(paths):
        if path is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                parts[index] = msgspec.msgpack.decode(path.read_bytes(), type=Part)
    missing = [index for index in range(len(tasks)) if index not in parts]
    count = f"{len(tasks):,} sources"
    if parts:
        on_note(f"{len(parts):,} of {count} were read before and are not read again.")

    def keep(number: int, part: Part) -> None:
        path = paths[missing[number]]
        if path is not None and part.broken is None:
            with writing_whole(path, synced=False) as stream:  # one that is lost or damaged is read again
                stream.write(msgspec.msgpack.encode(part))

    try:
        parts.update(zip(missing, read_all([tasks[index] for index in missing], jobs, on_progress, keep), strict=True))
        found = [parts[index] for index in range(len(tasks))]
        labels, sizes = [part.label for part in found], [part.values.size for part in found]
        whole = merged(found, plan)
    except (KeyboardInterrupt, BatchtuneError):
        if held := sum(path is not None and path.exists() for path in paths):
            on_note(f"{held:,} of {count} are read and kept in {folder}: the same command goes on from there.")
        raise
    table = lengths_table(whole.ids, whole.values, whole.target_values, plan.unit)
    indices = pyarrow.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    sources = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(labels, pyarrow.string()))
    table = table.append_column("source", sources).take(pyarrow.array(np.argsort(-whole.values, kind="stable")))
    with writing_whole(output) if isinstance(output, Path) else contextlib.nullcontext(output) as stream:
        pyarrow.parquet.write_table(table, stream, compression="zstd")
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return whole.sorted(plan)


class Task(NamedTuple):
    """One source to be read, in this process or another, with its file of target lengths, if it has one."""

    plan: Plan
    source: Source
    target_file: Source | None


def _part_path(folder: Path, task: Task) -> Path | None:
    """Name the file for the examples of a source as it is now, read with these options; None for a pipe."""
    plan, source, target_file = task
    files = [source.path / name for name in source.names] if source.names is not None else [source.path]
    files += [target_file.path] if target_file is not None else []
    try:
        states = [(state.st_size, state.st_mtime_ns) for state in map(Path.stat, files)]
    except OSError:
        return None
    plan = replace(plan, options=replace(plan.options, skip_invalid=False))
    said = repr((_STORE_VERSION, plan, source.path, source.names, states))
    return folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.part" if source.rereadable else None


def planned(
    manifest: Manifest, options: ReadOptions, *, with_ids: bool = False, on_progress: OnProgress | None = None
) -> tuple[Plan, list[Task]]:
    """Decide how a data set is read, source by source. Raises as `load_lengths` does."""
    check_format(options.format)
    sources = expand(manifest, options.format)
    first = sources[0]
    if on_progress is not None:
        first.report = lambda share: on_progress(share, 0)
    try:
        reader = reader_of(first, options.format)
        plan = plan_of(reader, options)
    except MemoryError:
        raise _too_large(first) from None
    notes = list(plan.notes)
    named = [manifest] if isinstance(manifest, (str, Path)) else manifest
    if len(named) == len(sources) == 1 and first.names is None and Path(named[0]).is_dir():
        notes.insert(0, f"Of the folder, {first.path.name} is read.")
    targets: Sequence[Source | None] = [None] * len(sources)
    if options.target_file is not None:
        targets = found = expand(options.target_file, None)
        if len(found) != len(sources):
            raise ManifestError(
                f"{counted(len(found), 'target file')} for {counted(len(sources), 'manifest')}",
                "Name one target file for each manifest, in the same order.",
            )
        measure = measure_of(found[0], reader, options)
        plan = replace(plan, measures=(plan.measures[0], measure))
        notes.append(f"Target lengths are the {measure or 'numbers'} in {options.target_file}.")
    label = str(first.path)
    if not all(one.names is not None and one.path == first.path for one in sources[1:]):
        label += f" and {len(sources) - 1:,} more"
    plan = replace(plan, notes=tuple(notes), label=label, with_ids=with_ids, alone=len(sources) == 1)
    return plan, [Task(plan, *pair) for pair in zip(sources, targets, strict=True)]


def _too_large(source: Source) -> ManifestError:
    return ManifestError(
        f"{source.path}: this process may not take as much memory as reading it needs",
        "Raise the limit (ulimit -v, or that of the container), or write it as JSON Lines, CSV or Parquet with one "
        "example in each row: of these only a part is held at once.",
    )


def read_all(
    tasks: Sequence[Task],
    jobs: int,
    on_progress: OnProgress | None,
    on_part: Callable[[int, Part], None] = lambda index, part: None,
) -> list[Part]:
    """Read the sources, by several processes where that is worth it; `on_part` gets index and part as they come.

    Raises:
        ManifestError: The only source can't be read; with several, that is in its part. Or a process that read alone
            was killed.
    """
    sizes = [task.source.size for task in tasks]
    total, done, examples = sum(sizes), 0, 0
    parts: dict[int, Part] = {}
    notes: list[str] = []

    def report(share: float = 0.0, rows: int = 0, size: int = 0) -> None:
        if on_progress is not None:
            on_progress((done + share * size) / total, examples + rows)

    def take(index: int, part: Part) -> None:
        nonlocal done, examples
        parts[index], done, examples = part, done + sizes[index], examples + part.rows
        report()
        on_part(index, part)

    if jobs == 1 or len(tasks) <= 1 or total < _WORTH_BYTES or not all(task.source.rereadable for task in tasks):
        for index, task in enumerate(tasks):
            take(index, read_part(task, partial(report, size=sizes[index])))
    while left := {index: task for index, task in enumerate(tasks) if index not in parts}:
        jobs = min(jobs, len(left))
        try:
            _in_processes(left, jobs, take, report)
        except BrokenProcessPool:
            if jobs == 1:
                culprit = min(left.keys() - parts.keys())  # one process takes them in this order
                raise ManifestError(
                    f"{tasks[culprit].source.path}: the only process that read was killed while it read this",
                    "Most likely the kernel ended it for lack of memory (`dmesg` tells). Free some, or raise the "
                    "container's limit; then run the same command again, with --jobs 1.",
                ) from None
            jobs //= 2
            lost = "One of the reading processes was killed, likely for lack of memory."
            notes.append(f"{lost} Its sources were read again with --jobs {jobs}.")
    for note in notes:
        parts[0].notes.append(note)
    return [parts[index] for index in range(len(tasks))]


def _in_processes(
    tasks: Mapping[int, Task], jobs: int, take: Callable[[int, Part], None], on_wait: Callable[[], None]
) -> None:
    """Read sources in several new interpreters: a fork of a process with threads can hang.

    They end with this one, however it ends, and at once if it is interrupted; `on_wait` is called every second. Raises
    BrokenProcessPool if one is killed from outside, as the kernel kills what takes too much memory.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_die_with_parent)
    try:
        with _without_interrupts():
            futures = {pool.submit(read_part, task): key for key, task in tasks.items()}
        while futures:
            done, _ = wait(futures, _LONGEST_WAIT_SECONDS, FIRST_COMPLETED)
            if not done:
                on_wait()
            for future in done:
                take(futures.pop(future), future.result())
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:  # nobody waits for what they are doing
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put Ctrl-C off; processes that are started in the meantime inherit the mask, and leave it to this one.

    In this process another thread, of a numerical library, may take the signal all the same.
    """
    arrived: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number)) if main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
    if arrived:
        raise KeyboardInterrupt


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # where there is no such call
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def read_part(task: Task, on_progress: OnProgress | None = None) -> Part:
    """Read one source. Raises ManifestError if it can't be read; if others are, or --skip-invalid, the part says so."""
    plan, source, target_file = task
    part = Part(str(source.path))
    reader: Format | None = None
    try:
        reader = reader_of(source, plan.options.format)
        part.advice = reader.missing_hint
        own = plan_of(reader, plan.options, plan)
        columns = [key for key in (own.length, own.target) if key is not None]
        own = own if target_file is None else replace(own, target=str(target_file.path))
        if on_progress is not None:
            source.report = lambda share: on_progress(share, part.rows)
        hashes: list[npt.NDArray[np.int64]] = []
        for rows in _joined(reader.rows(columns), reader, target_file):
            part.add(rows, own)
            if reader.unique_ids:
                ids = rows.ids()
                hashes.append(np.fromiter(map(hash, ids), dtype=np.int64, count=len(ids)))
        if hashes:
            _refuse_repeated(source, reader.rows(columns[:1]), np.sort(np.concatenate(hashes)))
    except (ManifestError, MemoryError) as caught:
        error = _too_large(source) if isinstance(caught, MemoryError) else caught
        if plan.alone and not (plan.options.skip_invalid and reader is not None and reader.breakable):
            raise error from None
        part.broken, part.hint = error.message, error.hint
    if not plan.alone:
        source.forget()
    return part


def _refuse_repeated(source: Source, chunks: Iterable[Rows], hashes: npt.NDArray[np.int64]) -> None:
    """Raise ManifestError if two rows have one id. Equal hashes alone mean nothing: the ids are compared."""
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    seen: dict[str, Place] = {}
    for rows in chunks if repeated else ():
        for index, name in enumerate(rows.ids()):
            if name is None or hash(name) not in repeated:
                continue
            place = rows.place(index)
            if name in seen:
                raise ManifestError(
                    f"{source.path}, {place}: this id was there before, at line {seen[name].line}",
                    "Each example has an id of its own in this format: rename or remove one of them.",
                )
            seen[name] = place


def _joined(chunks: Iterator[Rows], reader: Format, target_file: Source | None) -> Iterator[Rows]:
    """The rows with the targets of a file: by id if the format is keyed by ids (Kaldi's), else line by line."""
    if target_file is None:
        yield from chunks
        return
    if reader.joined_by_id:
        table = keyed_targets(target_file)
        for rows in chunks:
            yield replace(rows, columns=[*rows.columns, [table.get(name or "") for name in rows.ids()]])
        return
    path, hint = target_file.path, "A target file has one line for each example, in the same order."
    lines, last = target_file.lines(), 0
    for rows in chunks:
        count = len(rows.columns[0])
        texts = [text for _, text in itertools.islice(lines, count)]
        last += len(texts)
        if len(texts) < count:
            raise ManifestError(f"{path} ends after line {last:,}, and the manifest has more examples", hint)
        yield replace(rows, columns=[*rows.columns, texts])
    if rest := next((number for number, text in lines if text.strip()), None):
        raise ManifestError(f"{path} goes on at line {rest:,}, where the manifest has no more examples", hint)
