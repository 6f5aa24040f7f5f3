"""The run folder: which process holds it, and which lengths its results are of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from batchtune.errors import ResultError
from batchtune.files import (
    make_folder,
    open_to_append,
    read_regular,
    unwritable,
    write_whole,
)
from batchtune.lengths import Lengths
from batchtune.results import (
    LARGEST_BYTES,
    MALFORMED,
    PROBE_FILE,
    RUN_FILE,
    RUN_FILES,
    STREAM_FILE,
    SWEEP_FILE,
    TRIALS_FILE,
    LengthsSummary,
    Probe,
    Run,
    StreamSweep,
    Sweep,
    Trial,
    read_result,
)
from batchtune.units import counted, format_length

_START_OVER = "Start over with --force, or give another folder with --run."
_SAME_MANIFEST = (
    "Give the same manifest with the same options (--length-key, --max-length, …)."
)
ANOTHER = "Give another folder with --run, or --force to start over in this one."


def lengths_of(folder: Path) -> LengthsSummary | None:
    """Return the data that the folder's results are of; None without results, ResultError if they can't be read."""
    check_is_folder(folder)
    kinds: dict[str, type[Run | Probe | Sweep | StreamSweep]] = {
        RUN_FILE: Run,
        PROBE_FILE: Probe,
        SWEEP_FILE: Sweep,
        STREAM_FILE: StreamSweep,
    }
    for name, kind in kinds.items():
        if (folder / name).exists() and (name != RUN_FILE or knows_anything(folder)):
            return read_result(folder / name, kind).lengths
    return None


def knows_anything(folder: Path) -> bool:
    """Return whether the folder's probe has a result or a trial that passed: only then is the folder bound to it."""
    if (folder / PROBE_FILE).exists():
        return True
    return any(trial.outcome == "ok" for trial in read_trials(folder / TRIALS_FILE))


def other_lengths(lengths: Lengths, run_lengths: LengthsSummary) -> str:
    """Return which lengths the run is of, and which these are, for a message: `other lengths (…)`."""
    return (
        f"other lengths (this manifest has {counted(lengths.count, 'example')} up to "
        f"{format_length(lengths.longest, lengths.unit)}, the tuned one had {run_lengths.count:,} up to "
        f"{format_length(run_lengths.max, run_lengths.unit)})"
    )


def check_lengths(
    lengths: Lengths,
    fingerprint: str,
    unit: str | None,
    source: Path,
    run_lengths: LengthsSummary | None,
) -> None:
    """Raise ResultError if a file is of other lengths than these; `run_lengths` are the run's, if known."""
    if unit and lengths.unit and unit != lengths.unit:
        raise ResultError(
            f"{source} is in {unit}, and the manifest in {lengths.unit}",
            "Read the manifest in that unit (--unit, --length-scale), or create the file again.",
        )
    if fingerprint == lengths.fingerprint:
        return
    what = "other lengths than these"
    if run_lengths is not None and run_lengths.fingerprint == fingerprint:
        what = other_lengths(lengths, run_lengths)
    raise ResultError(
        f"{source} is of {what}",
        f"{_SAME_MANIFEST} Or tune again for these lengths in another folder with --run.",
    )


def holds_other_lengths(lengths: Lengths, folder: Path, *, force: bool) -> bool:
    """Return whether the folder's results are of other lengths; without `force` that raises ResultError."""
    run_lengths = lengths_of(folder)
    if run_lengths is None or run_lengths.fingerprint == lengths.fingerprint:
        return False
    if not force:
        raise ResultError(
            f"{folder} holds a run of {other_lengths(lengths, run_lengths)}",
            f"{_SAME_MANIFEST} {ANOTHER}",
        )
    return True


def read_trials(path: Path, on_cut: Callable[[str], None] | None = None) -> list[Trial]:
    """Return the trials of a journal; none without the file.

    A last line that was cut short (the process was killed, the disk was full) is not a trial. A caller that goes on
    with the journal gives `on_cut`: the line is then removed, and `on_cut` is called with a sentence that says so.
    Raises ResultError if another line is not a trial, or the file can't be read.
    """
    if path.is_symlink():  # trials would be added to what it leads to
        raise ResultError(
            f"{path} is a link, and batchtune writes to no file outside the run folder",
            _START_OVER,
        )
    if not path.exists():
        return []
    data = read_regular(path, LARGEST_BYTES, _START_OVER)
    lines = data.split(b"\n")
    cut = lines.pop()  # empty after a whole last line
    trials = []
    for number, line in enumerate(lines, 1):
        try:
            trial = msgspec.json.decode(line, type=Trial)
            for problem in trial.problems(number - 1):
                raise msgspec.ValidationError(problem)
            trials.append(trial)
        except MALFORMED as error:
            raise ResultError(
                f"{path}, line {number}: not a trial: {error}",
                "Start over with --force, or take the line out.",
            ) from error
    if cut and on_cut is not None:
        write_whole(path, data.removesuffix(cut), follow=False)
        on_cut(
            f"The last line of {path} was cut short (its process was killed, or the disk was full): it is removed, and "
            "its trial runs again."
        )
    return trials


def append_trial(path: Path, trial: Trial) -> None:
    """Add a trial, on disk before this returns. If that fails (ResultError), the file's earlier lines stay."""
    try:
        with open(open_to_append(path), "ab") as journal:
            journal.write(msgspec.json.encode(trial) + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
    except OSError as error:
        raise unwritable(path, error) from error


def check_is_folder(folder: Path) -> None:
    """Raise ResultError if a file has the name of the run folder."""
    if folder.exists() and not folder.is_dir():
        raise ResultError(
            f"{folder} is not a folder, and a run needs one", "Give another with --run."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process, however it ends; raises ResultError if another holds it."""
    import fcntl

    check_is_folder(folder)
    try:
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ResultError(
            f"another batchtune is at work in {folder}",
            "Wait for it, or give another folder with --run.",
        ) from None
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):  # where nothing was written, nothing stays
            folder.rmdir()


def clear_run(folder: Path, names: Iterable[str] = RUN_FILES) -> None:
    """Remove these of batchtune's own files from a run folder, and nothing else; raises ResultError if it can't."""
    for name in names:
        path = folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ResultError(
                f"{path} can't be removed: {error.strerror or error}"
            ) from error
