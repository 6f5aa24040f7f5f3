"""One source → its checked, scaled and filtered lengths, with everything counted that is left out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import FloatArray, IntArray, Runs
from batchtune.manifests.formats import Format, Rows, Unreadable, Values, number
from batchtune.manifests.formats.text import keyed_values
from batchtune.manifests.inputs import FORMATS, LARGEST, SMALLEST
from batchtune.manifests.planning import Measure, Plan, reader_of, unit_of
from batchtune.manifests.source import Source
from batchtune.manifests.storage import Traffic
from batchtune.manifests.texts import chat_lengths, counter, joined, measured
from batchtune.results import Reduction

SHOWN = 5
# So many bytes of lengths are read before equal ones are counted.
_COUNTED_BYTES = 32 * 1024 * 1024

_Mask = npt.NDArray[np.bool_]

# Called with the share of the bytes that is read, from 0 to 1, the number of examples, and the network traffic so far.
OnReadProgress = Callable[[float, int, Traffic], None]


class ReadTask(NamedTuple):
    """One source to be read, in this process or another, with its file of target lengths, if it has one."""

    plan: Plan
    source: Source
    target_file: Source | None

    def state(self) -> str | None:
        """Return what changes whenever its files do; None for a pipe, and for the files of a folder."""
        files = [self.source]
        if self.target_file is not None:
            files.append(self.target_file)
        versions = [(str(file.path), file.version) for file in files]
        if any(version is None for _, version in versions):
            return None
        return repr(versions)


@dataclass(slots=True)
class Part:
    """The examples of one source, or of all; `label` names it in messages.

    Attributes:
        lengths, targets: Float64, of the valid examples within the user's limits, in the order of the file.
        counts: Int64, how many examples each of these is; none if each is one.
        fingerprints: `Format.noted_fingerprints` of the source.
        ids: One for each, if they are asked for.
        places: Int64, the row of each in its source, from 0, if ids are asked for or the rows are in another order.
        rows: How many examples were read.
        truncated: How many are longer than --truncate.
        left_out: Reason → number of examples that are invalid, or that the reader or the user's limits exclude.
        num_invalid: How many of them are invalid.
        shown: The first invalid ones, for the message.
        broken: Why the source could not be read to its end; None if it could.
        num_estimates: How many lengths are estimates.
        state: `Task.state` when it was read.
        traffic: What was read over the network for it.
    """

    label: str
    lengths: bytearray = field(default_factory=bytearray)
    targets: bytearray = field(default_factory=bytearray)
    counts: bytearray = field(default_factory=bytearray)
    fingerprints: tuple[str, str] | None = None
    ids: list[str | None] = field(default_factory=list)
    places: bytearray = field(default_factory=bytearray)
    rows: int = 0
    truncated: int = 0
    left_out: dict[str, int] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    broken: str | None = None
    num_estimates: int = 0
    num_invalid: int = 0
    state: str | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def values(self) -> FloatArray:
        """The lengths, shape (count,): no copy, and none can be added while it is in use."""
        return np.frombuffer(self.lengths)

    @property
    def target_values(self) -> FloatArray | None:
        """The target lengths, shape (count,), or None without any."""
        return np.frombuffer(self.targets) if self.targets else None

    @property
    def numbers(self) -> IntArray | None:
        """How many examples each length is, shape (count,), or None if each is one."""
        return np.frombuffer(self.counts, np.int64) if self.counts else None

    @property
    def row_numbers(self) -> IntArray:
        """The row of each length in its source, shape (count,); or shape (0,), if they are not held."""
        return np.frombuffer(self.places, np.int64)

    def put_in_order(self, label: str) -> None:
        """Put the examples in the order of their rows in the source. Raises ManifestError if two are of one row."""
        order = np.argsort(self.row_numbers)
        if (np.diff(self.row_numbers[order], prepend=-1) < 1).any():
            raise ManifestError(
                f"{label} is damaged: its column of rows does not name each row once",
                "Create it again with `batchtune scan`.",
            )
        for column in (self.places, self.lengths, self.targets):
            numbers = np.frombuffer(column, np.int64)  # doubles are as wide
            numbers[:] = numbers[order[: numbers.size]]
        if self.ids:
            self.ids = [self.ids[index] for index in order]

    def count_equal(self) -> None:
        """Keep equal examples once, with their number: in descending order, without ids."""
        if not self.lengths:
            return
        runs = Runs.of(self.values, self.target_values, self.numbers)
        self.lengths = bytearray(runs.values.tobytes())
        if runs.targets is not None:
            self.targets = bytearray(runs.targets.tobytes())
        self.counts = bytearray(runs.counts.tobytes())

    def add(self, rows: Rows, plan: Plan) -> None:
        """Check some rows and keep the lengths of the valid ones."""
        options = plan.options
        kept = np.ones(len(rows.columns[0]), dtype=np.bool_)
        counts = rows.counts
        if counts is None:
            counts = kept.astype(np.int64)
        lengths = self._checked(rows, plan, plan.lengths, kept, counts)
        targets = np.zeros(0)
        if plan.target is not None:
            targets = self._checked(rows, plan, (plan.target,), kept, counts)
        places = rows.order
        if places is None:
            places = np.arange(self.rows, self.rows + kept.size)
        self.rows += int(counts.sum())
        self.num_estimates += rows.num_estimates
        for reason, count in rows.left_out.items():
            self.left_out[reason] += count
        shortest = options.min_length or 0.0
        longest = np.inf if options.max_length is None else options.max_length
        too_short = f"shorter than --min-length {shortest:.15g}"
        too_long = f"longer than --max-length {longest:.15g}"
        self._leave_out(kept, lengths < shortest, too_short, counts)
        self._leave_out(kept, lengths > longest, too_long, counts)
        if options.truncate is not None:
            self.truncated += int(counts[kept & (lengths > options.truncate)].sum())
            lengths = np.minimum(lengths, options.truncate)
        self.lengths += lengths[kept].data
        if plan.target is not None:
            self.targets += targets[kept].data
        if rows.counts is not None or self.counts:
            self.counts += counts[kept].data
        if plan.as_histogram and len(self.lengths) > _COUNTED_BYTES:
            self.count_equal()
        if plan.with_ids or (rows.order is not None and not plan.as_histogram):
            self.places += places[kept].data
        if plan.with_ids:
            self.ids += itertools.compress(rows.ids(), kept)

    def _leave_out(
        self, kept: _Mask, excluded: _Mask, reason: str, counts: IntArray
    ) -> None:
        """Keep excluded examples no longer, and count them."""
        count = int(counts[kept & excluded].sum())
        if count:
            self.left_out[reason] += count
            kept &= ~excluded

    def _checked(
        self,
        rows: Rows,
        plan: Plan,
        measures: Sequence[Measure],
        kept: _Mask,
        counts: IntArray,
    ) -> FloatArray:
        """Return the length by these columns; count the invalid ones among those kept, and keep them no longer."""
        is_target = measures[0] is plan.target
        written = dict(zip(plan.columns, rows.columns, strict=False))
        if is_target:
            written[measures[0].column] = rows.columns[-1]
        valid = np.ones(kept.size, dtype=np.bool_)
        columns = []
        with np.errstate(all="ignore"):  # what becomes infinite is invalid
            for measure in measures:
                values = _measured(written, measure, plan)
                lengths = numbers(values)
                if not is_target and plan.factor != 1:
                    lengths = (
                        lengths
                        * float(plan.factor.numerator)
                        / float(plan.factor.denominator)
                    )
                shown = written[measure.column]
                columns.append((measure.column, shown, values, lengths))
                valid &= (lengths >= 0) & (lengths <= LARGEST)
            total = columns[0][-1]
            if not is_target and plan.weights != [[1]]:
                stacked = np.array([lengths for *_, lengths in columns])
                total = (np.array(plan.weights) @ stacked).max(axis=0)
        valid &= (total >= (0.0 if is_target else SMALLEST)) & (total <= LARGEST)
        what = "length"
        if is_target:
            what = "target length"
        for row in np.flatnonzero(kept & ~valid).tolist():
            reason, seen = _explained(columns, row, total[row], plan.key)
            self.left_out[f"invalid {what} ({reason})"] += int(counts[row])
            self.num_invalid += int(counts[row])
            if len(self.shown) < SHOWN:
                self.shown.append(
                    f"{place_of(rows, row) or f'row {self.rows + row + 1:,}'}: {seen}"
                )
        kept &= valid
        return total


# Of a column: its name, its values as they are written, as they are measured, and scaled.
_Checked = tuple[str, Values, Values, FloatArray]


def _explained(
    columns: Sequence[_Checked], row: int, total: float, key: str
) -> tuple[str, str]:
    """Return the reason why a row is invalid, and a description of what is wrong with the first such value."""
    for name, written, values, lengths in columns:
        shown = written[row]
        value = shown if shown == "" else values[row]
        reason = fault(value, lengths[row])
        label = shortened(name, 400)  # a target file is found only whole
        if isinstance(value, Unreadable):
            return reason, f"{label} can't be read: {value}"
        if value is None:
            return reason, f"{label} is missing"
        if len(columns) == 1 or not 0 <= lengths[row] <= LARGEST:
            return reason, f"{label} is {shortened(shown, 100)} ({reason})"
    reason = fault(total, total)
    return reason, f"{key!r} is {total} ({reason})"


def place_of(rows: Rows, index: int) -> str:
    """Return place and id of a row, as far as it has them; they may be the same."""
    places = []
    if rows.place is not None:
        places.append(rows.place(index))
    name = rows.ids()[index]
    if name is not None:
        places.append(f"id {shortened(name)}")
    return ", ".join(dict.fromkeys(places))


def _measured(written: Mapping[str, Values], measure: Measure, plan: Plan) -> Values:
    """Return the values of a column, out of all, with texts, lists and chats as numbers."""
    tokenizer = plan.options.tokenizer
    values = written[measure.column]
    if measure.texts is not None:
        if measure.chats:
            if len(measure.chats) > 1:
                parts = [written[name] for name in measure.chats]
                values = list(map(joined, zip(*parts, strict=True)))
            tools = [written[name] for name in measure.tools]
            return chat_lengths(values, measure.texts, tokenizer, *tools)
        values = measured(values, counter(measure.texts, tokenizer))
    if measure.lists is not None:
        values = reduced(values, measure.lists)
    return values


def reduced(values: Values, reduction: Reduction) -> Values:
    """Replace lists by one number each; any other value stays."""
    if isinstance(values, np.ndarray):
        return values
    return [
        _reduced(value, reduction) if isinstance(value, list) else value
        for value in values
    ]


def _reduced(items: list[object], reduction: Reduction) -> object:
    if reduction == "count":
        return len(items)
    sizes = numbers(items)
    if not sizes.size or np.isnan(sizes).any():
        return Unreadable("an empty list, or not of numbers", shortened(items))
    if reduction == "first":
        return float(sizes[0])
    if reduction == "max":
        return float(sizes.max())
    return float(sizes.sum())


def numbers(values: Values) -> FloatArray:
    """Return values as float64, shape (len(values),), NaN where one is not a number."""
    if isinstance(values, np.ndarray):
        return values
    types = set(map(type, values))
    try:
        if types <= {int, float}:
            return np.array(values, dtype=np.float64)
        if types == {str} and "_" not in "".join(values):  # type: ignore[arg-type]  # all are str
            return np.fromiter(map(float, values), dtype=np.float64, count=len(values))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        pass  # one of them is not a number: take them one by one
    return np.array(list(map(number, values)), dtype=np.float64)  # None becomes NaN


def fault(value: object, scaled: float) -> str:
    """Say in a word or two why a value, and what `numbers` and the scale made of it, is not a valid length."""
    if isinstance(value, Unreadable):
        return value.reason
    if isinstance(value, str) and not value.strip():
        return "empty"
    if number(value) is None:
        if isinstance(value, str) and number(value.replace(",", ".")) is not None:
            return "text: a decimal comma? Write a point"
        names = {
            type(None): "missing",
            bool: "a boolean",
            list: "a list",
            dict: "an object",
            str: "text",
        }
        return names.get(type(value), "not a number")
    if math.isnan(scaled):
        return "NaN"
    if math.isinf(scaled):
        return "infinite"
    if scaled > LARGEST:
        return "absurdly long"
    if 0 < scaled < SMALLEST:
        return "absurdly short"
    if scaled == 0:
        return "zero"
    return "negative"


def read_part(task: ReadTask, on_progress: OnReadProgress | None = None) -> Part:
    """Read one source. If it can't be read, the part says so; a lone one (not --skip-invalid) raises ManifestError."""
    plan = task.plan
    source = task.source
    part = Part(source.label)
    before = replace(source.traffic)
    if on_progress is not None:
        source.report = lambda share: on_progress(
            share, part.rows, source.traffic.since(before)
        )
    try:
        part.state = task.state()
        reader = reader_of(source, plan.format)
        if unit_of(reader, plan.lengths) != plan.stored_unit:
            raise ManifestError(
                f"{source.path} has its lengths in another unit than the sources before it",
                "Sources that are read together need one unit; read them one by one, or convert one of them.",
            )
        if plan.in_order and reader.order_is_lost:
            raise not_in_order(source.label)
        part.fingerprints = reader.noted_fingerprints
        seen: set[str | None] = set()
        for rows in _joined(reader, plan, task.target_file):
            if rows.counts is not None and (plan.with_ids or task.target_file):
                raise not_listed(source.label)
            part.add(rows, plan)
            if reader.unique_ids:
                _refuse_repeated(source, rows, seen)
        if part.places:
            part.put_in_order(source.label)
        source.check_unchanged()
    except MemoryError:
        raise ManifestError(
            f"{source.path}: reading needs more memory than this process may take",
            "Raise the limit, or write it as JSON Lines, CSV or Parquet with one example in each row.",
        ) from None
    except ManifestError as error:
        error = _or_changed(source, error)
        if plan.alone and not (
            plan.options.skip_invalid and FORMATS[plan.format].sharded
        ):
            raise error from None
        part.broken = error.message
    part.traffic = source.traffic.since(before)
    if plan.as_histogram:
        part.count_equal()
    return part


def read_together(tasks: Sequence[ReadTask]) -> list[Part]:
    """Read some sources; objects over the network at the same time, as each waits for its requests."""
    if len(tasks) == 1 or not tasks[0].source.is_remote:
        return [read_part(task) for task in tasks]
    with ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(read_part, tasks))


def _or_changed(source: Source, error: ManifestError) -> ManifestError:
    """Return the error, or that the object was replaced while it was read if that is why it seemed to be damaged."""
    try:
        source.check_unchanged()
    except ManifestError as changed:
        return changed
    return error


def not_listed(label: str) -> ManifestError:
    """Return the error for a histogram where the examples themselves are needed."""
    return ManifestError(
        f"{label} is a histogram: it counts the examples of each length, but lists neither them nor their order",
        "Name the data set itself, or what `batchtune scan` wrote of it without --histogram.",
    )


def not_in_order(label: str) -> ManifestError:
    """Return the error for a sorted table where the order of the examples is needed."""
    return ManifestError(
        f"{label} is sorted by length, and its column 'row' is gone: row i is not example i of the data set",
        "Name the data set itself, or the whole table that `batchtune scan` wrote of it.",
    )


def _refuse_repeated(source: Source, rows: Rows, seen: set[str | None]) -> None:
    """Raise ManifestError if one of these rows has an id that was seen before."""
    for index, name in enumerate(rows.ids()):
        if name in seen:
            raise ManifestError(
                f"{source.path}, {place_of(rows, index)}: duplicate id",
                "Each example has an id of its own in this format: rename or remove one of them.",
            )
        seen.add(name)


def _joined(reader: Format, plan: Plan, target_file: Source | None) -> Iterator[Rows]:
    """Yield the rows with the targets of a file: by id if ids are unique (Kaldi's), else line by line."""
    if target_file is None:
        yield from reader.rows(plan.columns)
        return
    if reader.unique_ids:
        by_id = keyed_values(target_file)
        for rows in reader.rows(plan.columns):
            targets = [by_id.get(name) for name in rows.ids()]
            yield replace(rows, columns=[*rows.columns, targets])
        return
    hint = f"{target_file.path}, the target file, has one line for each example, in the same order."
    lines = target_file.lines()
    for rows in reader.rows(plan.columns):
        count = len(rows.columns[0])
        texts = [text for _, text in itertools.islice(lines, count)]
        if len(texts) < count:
            raise ManifestError(
                f"{reader.source.path} has more examples than the target file has lines",
                hint,
            )
        yield replace(rows, columns=[*rows.columns, texts])
    if any(text.strip() for _, text in lines):
        raise ManifestError(
            f"{reader.source.path} has fewer examples than the target file has lines",
            hint,
        )
