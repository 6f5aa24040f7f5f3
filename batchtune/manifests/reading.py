"""A manifest → its lengths, sorted or in its own order, or written down: the one way through, whatever the format."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from batchtune.errors import BatchtuneError, ManifestError, UsageError
from batchtune.files import redacted_url, writing_whole
from batchtune.lengths import Lengths, Shard, StreamLengths, ceil_div, largest_first
from batchtune.manifests.checking import (
    SHOWN,
    OnReadProgress,
    Part,
    ReadTask,
    not_listed,
    read_part,
    read_together,
)
from batchtune.manifests.formats.text import keyed_values
from batchtune.manifests.inputs import (
    FORMATS,
    Manifest,
    ReadOptions,
    check_choice,
    expand,
)
from batchtune.manifests.planning import Plan, plan_of, reader_of, with_target_file
from batchtune.manifests.storage import Traffic
from batchtune.processes.pool import run_in_processes, run_on_ray
from batchtune.units import counted, format_size

_DEFAULTS = ReadOptions()
# Below that, starting other processes takes longer than they save.
_WORTH_BYTES = 64 * 1024 * 1024
_STORE_VERSION = 7
_LOOKED_UP_AT_ONCE = 32
# Each waits for its requests.
_MOST_TOGETHER = 16
_NOTHING = Traffic()
# Medians of two sources of one data set: seconds and milliseconds are a thousand times apart.
_UNLIKE = 200

ENGINES = ("local", "ray")
# Does units of tasks, as `run_in_processes` does them.
RunTasks = Callable[
    [
        Callable[[list[ReadTask]], list[Part]],
        Mapping[int, list[ReadTask]],
        Callable[[int, list[Part]], None],
        Callable[[], None],
    ],
    None,
]
_MOST_EXAMPLES = 1 << 53


def load_lengths(
    manifest: Manifest,
    options: ReadOptions = _DEFAULTS,
    *,
    jobs: int = 1,
    on_progress: OnReadProgress | None = None,
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
    _, lengths = merged(read_all(tasks, jobs, on_progress), plan)
    return lengths


def load_stream(
    manifest: Manifest,
    options: ReadOptions = _DEFAULTS,
    *,
    jobs: int = 1,
    on_progress: OnReadProgress | None = None,
    complete: bool = False,
) -> StreamLengths:
    """Read the lengths of a data set in their stored order; a table that `scan` sorted is put back into that.

    Tar shards, and each of several files, are shards. Arguments and errors are those of `load_lengths`; if it is to be
    `complete`, a table from which `scan` left out examples of the data set is an error, too.
    """
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    sharded = FORMATS[plan.format].sharded
    plan = replace(plan, with_ids=sharded, in_order=True)
    tasks = [task._replace(plan=plan) for task in tasks]
    parts = read_all(tasks, jobs, on_progress)
    shards = []
    if sharded or (len(tasks) > 1 and not FORMATS[plan.format].of_folder):
        for task, part in zip(tasks, parts, strict=True):
            shards.append(
                Shard(
                    part.label,
                    part.values.size,
                    task.source.size,
                    part.broken is not None,
                )
            )
    if any(part.counts for part in parts):
        raise not_listed(plan.label)
    whole, lengths = merged(parts, plan)
    if complete and whole.row_numbers.max(initial=0) >= whole.values.size:
        raise ManifestError(
            f"{plan.label} lacks examples of its data set: entry i of the lengths is not that of example i",
            "Leave them out of the data set itself, and scan that.",
        )
    return StreamLengths(
        lengths=lengths,
        values=whole.values,
        targets=whole.target_values,
        shards=shards,
        repeated_ids=len(whole.ids) - len(set(whole.ids)) if sharded else None,
    )


def load_ordered_lengths(
    manifest: Manifest, options: ReadOptions = _DEFAULTS
) -> StreamLengths:
    """Read the lengths of a data set so that entry i is the length of example i.

    Raises as `load_lengths` does, and UsageError if the options leave examples out.
    """
    if (
        options.skip_invalid
        or options.min_length is not None
        or options.max_length is not None
    ):
        raise UsageError(
            "--skip-invalid, --min-length and --max-length would leave out examples that the data set still has: entry "
            "i of the lengths would no longer be that of example i",
            "Leave them out of the data set and its manifest instead.",
        )
    return load_stream(manifest, options, complete=True)


def scan(
    manifest: Manifest,
    options: ReadOptions,
    output: Path | IO[bytes],
    *,
    histogram: bool = False,
    engine: str = "local",
    ray_address: str | None = None,
    jobs: int = 1,
    on_progress: OnReadProgress | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Lengths:
    """Read a data set, and write a Parquet table with a row for each example, longest first.

    Its columns are `id` (as the source names the example), `length`, `target_length` (where there are targets),
    `source` (the file or folder) and `row` (its number in the data set, from 0, counting what was left out). With
    `histogram`, it has a row for each distinct length and target length instead, with the number of examples, `count`.

    If there are several sources and `output` is a file, each source's examples are kept in the folder OUTPUT.parts
    until the table is written, so that the same call goes on where it was interrupted or a source was broken.

    The engine `ray` reads on the Ray cluster at `ray_address`, by default as Ray itself finds one; what is written is
    the same. `on_note` gets messages for the user; the other arguments are those of `load_lengths`.

    Raises as `load_lengths` does, and ResultError if the table, or a part of it, can't be written.
    """
    plan, tasks = planned(manifest, options, on_progress=on_progress)
    plan = replace(plan, with_ids=not histogram, as_histogram=histogram)
    tasks = [task._replace(plan=plan) for task in tasks]
    store = _Store(None)
    if isinstance(output, Path) and not plan.alone:
        store = _Store(output.with_name(f"{output.name}.parts"))
    stored = store.load(tasks)
    if stored:
        on_note(
            f"{len(stored):,} of {len(tasks):,} sources were read before and are not read again."
        )
    planning = Traffic.total(task.source.traffic for task in tasks)
    on_ray = None
    if engine == "ray":
        on_ray = partial(run_on_ray, address=ray_address)
    try:
        parts = read_all(tasks, jobs, on_progress, store.save, stored, on_ray)
        new = [part.traffic for index, part in enumerate(parts) if index not in stored]
        read = Traffic.total([planning, *new])
        if read.requests:
            on_note(
                f"Read over the network: {counted(read.requests, 'request')}, {format_size(read.size)}."
            )
        lengths = _write_table(parts, plan, output)
    except (KeyboardInterrupt, BatchtuneError):
        held = len(store.load(tasks))
        if held:
            on_note(
                f"{held:,} of {len(tasks):,} sources are read and kept in {output}.parts: the same command goes on "
                "from there."
            )
        raise
    if store.folder is not None:
        shutil.rmtree(store.folder, ignore_errors=True)
    return lengths


def _write_table(
    parts: Sequence[Part], plan: Plan, output: Path | IO[bytes]
) -> Lengths:
    """Write the Parquet table of all sources' examples, longest first; return their lengths."""
    import pyarrow.parquet

    from batchtune.manifests.formats.columnar import (
        ROW,
        histogram_table,
        noted_table,
    )

    sources = np.repeat(
        [redacted_url(part.label) for part in parts],
        [part.values.size for part in parts],
    )
    whole, lengths = merged(parts, plan)
    if plan.as_histogram:
        table = histogram_table(lengths)
    else:
        columns = {
            "id": pyarrow.array(whole.ids, pyarrow.string()),
            "length": whole.values,
            "target_length": whole.target_values,
            "source": pyarrow.array(sources).dictionary_encode(),
            ROW: whole.row_numbers,
        }
        table = noted_table(columns, plan.unit)
        table = table.take(pyarrow.array(largest_first(whole.values)))
    with (
        writing_whole(output)
        if isinstance(output, Path)
        else contextlib.nullcontext(output) as stream
    ):
        pyarrow.parquet.write_table(table, stream, compression="zstd")
    return lengths


class _Store:
    """The examples of files, kept in a folder, so that an interrupted scan goes on; nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, tasks: Sequence[ReadTask]) -> dict[int, Part]:
        """Return index of a file → its examples; without those that are absent or damaged."""
        parts: dict[int, Part] = {}
        if self.folder is None or not self.folder.is_dir():
            return parts
        with ThreadPoolExecutor(_LOOKED_UP_AT_ONCE) as threads:
            states = list(threads.map(_state_now, tasks))
        for index, (task, state) in enumerate(zip(tasks, states, strict=True)):
            path = self._path(task, state)
            if path is not None:
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    parts[index] = msgspec.msgpack.decode(path.read_bytes(), type=Part)
        return parts

    def save(self, task: ReadTask, part: Part) -> None:
        """Keep the examples of a file that was read to its end."""
        path = self._path(task, part.state)
        if path is not None and part.broken is None:
            public = replace(part, label=redacted_url(part.label), state=None)
            # One that is lost or damaged is read again.
            with writing_whole(path, synced=False) as stream:
                stream.write(msgspec.msgpack.encode(public))

    def _path(self, task: ReadTask, state: str | None) -> Path | None:
        """Name the file for the examples of a file in this state, read with these options; None for a pipe."""
        if self.folder is None or state is None:
            return None
        plan = replace(
            task.plan,
            options=msgspec.structs.replace(task.plan.options, skip_invalid=False),
        )
        digest = hashlib.sha256(
            repr((_STORE_VERSION, plan, state)).encode()
        ).hexdigest()
        return self.folder / f"{digest[:32]}.part"


def _state_now(task: ReadTask) -> str | None:
    """Return the state of a task's files; None if they can't be read, which is reported when they are."""
    try:
        return task.state()
    except ManifestError:
        return None


def planned(
    manifest: Manifest,
    options: ReadOptions,
    *,
    on_progress: OnReadProgress | None = None,
) -> tuple[Plan, list[ReadTask]]:
    """Decide how a data set is read, source by source. Raises as `load_lengths` does."""
    check_choice("format", options.format, FORMATS)
    sources = expand(manifest, options.format)
    first = sources[0]
    if on_progress is not None:
        first.report = lambda share: on_progress(share, 0, first.traffic)
    reader = reader_of(first, options.format)
    plan = plan_of(reader, options)
    target_files = []
    if options.target_file is not None:
        target_files = expand(options.target_file, None)
        if len(target_files) != len(sources):
            raise ManifestError(
                f"{counted(len(target_files), 'target file')} for {counted(len(sources), 'manifest')}",
                "Name one target file for each manifest, in the same order.",
            )
        targets: Iterable[str] = (text for _, text in target_files[0].lines())
        if reader.unique_ids:
            targets = keyed_values(target_files[0]).values()
        plan = with_target_file(plan, target_files[0].path, targets)
    label = first.label
    if len(sources) > 1:
        label = (
            str(first.path)
            if FORMATS[plan.format].of_folder
            else f"{label} and {len(sources) - 1:,} more"
        )
    plan = replace(plan, label=label, alone=len(sources) == 1)
    return plan, [
        ReadTask(plan, *pair) for pair in itertools.zip_longest(sources, target_files)
    ]


def read_all(
    tasks: Sequence[ReadTask],
    jobs: int,
    on_progress: OnReadProgress | None,
    on_part: Callable[[ReadTask, Part], None] = lambda task, part: None,
    known: dict[int, Part] | None = None,
    on_ray: RunTasks | None = None,
) -> list[Part]:
    """Read the sources but for those that are known, by several processes where that is worth it, or `on_ray`.

    `on_part` gets each part as it comes; the parts are in the order of the tasks. Raises ManifestError if the only
    source can't be read (with several, its part says so), or if a process that reads was killed.
    """
    sizes = [task.source.size for task in tasks]
    planning = Traffic.total(task.source.traffic for task in tasks)
    parts = dict(known or {})
    missing = {index: task for index, task in enumerate(tasks) if index not in parts}

    def report(
        share: float = 0.0, rows: int = 0, traffic: Traffic = _NOTHING, size: int = 0
    ) -> None:
        if on_progress is not None:
            done = sum(sizes[index] for index in parts)
            examples = sum(part.rows for part in parts.values())
            new = [part.traffic for index, part in parts.items() if index in missing]
            on_progress(
                (done + share * size) / sum(sizes),
                examples + rows,
                Traffic.total([planning, *new, traffic]),
            )

    def take(index: int, part: Part) -> None:
        parts[index] = part
        report()
        on_part(tasks[index], part)

    def take_unit(unit: int, read: list[Part]) -> None:
        for index, part in zip(units[unit], read, strict=True):
            take(index, part)

    is_remote = any(task.source.is_remote for task in tasks)
    few = jobs == 1 or sum(sizes[index] for index in missing) < _WORTH_BYTES
    in_turn = len(missing) <= 1 or (few and not is_remote)
    if on_ray is not None:
        in_turn = not missing
    elif not all(task.source.rereadable for task in tasks):
        in_turn = True
    if in_turn:
        for index, task in missing.items():
            take(index, read_part(task, partial(report, size=sizes[index])))
    else:
        units = _units(missing, jobs, several=on_ray is not None)
        work = {
            unit: [tasks[index] for index in indices]
            for unit, indices in enumerate(units)
        }
        try:
            if on_ray is not None:
                on_ray(read_together, work, take_unit, report)
            else:
                processes = min(jobs, len(units))
                run_in_processes(read_together, work, processes, take_unit, report)
        except BrokenProcessPool:
            raise ManifestError(
                "a process that read was killed, most likely by the kernel for lack of memory (see `dmesg`)",
                "Free some memory, or raise the container's limit; then run the same command again, with --jobs 1.",
            ) from None
    return [parts[index] for index in range(len(tasks))]


def _units(
    missing: Mapping[int, ReadTask], jobs: int, *, several: bool
) -> list[list[int]]:
    """Return the tasks that one process reads together: objects over the network, or if `several` any."""
    indices = list(missing)
    together = 1
    if several or missing[indices[0]].source.is_remote:
        together = min(_MOST_TOGETHER, ceil_div(len(indices), max(2, jobs)))
    starts = range(0, len(indices), together)
    return [indices[start : start + together] for start in starts]


def merged(parts: Sequence[Part], plan: Plan) -> tuple[Part, Lengths]:
    """Join the parts, which are emptied, with everything left out counted together; return the sorted lengths too.

    Raises ManifestError for no rows, for invalid ones or broken sources that are not skipped, or if nothing is left.
    """
    skips = plan.options.skip_invalid
    whole = Part(plan.label)
    broken = [part.broken for part in parts if part.broken is not None]
    if broken and not skips:
        head = f"{len(broken):,} of {len(parts):,} sources can't be read:"
        raise ManifestError(
            _first(head, broken, len(broken)),
            "Fix them, or make or fetch them again. Or keep only what precedes the damage with --skip-invalid.",
        )
    counted_parts = any(part.counts for part in parts)
    shown = []
    medians = [(np.median(part.values), part.label) for part in parts if part.lengths]
    first_row = 0
    for part in parts:
        whole.places += (part.row_numbers + first_row).data
        first_row += max(part.rows, int(part.row_numbers.max(initial=0)) + 1)
        if counted_parts:
            numbers = part.numbers
            if numbers is None:
                numbers = np.ones(part.values.size, dtype=np.int64)
            whole.counts += numbers.data
        whole.rows += part.rows
        whole.truncated += part.truncated
        whole.num_estimates += part.num_estimates
        whole.lengths += part.lengths
        whole.targets += part.targets
        whole.ids += part.ids
        whole.num_invalid += part.num_invalid
        for reason, count in part.left_out.items():
            whole.left_out[reason] += count
        prefix = f"{part.label}, "
        if plan.alone:
            prefix = ""
        shown += [prefix + line for line in part.shown]
        part.lengths = bytearray()  # not held twice
    if whole.rows == 0 and not broken:
        raise ManifestError(
            f"{plan.label} holds no examples", "Check that it was written to its end."
        )
    if whole.num_invalid and not skips:
        raise _invalid_error(whole, shown)
    if not whole.lengths:
        reasons = [f"{reason}: {count:,}" for reason, count in whole.left_out.items()]
        raise ManifestError(
            f"{plan.label}: none of its {whole.rows:,} examples is left ({'; '.join(reasons)})",
            "Check --length-key, --length-scale, --min-length and --max-length.",
        )
    notes = list(plan.notes)
    if whole.num_estimates:
        notes.append(
            f"{counted(whole.num_estimates, 'length')} of MP3 files without a Xing or VBRI header: estimated from the "
            "file's size and its first bit rate."
        )
    notes += [
        f"Broken: {message}. What comes before that is kept." for message in broken
    ]
    (low, first), (high, last) = min(medians), max(medians)
    if high > _UNLIKE * low:
        notes.append(
            f"Warning: {last} and {first} seem to be in different units: the median length of the first is "
            f"{high / low:,.0f} times that of the other. Read them one by one, or convert one of them."
        )
    if whole.rows > _MOST_EXAMPLES:
        raise ManifestError(
            f"{plan.label} counts {whole.rows:,} examples, more than any data set has",
            "Create the histogram again with `batchtune scan --histogram`.",
        )
    lengths = Lengths.of(
        whole.values, whole.target_values, counts=whole.numbers, unit=plan.unit
    )
    if not counted_parts:
        lengths = lengths.with_rows(whole.values, whole.target_values)
    known_fingerprint = None
    if len(parts) == 1 and parts[0].fingerprints is not None:
        digest, fingerprint = parts[0].fingerprints
        if digest == lengths.runs.digest:
            known_fingerprint = fingerprint
    lengths = replace(
        lengths,
        known_fingerprint=known_fingerprint,
        left_out=whole.left_out,
        notes=tuple(notes),
        truncated=whole.truncated,
        reading=plan.options.record(),
    )
    return whole, lengths


def _first(head: str, lines: Sequence[str], count: int) -> str:
    """Return the head, the first lines and the number of the others, out of `count`, as lines of a message."""
    shown = [head, *lines[:SHOWN]]
    if count > SHOWN:
        shown.append(f"and {count - SHOWN:,} more")
    return "\n  ".join(shown)


def _invalid_error(whole: Part, shown: Sequence[str]) -> ManifestError:
    count = whole.num_invalid
    head = f"{whole.label}: {count:,} of {counted(whole.rows, 'row')} are invalid:"
    if count == 1:
        head = f"{whole.label}: 1 of {counted(whole.rows, 'row')} is invalid:"
    hint = "Fix them, or leave them out with --skip-invalid."
    if all("(a list)" in reason for reason in whole.left_out):
        hint = "Say what becomes of a list with --reduce max, sum, first or count."
    elif count == whole.rows:
        hint = (
            "No row is valid: are these the columns? See --length-key and --target-key."
        )
    return ManifestError(_first(head, shown, count), hint)
