"""Takes the lengths from a training script's own data set: the numbers that it holds, or else of all its examples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchtune.errors import WorkloadError
from batchtune.files import command_text, write_whole
from batchtune.lengths import FloatArray, RowLength, Unit, rows_of
from batchtune.manifests.formats import INPUTS, KNOWN_UNITS, TOKEN_LISTS, normalised
from batchtune.manifests.formats.columnar import ROW, noted_table
from batchtune.probe.requests import TEMPORARY, Describe, Described, worker_program
from batchtune.probe.supervisor import (
    LEADING_SECONDS,
    script_error,
    script_request,
)
from batchtune.processes.worker import Failed, Nursery, WorkerLost
from batchtune.results import OWN_LENGTHS_FILE
from batchtune.run_folder import alone_in
from batchtune.scripts.relations import Unclear, digit_of, scale_by_rows
from batchtune.units import format_seconds

if TYPE_CHECKING:
    import pyarrow

    from batchtune.scripts.drawing import Drawn

# Attributes of data sets that hold one number for each example.
_ATTRIBUTES = {"lengths": "length", "sizes": "length", "durations": "duration"}
_KINDS = "iuf"
# A manifest's lengths may be the data set's, rounded.
_ROUNDED = 1e-4


def keep_own_lengths(
    folder: Path,
    command: list[str],
    options: Mapping[str, Any],
    timeout_seconds: float,
    scratch: str | None = None,
    *,
    force: bool,
) -> tuple[Path, str]:
    """Return a manifest of a script's data set in a run folder, made unless there is one, and a note about it.

    `force` makes it anew: the script is started, and its training data set written in its order. `scratch` is as in the
    settings of a probe. Raises WorkloadError if the script does not train, or its data set holds no lengths.
    """
    path = folder / OWN_LENGTHS_FILE
    own = "The lengths are those of the script's own data set"
    if path.exists() and not force:
        return path, f"{own}, as an earlier run kept them in {path}."
    with alone_in(folder):
        nursery = Nursery(*worker_program(script=True))
        nursery.start_worker()
        try:
            with script_request(command, scratch) as script:
                # Of all folders, the script may write to that of its temporary files.
                output = Path(script.scratch, TEMPORARY, path.name)
                request = Describe(
                    script=script,
                    options=dict(options),
                    output=str(output),
                    timeout_seconds=timeout_seconds,
                )
                reply = nursery.ask(
                    request, (Described, Failed), timeout_seconds + LEADING_SECONDS
                )
                if isinstance(reply, Described):
                    write_whole(path, output.read_bytes())
        except WorkerLost as lost:
            raise script_error(command_text(command), lost) from None
        finally:
            nursery.end_worker()
            nursery.close()
    if isinstance(reply, Described):
        return path, f"{own} ({reply.loader}), kept in {path}."
    assert isinstance(reply, Failed)
    raise WorkloadError(
        f"{command_text(command)}, in its first batches: {reply.message}",
        reply.hint or "Run it by itself first.",
        reply.traceback,
    )


def own_table(
    dataset: Any, measure: Callable[[], Drawn | None], timeout_seconds: float
) -> pyarrow.Table:
    """Return the lengths of a data set, a row for each example in its order.

    `measure` measures some examples; it returns None where none can be had. Numbers in the data set
    that follow the sizes of these examples are the `length` and the `target_length`. If none do,
    and none is named as a length, all examples are measured.

    Raises WorkloadError if the data set holds no numbers, and measuring all examples would take
    over half of the time.
    """
    import pyarrow

    columns = _columns(dataset)
    started = time.monotonic()
    why = "does not hold them as numbers"
    try:
        drawn = measure()
    except Unclear as unclear:
        why += f", and {unclear.message}"
        drawn = None
    if drawn is not None:
        unit, lengths = _following(columns, drawn)
        seconds = (time.monotonic() - started) / len(drawn.indices) * len(dataset)
        # A column whose name says that it has lengths may follow others: of augmented examples, for instance.
        is_unknown = not lengths and not any(
            normalised(name) in KNOWN_UNITS for name in columns
        )
        if is_unknown and seconds > timeout_seconds / 2:
            why += f", and to read all {len(dataset):,} examples would take {format_seconds(seconds)}"
        elif is_unknown:
            sizes = np.array([drawn.size(index) for index in range(len(dataset))])
            lengths = {"length": sizes[:, 0]}
            unit = drawn.unit
            if drawn.targets is not None:
                lengths["target_length"] = sizes[:, 1]
        if lengths:
            rows = {ROW: np.arange(len(dataset))}
            return noted_table({**columns, **lengths, **rows}, unit)
    if not columns:
        raise WorkloadError(
            f"the lengths are unknown: the script's data set ({type(dataset).__name__}) {why}",
            "Give a manifest of them, in the order of the data set, before the --. `batchtune scan SOURCE -o "
            "lengths.parquet` makes one of audio, texts or shards. Or let the data set have an attribute `lengths`.",
        )
    return pyarrow.table(columns)


def rows_in_order(
    dataset: Any, lengths: Sequence[float], targets: Sequence[float] | None
) -> tuple[RowLength, ...]:
    """Return the rows of a data set whose own numbers are a manifest's lengths and targets, both ascending.

    The manifest may have them in another order. Empty if no numbers are the same ones.
    """
    columns = [np.asarray(of, np.float64) for of in _columns(dataset).values()]

    def found(values: Sequence[float]) -> FloatArray | None:
        # Of very many, the manifest's are evenly spaced.
        places = np.linspace(0, len(dataset) - 1, len(values)).astype(int)
        for numbers in columns:
            descending = np.sort(numbers)[::-1]
            if np.allclose(descending[places], values[::-1], rtol=_ROUNDED, atol=0):
                return numbers
        return None

    of_lengths = found(lengths)
    of_targets = None
    if targets is not None:
        of_targets = found(targets)
    if of_lengths is None or (targets is not None and of_targets is None):
        return ()
    return rows_of(of_lengths, of_targets)


def _following(
    columns: Mapping[str, Any], drawn: Drawn
) -> tuple[Unit | None, dict[str, Any]]:
    """Return the columns that the sizes of the measured examples follow, as `length` and `target_length`, and the unit.

    Neither without a column of the lengths.
    """
    found: dict[str, str] = {}
    for name, values in columns.items():
        numbers = np.asarray(values, np.float64)
        rows = numbers[list(drawn.indices)].tolist()
        digit = digit_of(numbers)
        for place, sizes in (
            ("length", drawn.lengths),
            ("target_length", drawn.targets or []),
        ):
            if sizes and scale_by_rows(sizes, rows, digit, None) is not None:
                found.setdefault(place, name)
    if "length" not in found:
        return None, {}
    name = normalised(found["length"])
    unit = KNOWN_UNITS.get(name)
    if name in TOKEN_LISTS:
        unit = "tokens"
    return unit, {place: columns[name] for place, name in found.items()}


def _columns(dataset: Any) -> dict[str, Any]:
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset
        indices = np.asarray(dataset.indices)
        return {
            name: np.asarray(values)[indices]
            for name, values in _columns(dataset.dataset).items()
        }
    if hasattr(dataset, "with_format") and hasattr(dataset, "select_columns"):
        return _of_arrow(dataset)
    if hasattr(dataset, "data_ids") and isinstance(
        getattr(dataset, "data", None), dict
    ):
        return _of_annotations([dataset.data[name] for name in dataset.data_ids])
    columns: dict[str, Any] = {}
    for attribute, name in _ATTRIBUTES.items():
        values = getattr(dataset, attribute, None)
        if values is None or isinstance(values, Callable):  # type: ignore[arg-type]
            continue
        array = np.asarray(values)
        # Of a stream the number of examples may be unknown.
        if array.dtype.kind in _KINDS and array.shape == (length_hint(dataset),):
            columns.setdefault(name, array)
    return columns or _of_rows(dataset)


def _of_rows(dataset: Any) -> dict[str, Any]:
    """Return the numbers in the first attribute that is a list with a mapping for each example."""
    for rows in getattr(dataset, "__dict__", {}).values():
        is_list = isinstance(rows, list) and len(rows) == length_hint(dataset)
        if is_list and all(isinstance(row, Mapping) for row in rows):
            return _of_annotations(rows)
    return {}


def _of_arrow(dataset: Any) -> dict[str, Any]:
    """Return the numbers of a Hugging Face data set, and the sizes of its lists; those of its input as `num_tokens`."""
    from pyarrow import compute, types

    columns: dict[str, Any] = {}
    for name in dataset.column_names:
        kind = dataset.features.arrow_schema.field(name).type
        is_number = types.is_integer(kind) or types.is_floating(kind)
        if not is_number and not types.is_list(kind) and not types.is_large_list(kind):
            continue
        column = dataset.select_columns([name]).with_format("arrow")[:].column(name)
        columns[name] = column if is_number else compute.list_value_length(column)
    for name in INPUTS:
        if name in columns:
            columns.setdefault("num_tokens", columns[name])
    return columns


def _of_annotations(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the annotations that are a number in every row, or the text of one as in a CSV file."""
    columns = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if all(isinstance(value, (int, float, str)) for value in values):
            with contextlib.suppress(ValueError):
                columns[name] = np.asarray(values, dtype=float)
    return columns
