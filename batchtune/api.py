"""Tuning from Python: the runs, files and records of the command line, with their tables as pandas DataFrames.

`batchtune.probe`, `batchtune.sweep`, `batchtune.tune` and `batchtune.read_run` are these functions. They print nothing:
notes go to the logger `batchtune`, at level INFO. Errors are `batchtune.BatchtuneError`s; where their hints name an
option of the command line, the argument here has the same name.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt

from batchtune.buckets.current import read_current
from batchtune.buckets.strategies import (
    STRATEGIES,
    checked_settings,
    parse_num_buckets,
)
from batchtune.buckets.sweep import run_sweep
from batchtune.errors import ResultError, UsageError, listed
from batchtune.exports.base import recommended_row
from batchtune.exports.run_configs import write_config
from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions
from batchtune.manifests.objects import lengths_of
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.reports import RunResults, load_run
from batchtune.reports.html import render_for_notebook
from batchtune.reports.page import build_page
from batchtune.results import (
    SAMPLER_FILE,
    Record,
    Result,
    Row,
    StreamRow,
    SweepSettings,
)
from batchtune.run_folder import holds_other_lengths
from batchtune.units import parse_size
from batchtune.workloads import with_unit
from batchtune.workloads.loading import spec_of

if TYPE_CHECKING:
    import pandas as pd

    from batchtune.sampler.base import EpochBatchSampler

_log = logging.getLogger("batchtune")
# What may be given as on the command line: the field that it sets, and how it is read.
_SPELLINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "memory": ("memory_bytes", parse_size),
    "reserve": ("reserve_bytes", parse_size),
    "num_buckets": ("num_buckets", parse_num_buckets),
}


class RunTables(RunResults):
    """The results of a run: records, and their tables as DataFrames. A notebook shows the report.

    `probe`, `sweep`, `stream`, `loader` and `verification` are the records of the run folder's files, None without the
    file. A table has a row for each entry and a column for each field; it raises ResultError if the run lacks it.
    """

    @property
    def trials(self) -> pd.DataFrame:
        """The probe's trials, in the order in which they ran; `results.Trial` describes the columns."""
        return _frame(self.probe, "trials")

    @property
    def frontier(self) -> pd.DataFrame:
        """The largest batch that fits at each length; `results.FrontierPoint` describes the columns."""
        return _frame(self.probe, "frontier")

    @property
    def rows(self) -> pd.DataFrame:
        """The bucket tables compared; `results.Row` describes the columns, or `results.StreamRow` those of a stream."""
        return _frame(self.sweep or self.stream, "rows")

    @property
    def recommended(self) -> Row | StreamRow | None:
        """The recommended row; None if nothing was swept, or if no row beats the baseline."""
        swept = self.sweep or self.stream
        return None if swept is None else swept.recommended_row

    @property
    def max_batch_length(self) -> float | None:
        """The largest padded length of a batch, in the unit of the lengths; None for a loader."""
        found: float | None = getattr(self.main, "max_batch_length", None)
        return found

    def sampler(self, lengths: Any, **options: Any) -> EpochBatchSampler:
        """Return the recommended sampler for a DataLoader; arguments are those of `batchtune.sampler_from_config`.

        Entry i of the lengths belongs to example i. Raises ResultError if the run recommends none.
        """
        from batchtune.sampler import sampler_from_config

        if self.sweep is not None:
            recommended_row(self.sweep)
        return sampler_from_config(self.folder / SAMPLER_FILE, lengths, **options)

    def __repr__(self) -> str:
        return build_page(self).lead[0]

    def _repr_html_(self) -> str:
        return render_for_notebook(self)


def probe(
    workload: object,
    lengths: Any,
    *,
    targets: npt.ArrayLike | None = None,
    run: str | Path | None = None,
    force: bool = False,
    **settings: Any,
) -> RunTables:
    """Find the largest batches that fit, as `batchtune probe-oom` does.

    Args:
        workload: `builtin:NAME`, `path/to/file.py:NAME` or `package.module:NAME`; or a class, or a function, that is
            defined in a file: the probe runs it in another process.
        lengths: An array, list, tensor or pandas Series, shape (examples,); a pandas DataFrame or Hugging Face
            dataset; the path of a manifest; or what `batchtune.manifests.load_lengths` read.
        targets: Shape (examples,): the target lengths that belong to an array.
        run: The run folder, which is continued if it holds the same probe; by default a temporary one, which is
            removed when Python ends.
        force: Whether to start over if the folder holds another run.
        **settings: Fields of `ProbeSettings`, such as `device="cuda:1"`, `minutes=10` or `options={"layers": 12}`;
            `memory="2GiB"` and `reserve="500MiB"`; of `ReadOptions`, such as `unit="frames"` for an array, or
            `length_key="duration"` for a table; and of `SweepSettings`, whose tables decide which lengths are measured.

    Raises:
        BatchtuneError: An argument is invalid, the lengths can't be read, the workload fails, nothing fits, or the
            folder holds another run.
    """
    reading, probing, sweeping = _split(
        settings, ReadOptions, ProbeSettings, SweepSettings
    )
    read = _read(lengths, targets, reading)
    spec = workload if isinstance(workload, str) else spec_of(workload)
    options = with_unit(spec, probing.pop("options", {}), read.unit)
    folder = _folder(run)
    holds_other_lengths(read, folder, force=force)
    probed = run_probe(
        read,
        ProbeSettings.checked(workload=spec, options=options, force=force, **probing),
        folder,
        force=force,
        sweep_settings=_sweep_settings(sweeping),
        hooks=ProbeHooks(on_note=_log.info),
    )
    return RunTables(name=folder.name, folder=folder, probe=probed)


def sweep(
    lengths: Any,
    *,
    targets: npt.ArrayLike | None = None,
    probe: RunTables | None = None,
    run: str | Path | None = None,
    force: bool = False,
    max_batch_length: float | None = None,
    current: str | None = None,
    **settings: Any,
) -> RunTables:
    """Compare bucket tables and recommend one, as `batchtune sweep-buckets` does; this needs no GPU, and no torch.

    Args:
        lengths: As for `probe`.
        targets: As for `probe`.
        probe: The result of `probe` for the same lengths, in whose folder the sweep is written.
        run: Otherwise the run folder, whose probe is used if it holds one; by default a temporary one.
        force: Whether to start over if the folder holds another run.
        max_batch_length: The largest padded length of a batch, in the unit of the lengths; not needed with a probe.
        current: Your current settings, to compare with, as for --current: `"max_batch_length=600,num_buckets=200"`.
        **settings: Fields of `SweepSettings`, such as `num_buckets="10:20"`, `world_size=8` or
            `strategies=["optimal"]`, and of `ReadOptions`, as for `probe`.

    Raises:
        BatchtuneError: An argument is invalid, the lengths can't be read, how large a batch may be is not known, or
            the folder holds another run.
    """
    reading, sweeping = _split(settings, ReadOptions, SweepSettings)
    folder = _folder(run) if probe is None else probe.folder
    swept = run_sweep(
        _read(lengths, targets, reading),
        _sweep_settings(sweeping),
        folder,
        max_batch_length=max_batch_length,
        current=None if current is None else read_current(current),
        force=force,
    )
    write_config(swept, folder)
    return read_run(folder)


def tune(
    workload: object,
    lengths: Any,
    *,
    targets: npt.ArrayLike | None = None,
    run: str | Path | None = None,
    force: bool = False,
    current: str | None = None,
    **settings: Any,
) -> RunTables:
    """Probe and sweep, as `batchtune tune` does: from lengths to a recommended sampler.

    Arguments and errors are those of `probe` and `sweep`.
    """
    reading, probing, sweeping = _split(
        settings, ReadOptions, ProbeSettings, SweepSettings
    )
    read = _read(lengths, targets, reading)
    probed = probe(workload, read, run=run, force=force, **{**probing, **sweeping})
    return sweep(read, probe=probed, current=current, **sweeping)


def read_run(folder: str | Path) -> RunTables:
    """Read the results in a run folder, whichever command wrote them.

    Raises ResultError if the folder holds none, or if files are damaged or of different data.
    """
    results = load_run(Path(folder))
    return RunTables(
        **{field.name: getattr(results, field.name) for field in fields(results)}
    )


def _read(data: Any, targets: Any, reading: dict[str, Any]) -> Lengths:
    lengths = lengths_of(data, ReadOptions(**reading), targets)
    if lengths is not data:
        for note in lengths.notes:
            _log.info(note)
    return lengths


def _sweep_settings(sweeping: dict[str, Any]) -> SweepSettings:
    return checked_settings(**{"strategies": tuple(STRATEGIES), **sweeping})


def _folder(run: str | Path | None) -> Path:
    """Return the run folder; without one a temporary folder, which stays while results may refer to it."""
    if run is not None:
        return Path(run)
    folder = Path(tempfile.mkdtemp(prefix="batchtune-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _split(settings: dict[str, Any], *kinds: type[Record]) -> list[dict[str, Any]]:
    """Return the settings of each kind, by its fields. Raises UsageError for one that is of none."""
    values = dict(settings)
    for name, (field, parse) in _SPELLINGS.items():
        if isinstance(values.get(name), (str, int)):
            values[field] = parse(str(values.pop(name)))
    shares = []
    unknown = set(values)
    for kind in kinds:
        names = kind.__struct_fields__
        shares.append({name: values[name] for name in names if name in values})
        unknown -= set(names)
    if unknown:
        raise UsageError(
            f"unknown settings: {listed(sorted(unknown))}",
            f"Settings are the fields of {listed([kind.__name__ for kind in kinds])}.",
        )
    return shares


def _frame(result: Result | None, table: str) -> pd.DataFrame:
    import pandas as pd

    if result is None:
        raise ResultError(
            f"this run has no {table}",
            "batchtune.probe makes trials and the frontier, batchtune.sweep the rows.",
        )
    frame: pd.DataFrame = pd.DataFrame(msgspec.to_builtins(getattr(result, table)))
    return frame
