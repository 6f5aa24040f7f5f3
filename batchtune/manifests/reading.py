"""A manifest → its lengths, sorted or in its own order: the one way through, whatever the format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from batchtune.errors import ManifestError, UsageError
from batchtune.lengths import FloatArray, Lengths, Unit
from batchtune.manifests.base import Format, Place
from batchtune.manifests.collecting import Collector, Part, merged
from batchtune.manifests.formats import FORMATS
from batchtune.manifests.inputs import Input, expand
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.planning import Plan, check_format, find_format, plan_first, reading_of
from batchtune.manifests.pool import WorkerLost, in_any_order
from batchtune.manifests.source import Source
from batchtune.manifests.targets import count_of, joined
from batchtune.units import counted

_DEFAULTS = ReadOptions()
# Below that, starting other processes takes longer than they save.
_WORTH_BYTES = 64 * 1024 * 1024

Manifest: TypeAlias = "str | Path | Sequence[str | Path]"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the reading is.

    Attributes:
        share: From 0 to 1, of the bytes.
        examples: How many were read.
    """

    share: float
    examples: int


OnProgress = Callable[[Progress], None]


def load_lengths(
    manifest: Manifest, options: ReadOptions = _DEFAULTS, *, jobs: int = 1, on_progress: OnProgress | None = None
) -> Lengths:
    """Reads the lengths of a data set.

    Text is read block by block (a JSON list: whole), of audio and tensors only the headers, and of the rows only
    numbers are kept.

    Args:
        manifest: A file in one of `FORMATS`, plain or compressed; a folder; a pattern; several of these, as one
            data set. See `batchtune.manifests.inputs.expand`.
        options: What the user says about it.
        jobs: How many processes may read at once where there are several sources. More than one starts new
            interpreters: not for scripts without `if __name__ == "__main__"`.
        on_progress: Called now and then.

    Returns:
        The lengths, with the unit, what was left out, and notes for the user.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options name no known format, or one column twice.
    """
    plan, found = read_in_order(manifest, options, jobs=jobs, on_progress=on_progress)
    lengths = Lengths.of(
        found.lengths,
        found.targets,
        unit=plan.unit,
        left_out=dict(found.left_out),
        notes=(*plan.notes, *found.notes),
        owned=True,
    )
    return replace(lengths, reading=options.record())


def read_in_order(
    manifest: Manifest, options: ReadOptions, *, jobs: int = 1, on_progress: OnProgress | None = None
) -> tuple[Plan, Part]:
    """How a data set is read, and all its examples in the manifest's order. Arguments and errors as `load_lengths`."""
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    parts: list[Part | None] = [None] * len(tasks)
    with contextlib.closing(read_all(tasks, jobs, on_progress)) as found:
        for index, part in found:
            parts[index] = part
    return plan, merged([part for part in parts if part is not None], label_of(tasks), options, plan.keys)


def planned(
    manifest: Manifest, options: ReadOptions, *, with_ids: bool = False, on_progress: OnProgress | None = None
) -> tuple[Plan, list[Task]]:
    """How a data set is read, source by source. Raises as `load_lengths` does."""
    check_format(options.format)
    inputs = expand(manifest, options.format)
    first = inputs[0].open()
    first.on_progress = _of_share(on_progress, lambda: 0)
    try:
        plan = plan_first(first, options)
    except MemoryError:
        raise _too_large(str(first.path)) from None
    tasks = _tasks(inputs, options, plan, with_ids=with_ids)
    notes = list(plan.notes)
    named = [manifest] if isinstance(manifest, (str, Path)) else manifest
    if len(named) == len(inputs) == 1 and inputs[0].names is None and Path(named[0]).is_dir():
        notes.insert(0, f"Of the folder, {inputs[0].path.name} is read.")
    if tasks[0].targets:
        targets = [one.open() for one in tasks[0].targets]
        counts = count_of(targets, FORMATS[plan.format], options)[1]
        notes.append(f"Target lengths are the {counts} in {options.target_file}.")
    return replace(plan, notes=tuple(notes)), tasks


@dataclass(frozen=True, slots=True)
class Task:
    """One source to be read, in this process or another."""

    input: Input
    options: ReadOptions
    plan: Plan
    targets: tuple[Input, ...]
    with_ids: bool
    alone: bool

    @property
    def has_targets(self) -> bool:
        """Whether the lengths have target lengths."""
        return self.plan.target is not None or bool(self.targets)


def _tasks(inputs: Sequence[Input], options: ReadOptions, plan: Plan, *, with_ids: bool) -> list[Task]:
    """One task for each source, with its target files.

    Raises:
        ManifestError: There are not as many target files as sources.
    """
    targets = expand(options.target_file, None) if options.target_file is not None else []
    if targets and len(targets) != len(inputs):
        raise ManifestError(
            f"{counted(len(targets), 'target file')} for {counted(len(inputs), 'manifest')}",
            "Name one target file for each manifest, in the same order.",
        )
    return [
        Task(one, options, plan, tuple(targets[index : index + 1]), with_ids, alone=len(inputs) == 1)
        for index, one in enumerate(inputs)
    ]


def label_of(tasks: Sequence[Task]) -> str:
    """All sources, for messages."""
    inputs = [task.input for task in tasks]
    first = inputs[0].open().path if len(inputs) == 1 else inputs[0].path
    folder = len(inputs) > 1 and all(one.names is not None and one.path == first for one in inputs)
    return f"{first}" if len(inputs) == 1 or folder else f"{first} and {len(inputs) - 1:,} more"


def _of_share(on_progress: OnProgress | None, examples: Callable[[], int]) -> Callable[[float], None] | None:
    return None if on_progress is None else lambda share: on_progress(Progress(share, examples()))


def _too_large(label: str) -> ManifestError:
    return ManifestError(
        f"{label}: this process may not take as much memory as reading it needs",
        "Raise the limit (ulimit -v, or that of the container), or write it as JSON Lines, CSV or Parquet with one "
        "example in each row: of these only a part is held at once.",
    )


def read_all(
    tasks: Sequence[Task], jobs: int, on_progress: OnProgress | None
) -> Generator[tuple[int, Part], None, None]:
    """Reads the sources, by several processes where that is worth it; index and part as they come.

    Raises:
        ManifestError: The only source can't be read; with several, that is in its part. Or a process that read alone
            was killed.
    """
    sizes = [task.input.size for task in tasks]
    total, done, examples = max(1, sum(sizes)), 0, 0
    if len(tasks) == 1:
        yield 0, read_part(tasks[0], on_progress)
        return
    here = jobs == 1 or total < _WORTH_BYTES or any(task.input.open().copied for task in tasks if task.input.kept)

    def report(share: float = 0.0, rows: int = 0) -> None:
        if on_progress is not None:
            on_progress(Progress((done + share) / total, examples + rows))

    def read_here(task: Task) -> Part:
        return read_part(task, lambda now: report(now.share * task.input.size, now.examples))

    lost: list[str] = []

    def tell(left: int) -> None:
        lost.append(
            "One of the reading processes was killed, likely for lack of memory. Its sources were read again with "
            f"--jobs {left}."
        )

    try:
        work, processes = (read_here, 1) if here else (read_part, jobs)
        with contextlib.closing(in_any_order(work, tasks, processes, tell, report)) as found:
            for index, part in found:
                done += sizes[index]
                examples += part.rows
                report()
                yield index, replace(part, notes=tuple(lost))
                lost.clear()
    except WorkerLost as error:
        raise ManifestError(
            f"{tasks[error.index].input.path}: the process that read it was killed, even though it was the only one",
            "Most likely the kernel ended it for lack of memory (`dmesg` tells). Free some, or raise the container's "
            "limit; then run the same command again, with --jobs 1.",
        ) from None


def read_part(task: Task, on_progress: OnProgress | None = None) -> Part:
    """Reads one source.

    Raises:
        ManifestError: It can't be read. Not where it is one of several, or may be broken by the user's leave: that
            is then noted in the part.
    """
    collector: Collector | None = None
    reader: Format | None = None
    label = str(task.input.path)
    try:
        source = task.input.open()
        label = str(source.path)
        reader = find_format(source, task.options.format)
        targets = [one.open() for one in task.targets]
        reading = reading_of(source, reader, task.plan, task.options, targets, with_ids=task.with_ids)
        collector = Collector(label, reading, task.options)
        chunks = reader.rows(source, reading.length, task.plan.target)
        if on_progress is not None:
            watched = collector
            source.on_progress = _of_share(on_progress, lambda: watched.rows)
        for rows in joined(chunks, reader, targets):
            collector.add(rows)
        _refuse_repeated(source, reader, reading.length, collector.repeated_ids())
        return replace(collector.finish(), advice=reader.missing_hint)
    except (ManifestError, MemoryError) as caught:
        error = _too_large(label) if isinstance(caught, MemoryError) else caught
        if task.alone and not (task.options.skip_invalid and reader is not None and reader.breakable):
            raise error from None
        part = (
            Part.empty(label, targets=task.has_targets, ids=task.with_ids) if collector is None else collector.finish()
        )
        return replace(part, broken=error.message, hint=error.hint)
    finally:
        if not task.alone:
            task.input.kept.clear()


def _refuse_repeated(source: Source, reader: Format, length: str, hashes: set[int]) -> None:
    """Raises ManifestError where two rows have one id. Equal hashes alone mean nothing: the ids are compared."""
    if not hashes:
        return
    seen: dict[str, Place] = {}
    for rows in reader.rows(source, length, None):
        for index, name in enumerate(rows.names()):
            if name is None or hash(name) not in hashes:
                continue
            place = rows.place(index)
            if name in seen:
                raise ManifestError(
                    f"{source.path}, {place}: this id was there before, at line {seen[name].line}",
                    "Each example has an id of its own in this format: rename or remove one of them.",
                )
            seen[name] = place


_DEFAULTS = ReadOptions()


@dataclass(frozen=True, slots=True, eq=False)
class OrderedLengths:
    """Lengths by index of the example.

    Attributes:
        values: Shape (count,), positive and finite, in the order of the manifest.
        targets: Shape (count,), the target length of the same example, or None.
        unit: What `values` count, or None if nothing says it.
    """

    values: FloatArray
    targets: FloatArray | None
    unit: Unit | None


def load_ordered_lengths(manifest: Manifest, options: ReadOptions = _DEFAULTS) -> OrderedLengths:
    """Reads the lengths of a data set so that entry i is the length of example i.

    Args:
        manifest: As for `load_lengths`.
        options: What the user says about it; nothing that leaves examples out.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options leave examples out, name no known format, or one column twice.
    """
    wanted = {
        "--skip-invalid": options.skip_invalid,
        "--min-length": options.min_length is not None,
        "--max-length": options.max_length is not None,
    }
    if leaving := [name for name, is_set in wanted.items() if is_set]:
        raise UsageError(
            f"{' and '.join(leaving)} would leave out examples that the data set still has: entry i of the lengths "
            "would no longer be that of example i",
            "Leave them out of the data set and its manifest instead.",
        )
    plan, found = read_in_order(manifest, options)
    return OrderedLengths(found.lengths, found.targets, plan.unit)
