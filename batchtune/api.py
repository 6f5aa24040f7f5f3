"""Tuning from Python: the runs, files and records of the command line.

`batchtune.probe`, `batchtune.sweep`, `batchtune.tune` and `batchtune.read_run` are these functions. They print nothing
except a line of progress in a notebook; notes go to the logger `batchtune`, at level INFO. Errors are
`batchtune.BatchtuneError`s; if a hint names a command-line option, use the field of that name: `memory_bytes` for
--memory.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from msgspec import structs

from batchtune.buckets import checked_settings
from batchtune.buckets.current import Current, read_current
from batchtune.buckets.micro_batches import Packing, known_sizes
from batchtune.buckets.sweep import run_sweep
from batchtune.errors import UsageError, listed, nearest
from batchtune.exports.run_configs import write_config
from batchtune.files import command_text
from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.manifests.formats import KNOWN_UNITS, normalised
from batchtune.probe.flow import SizesOf, run_probe
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.settings import ProbeSettings
from batchtune.reports import DEFAULT_FOLDER, RunResults, load_run
from batchtune.results import (
    Probe,
    Record,
    Sweep,
    SweepSettings,
    checked,
)
from batchtune.run_folder import holds_other_lengths
from batchtune.units import parse_size
from batchtune.verify import Prover, run_verify
from batchtune.workloads import spec_of, with_unit

_log = logging.getLogger("batchtune")
_LENGTH_KEYS = ("length_key", "target_key")
_F = TypeVar("_F", bound=Callable[..., RunResults])


def _with_settings(*kinds: type[Record]) -> Callable[[_F], _F]:
    """Name the fields of records in a function's signature, and end an interrupt without the probe's traceback."""

    def decorate(function: _F) -> _F:
        @wraps(function)
        def call(*arguments: Any, **settings: Any) -> RunResults:
            with contextlib.suppress(KeyboardInterrupt):
                return function(*arguments, **settings)
            raise KeyboardInterrupt("the same call continues where this one stopped")

        own = inspect.signature(function)
        named = dict(own.parameters)
        del named["settings"]
        for kind in kinds:
            for field in structs.fields(kind):
                parameter = inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None if field.required else field.default,
                )
                named.setdefault(field.name, parameter)
        signature = own.replace(parameters=list(named.values()))
        setattr(call, "__signature__", signature)  # noqa: B010 - an attribute, for mypy
        return cast(_F, call)

    return decorate


def _show_in_notebook(line: str) -> None:
    """Print a line of progress in place of the one before; outside of notebooks nothing."""
    if "ipykernel" in sys.modules:
        print(f"\r{line:<80}", end="")


@_with_settings(ReadOptions, ProbeSettings, SweepSettings)
def probe(
    workload: object,
    lengths: Any = None,
    *,
    run: str | Path = DEFAULT_FOLDER,
    force: bool = False,
    on_progress: Callable[[str], None] = _show_in_notebook,
    **settings: Any,
) -> RunResults:
    """Find the largest batches that fit, as `batchtune probe-oom` does.

    Args:
        workload: `builtin:NAME`, `path/to/file.py:NAME` or `package.module:NAME`; a class or function defined in a
            file, because the probe runs it in another process; or the words of a training script's command.
        lengths: An array, list, tensor or pandas Series, shape (examples,); a pandas DataFrame, a Hugging Face dataset
            or a mapping of arrays, with `length_key`; the path of a manifest; or `batchtune.lengths.Lengths`. None:
            those of a training script's own data set.
        run: The run folder, by default that of the commands. If it holds the same probe, that probe continues.
        force: Whether to start over if the folder holds another run.
        on_progress: Called with a line on what runs now, before and after each trial; by default a notebook shows it.
        **settings: Fields of `ProbeSettings`, such as `device="cuda:1"`, `minutes=10`, `memory_bytes="500MiB"` or
            `options={"layers": 12}`; of `ReadOptions`: `unit`, `length_key` and `target_key`, for a manifest all of
            them; and of `SweepSettings`, whose tables decide which lengths are measured.

    Raises:
        BatchtuneError: An argument is invalid, the lengths can't be read, the workload fails, nothing fits, or the
            folder holds another run.
    """
    reading, probing, sweeping = _split(
        settings, ReadOptions, ProbeSettings, SweepSettings
    )
    folder = Path(run)
    probed = _probe(
        workload,
        _known_lengths(workload, lengths, reading, probing, folder, force=force),
        folder,
        probing,
        checked_settings(**sweeping),
        force,
        on_progress,
    )
    return RunResults(name=folder.name, folder=folder, probe=probed)


def _probe(
    workload: object,
    read: Lengths,
    folder: Path,
    probing: Mapping[str, Any],
    sweep_settings: SweepSettings,
    force: bool,
    on_progress: Callable[[str], None],
    sizes_of: SizesOf | None = None,
    minutes: float | None = None,
    goes_on: bool = False,
) -> Probe:
    """Probe with these settings, for at most that many minutes; or go on with it."""
    starts_over = force and not goes_on
    probing = {"minutes": minutes, **probing}
    if isinstance(workload, list):
        probing["command"] = workload
        workload = command_text(workload)
    elif not isinstance(workload, str):
        workload = spec_of(workload)
    options = with_unit(workload, probing.pop("options", None) or {}, read.unit)
    holds_other_lengths(read, folder, force=starts_over)
    return run_probe(
        read,
        checked(
            ProbeSettings,
            {
                "workload": workload,
                "options": options,
                "force": force,
                **probing,
            },
        ),
        folder,
        force=starts_over,
        sweep_settings=sweep_settings,
        sizes_of=sizes_of,
        hooks=ProbeHooks(
            on_note=_log.info,
            on_progress=lambda progress: on_progress(str(progress)),
            goes_on=goes_on,
        ),
    )


@_with_settings(ReadOptions, SweepSettings)
def sweep(
    lengths: Any,
    *,
    run: str | Path = DEFAULT_FOLDER,
    force: bool = False,
    max_batch_length: float | None = None,
    max_tokens: int | None = None,
    cut_at: int | None = None,
    current: str | None = None,
    **settings: Any,
) -> RunResults:
    """Compare bucket tables and recommend one, as `batchtune sweep-buckets` does; this needs no GPU, and no torch.

    Args:
        lengths: As for `probe`.
        run: The run folder, whose probe is used if it holds one: `run=probed.folder`.
        force: Whether to start over if the folder holds another run.
        max_batch_length: The largest padded length of a batch, in the unit of the lengths; not needed with a probe.
        max_tokens: The most tokens of a packed batch, if the training packs: packers are compared, too. Not needed with
            a probe of packed batches.
        cut_at: With a token budget: the training cuts longer sequences at this length.
        current: Your current settings, to compare with, as for --current: `"max_batch_length=600,num_buckets=200"`.
            None: a script's own batches, if the probe knows them.
        **settings: Fields of `SweepSettings`, such as `num_buckets=[10, 15]`, `world_size=8` or
            `strategies=["optimal"]`, and of `ReadOptions`, as for `probe`.

    Raises:
        BatchtuneError: An argument is invalid, the lengths can't be read, the largest batch is not known, or the folder
            holds another run.
    """
    reading, sweeping = _split(settings, ReadOptions, SweepSettings)
    folder = Path(run)
    _sweep(
        _read(lengths, reading),
        checked_settings(**sweeping),
        folder,
        _read_current(current),
        force=force,
        max_batch_length=max_batch_length,
        packing=Packing(max_tokens=max_tokens, cut_at=cut_at),
    )
    return read_run(folder)


def _read_current(text: str | None) -> Current | None:
    if text is None:
        return None
    return read_current(text)


def _sweep(
    lengths: Lengths,
    settings: SweepSettings,
    folder: Path,
    current: Current | None,
    refuted: Collection[str] = (),
    **arguments: Any,
) -> Sweep:
    """Sweep as `run_sweep` does, and write `sweep.json` and `sampler.yaml`."""
    swept = run_sweep(
        lengths, settings, folder, current=current, refuted=refuted, **arguments
    )
    write_config(swept, folder)
    return swept


@_with_settings(ReadOptions, ProbeSettings, SweepSettings)
def tune(
    workload: object,
    lengths: Any = None,
    *,
    run: str | Path = DEFAULT_FOLDER,
    force: bool = False,
    current: str | None = None,
    on_progress: Callable[[str], None] = _show_in_notebook,
    **settings: Any,
) -> RunResults:
    """Probe, sweep and prove, as `batchtune tune` does: from lengths to a recommended sampler.

    Arguments and errors are those of `probe` and `sweep`.
    """
    reading, probing, sweeping = _split(
        settings, ReadOptions, ProbeSettings, SweepSettings
    )
    started = time.monotonic()
    folder = Path(run)
    read = _known_lengths(workload, lengths, reading, probing, folder, force=force)
    minutes = probing.pop("minutes", None)
    command = workload if isinstance(workload, list) else None
    sweep_settings = checked_settings(**sweeping)
    own = _read_current(current)
    Prover(
        folder=folder,
        lengths=read,
        asked={**probing, "command": command},
        probe=partial(
            _probe,
            workload,
            read,
            folder,
            probing,
            sweep_settings,
            force,
            on_progress,
            partial(known_sizes, read, sweep_settings, own, folder),
        ),
        sweep=partial(_sweep, read, sweep_settings, folder, own),
        run=partial(
            run_verify,
            folder=folder,
            on_note=_log.info,
            on_progress=lambda proving: on_progress(
                f"{proving.done} of {proving.total} steps of the table done"
            ),
        ),
        on_note=_log.info,
    ).tune(started, minutes)
    return read_run(folder)


def read_run(folder: str | Path) -> RunResults:
    """Read the results in a run folder, whichever command wrote them.

    Raises ResultError if the folder holds none, or if files are damaged or of different data.
    """
    return load_run(Path(folder))


def _known_lengths(
    workload: object,
    lengths: Any,
    reading: dict[str, Any],
    probing: Mapping[str, Any],
    folder: Path,
    *,
    force: bool,
) -> Lengths:
    """Return the lengths that `_read` gives; without any, those of a script's own data set.

    Raises UsageError as `_read` does, or for a workload that is no script.
    """
    if lengths is not None:
        return _read(lengths, reading)
    if not isinstance(workload, list):
        raise UsageError(
            "there are no lengths",
            "Give lengths, or a training script's command as a list: its data set has lengths.",
        )
    from batchtune.scripts.own_lengths import keep_own_lengths

    keys = {name: reading[name] for name in _LENGTH_KEYS if name in reading}
    settings = checked(
        ProbeSettings,
        {"options": {}, **probing, "workload": "script", "command": workload},
    )
    path, note = keep_own_lengths(
        folder,
        workload,
        {**settings.options, **keys},
        settings.setup_timeout_seconds,
        settings.scratch,
        force=force,
    )
    _log.info(note)
    return _read(path, reading)


def _read(data: Any, reading: dict[str, Any]) -> Lengths:
    """Return the lengths that a manifest, an array or a column of a table holds.

    Raises UsageError for an option that is not for this data, or if these are no lengths.
    """
    options = ReadOptions(**reading)
    if isinstance(data, (str, Path)):
        lengths = load_lengths(data, options)
        for note in lengths.notes:
            _log.info(note)
        return lengths
    only_for_manifests = reading.keys() - {"unit", *_LENGTH_KEYS}
    if only_for_manifests:
        raise UsageError(
            f"{listed(sorted(only_for_manifests))} can't be used: the lengths are not a manifest",
            "Change the lengths yourself, or give the path of a manifest.",
        )
    if isinstance(data, Lengths) and not reading:
        return data
    unit = options.unit
    targets = None
    try:
        # A column of a Hugging Face dataset is read at once by slicing it, one by one otherwise.
        if options.target_key is not None:
            targets = data[options.target_key][:]
        # NumPy would read all of such a dataset, audio and all, to find no number in it.
        if options.length_key is not None or hasattr(data, "column_names"):
            unit = unit or KNOWN_UNITS.get(normalised(str(options.length_key)))
            data = data[options.length_key][:]
        lengths = Lengths.of(data, targets, unit=unit)
        if targets is not None:
            targets = np.asarray(targets, np.float64)
        return lengths.with_rows(np.asarray(data, np.float64), targets)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"these are not lengths: {error}",
            "Give a number for each example, or a table with length_key=...",
        ) from error


def _split(settings: dict[str, Any], *kinds: type[Record]) -> list[dict[str, Any]]:
    """Return the settings of each kind, by its fields. Raises UsageError for one that is of none."""
    settings = {
        name: parse_size(value)
        if name.endswith("_bytes") and isinstance(value, str)
        else value
        for name, value in settings.items()
    }
    shares = []
    for kind in kinds:
        names = kind.__struct_fields__
        shares.append({name: settings[name] for name in names if name in settings})
    unknown = set(settings).difference(*shares)
    if unknown:
        hint = "Settings are the fields of ReadOptions, SweepSettings and, of a probe, ProbeSettings."
        known = itertools.chain.from_iterable(kind.__struct_fields__ for kind in kinds)
        guess = nearest(min(unknown), known)
        if guess is not None:
            hint += f" Did you mean {guess}?"
        raise UsageError(f"unknown settings: {listed(sorted(unknown))}", hint)
    return shares
