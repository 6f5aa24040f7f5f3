"""One source → its checked, scaled and filtered lengths, with everything counted that is left out; several joined."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import FloatArray, Lengths
from batchtune.manifests.base import Format, Place, Rows
from batchtune.manifests.chats import chat_lengths
from batchtune.manifests.planning import Plan, keyed_targets, plan_for, reader_of
from batchtune.manifests.source import Source
from batchtune.manifests.values import (
    LARGEST,
    SMALLEST,
    Measure,
    Unreadable,
    Values,
    counter,
    fault,
    measured,
    numbers,
    reduced,
)
from batchtune.units import counted

_SHOWN = 5

# Called with the share of the bytes that is read, from 0 to 1, and the number of examples.
OnProgress = Callable[[float, int], None]


class Task(NamedTuple):
    """One source to be read, in this process or another, with its file of target lengths, if it has one."""

    plan: Plan
    source: Source
    target_file: Source | None


@dataclass(slots=True)
class Part:
    """The examples of one source, or of all; `label` names it in messages.

    Attributes:
        lengths, targets: Float64, of the valid examples within the user's limits, in the order of the file. Blocks of
            memory that grow in place: numbers are never held twice.
        ids: One for each, if they are asked for.
        rows: How many examples were read.
        truncated: How many are longer than --truncate.
        invalid, left_out: Reason → number of examples; left out are those that the reader or the user's limits exclude.
        shown: The first invalid ones, for the message.
        broken, hint: Why the source could not be read to its end, and what to do; None if it could.
        advice: The format's own hint if most values are missing.
        num_estimates: How many lengths are estimates.
    """

    label: str
    lengths: bytearray = field(default_factory=bytearray)
    targets: bytearray = field(default_factory=bytearray)
    ids: list[str | None] = field(default_factory=list)
    rows: int = 0
    truncated: int = 0
    invalid: dict[str, int] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=Counter)
    broken: str | None = None
    hint: str | None = None
    notes: list[str] = field(default_factory=list)
    advice: str | None = None
    num_estimates: int = 0

    @property
    def values(self) -> FloatArray:
        """The lengths, shape (count,): no copy, and none can be added while it is in use."""
        return np.frombuffer(self.lengths)

    @property
    def target_values(self) -> FloatArray | None:
        """The target lengths, shape (count,), or None without any."""
        return np.frombuffer(self.targets) if self.targets else None

    def sorted(self, plan: Plan) -> Lengths:
        """Sort the lengths, in place."""
        lengths = Lengths.of(
            self.values,
            self.target_values,
            unit=plan.unit,
            left_out=dict(self.left_out),
            notes=(*plan.notes, *self.notes),
        )
        return replace(lengths, truncated=self.truncated)

    def add(self, rows: Rows, plan: Plan) -> None:
        """Check some rows and keep the lengths of the valid ones."""
        options = plan.options
        kept = np.ones(len(rows.columns[0]), dtype=np.bool_)
        self.rows += kept.size
        self.num_estimates += rows.num_estimates
        for reason, count in rows.left_out.items():
            self.left_out[reason] += count
        lengths = self._lengths(rows, plan, kept)
        targets = None
        if plan.target is not None:
            targets = self._checked(rows, len(plan.measures) - 1, "target length", plan, kept, smallest=0.0)
        if options.min_length is not None:
            self._leave_out(kept, lengths < options.min_length, f"shorter than --min-length {options.min_length:.15g}")
        if options.max_length is not None:
            self._leave_out(kept, lengths > options.max_length, f"longer than --max-length {options.max_length:.15g}")
        if options.truncate is not None:
            self.truncated += int((kept & (lengths > options.truncate)).sum())
            lengths = np.minimum(lengths, options.truncate)
        self.lengths += lengths[kept].data
        if targets is not None:
            self.targets += targets[kept].data
        if plan.with_ids:
            ids = rows.ids()
            self.ids += [ids[index] for index in np.flatnonzero(kept).tolist()]

    def _leave_out(self, kept: npt.NDArray[np.bool_], excluded: npt.NDArray[np.bool_], reason: str) -> None:
        """Keep excluded examples no longer, and count them."""
        excluded = kept & excluded
        if excluded.any():
            self.left_out[reason] += int(excluded.sum())
            kept &= ~excluded

    def _lengths(self, rows: Rows, plan: Plan, kept: npt.NDArray[np.bool_]) -> FloatArray:
        """Return the lengths; count the invalid ones among those kept, and keep them no longer."""
        summands = len(plan.measures)
        if plan.target is not None:
            summands -= 1
        if summands == 1:
            return self._checked(rows, 0, "length", plan, kept, smallest=SMALLEST)
        lengths = np.zeros(kept.size)
        for index in range(summands):
            lengths += self._checked(rows, index, "length", plan, kept, smallest=0.0)
        for index in np.flatnonzero(kept & (lengths < SMALLEST)).tolist():
            self._reject(rows, index, "length", plan.length or "", 0.0, "zero")
        kept &= lengths >= SMALLEST
        return lengths

    def _checked(
        self, rows: Rows, column: int, what: str, plan: Plan, kept: npt.NDArray[np.bool_], *, smallest: float
    ) -> FloatArray:
        """Return a column as numbers; count the invalid ones among those kept, and keep them no longer."""
        written = rows.columns[column]
        values = _measured(written, plan.measures[column], plan)
        with np.errstate(over="ignore"):  # what becomes infinite is invalid
            lengths = numbers(values)
            if what == "length" and plan.factor != 1:
                lengths = lengths * float(plan.factor.numerator) / float(plan.factor.denominator)
        valid = (lengths >= smallest) & (lengths <= LARGEST)
        name = (*plan.columns, plan.target)[column] or ""
        for index in np.flatnonzero(kept & ~valid).tolist():
            shown = _item(written, index)
            value = _item(values, index)
            if shown == "":
                value = ""
            reason = fault(value, lengths[index])
            if isinstance(value, Unreadable) and not isinstance(shown, list):
                shown = value
            self._reject(rows, index, what, name, shown, reason)
        kept &= valid
        return lengths

    def _reject(self, rows: Rows, index: int, what: str, column: str, value: object, reason: str) -> None:
        """Count an invalid example, and describe the first ones for the message."""
        self.invalid[f"invalid {what} ({reason})"] += 1
        if len(self.shown) < _SHOWN:
            seen = "missing"
            if value is not None:
                seen = f"{shortened(value, 100)} ({reason})"
            # A target file's path is found only whole.
            self.shown.append(f"{rows.place(index)}: {shortened(column, 400)} is {seen}")


def _item(values: Values, index: int) -> object:
    """Return a value as Python has it."""
    value = values[index]
    return value.item() if isinstance(value, np.generic) else value


def _measured(values: Values, measure: Measure, plan: Plan) -> Values:
    """Return the values of a column with texts, lists and chats as numbers."""
    tokenizer = plan.options.tokenizer
    if measure.chats:
        return chat_lengths(values, measure.texts or "characters", tokenizer)
    if measure.texts is not None:
        values = measured(values, counter(measure.texts, tokenizer))
    return values if measure.lists is None else reduced(values, measure.lists)


def read_part(task: Task, on_progress: OnProgress | None = None) -> Part:
    """Read one source. Raises ManifestError if it can't be read; if others are, or --skip-invalid, the part says so."""
    plan = task.plan
    source = task.source
    part = Part(str(source.path))
    reader: Format | None = None
    try:
        reader = reader_of(source, plan.options.format)
        part.advice = reader.missing_hint
        if on_progress is not None:
            source.report = lambda share: on_progress(share, part.rows)
        _read_rows(part, reader, plan, task.target_file)
    except (ManifestError, MemoryError) as caught:
        error = too_large(source) if isinstance(caught, MemoryError) else caught
        keeps_beginning = plan.options.skip_invalid and reader is not None and reader.sharded
        if plan.alone and not keeps_beginning:
            raise error from None
        part.broken = error.message
        part.hint = error.hint
    if not plan.alone:
        source.forget()
    return part


def _read_rows(part: Part, reader: Format, first: Plan, target_file: Source | None) -> None:
    plan = plan_for(reader, first)
    if target_file is not None:
        plan = replace(plan, target=str(target_file.path))
    hashes: list[npt.NDArray[np.int64]] = []
    for rows in _joined(reader.rows(plan.columns), reader, target_file):
        part.add(rows, plan)
        if reader.unique_ids:
            ids = rows.ids()
            hashes.append(np.fromiter(map(hash, ids), dtype=np.int64, count=len(ids)))
    if hashes:
        _refuse_repeated(reader.source, reader.rows(plan.columns[:1]), np.sort(np.concatenate(hashes)))


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
                message = f"{source.path}, {place}: duplicate id, first at line {seen[name].line}"
                hint = "Each example has an id of its own in this format: rename or remove one of them."
                raise ManifestError(message, hint)
            seen[name] = place


def _joined(chunks: Iterator[Rows], reader: Format, target_file: Source | None) -> Iterator[Rows]:
    """Yield the rows with the targets of a file: by id if the format is keyed by ids (Kaldi's), else line by line."""
    if target_file is None:
        yield from chunks
        return
    if reader.joined_by_id:
        table = keyed_targets(target_file)
        for rows in chunks:
            yield replace(rows, columns=[*rows.columns, [table.get(name or "") for name in rows.ids()]])
        return
    path = target_file.path
    hint = "A target file has one line for each example, in the same order."
    lines = target_file.lines()
    last = 0
    for rows in chunks:
        count = len(rows.columns[0])
        texts = [text for _, text in itertools.islice(lines, count)]
        last += len(texts)
        if len(texts) < count:
            raise ManifestError(f"{path} ends after line {last:,}, and the manifest has more examples", hint)
        yield replace(rows, columns=[*rows.columns, texts])
    for number, text in lines:
        if text.strip():
            raise ManifestError(f"{path} goes on at line {number:,}, where the manifest has no more examples", hint)


def too_large(source: Source) -> ManifestError:
    """Return the error for a source that takes more memory than there is."""
    hint = (
        "Raise the limit (ulimit -v, or that of the container), or write it as JSON Lines, CSV or Parquet with one "
        "example in each row: of these only a part is held at once."
    )
    return ManifestError(f"{source.path}: this process may not take as much memory as reading it needs", hint)


def merged(parts: Sequence[Part], plan: Plan) -> Part:
    """Join the parts, which are emptied, with everything left out counted together.

    Raises ManifestError for no rows, for invalid ones or broken sources that are not to be skipped, or if none is left.
    """
    whole = Part(plan.label)
    invalid = Counter[str]()
    left_out = Counter[str]()
    for part in parts:
        whole.rows += part.rows
        whole.truncated += part.truncated
        whole.num_estimates += part.num_estimates
        whole.notes += part.notes
        invalid.update(part.invalid)
        left_out.update(part.left_out)
    broken = [part for part in parts if part.broken is not None]
    if broken and not plan.options.skip_invalid:
        raise _broken_error(broken, len(parts))
    if whole.rows == 0 and not broken:
        raise ManifestError(f"{plan.label} holds no examples", "Check that it was written to its end.")
    if invalid and not plan.options.skip_invalid:
        raise _invalid_error(parts, invalid, plan)
    whole.left_out = left_out + invalid
    for part in parts:
        if whole.lengths:
            whole.lengths += part.lengths
            whole.targets += part.targets
            whole.ids += part.ids
        else:  # not a copy
            whole.lengths = part.lengths
            whole.targets = part.targets
            whole.ids = part.ids
        part.lengths = bytearray()
        part.targets = bytearray()
        part.ids = []
    if whole.num_estimates:
        whole.notes.append(
            f"{counted(whole.num_estimates, 'length')} of MP3 files without a Xing or VBRI header: estimated from the "
            "file's size and its first bit rate."
        )
    for part in broken:
        whole.notes.append(f"Broken: {part.broken}. {counted(part.rows, 'example')} before that kept.")
    if not whole.lengths:
        reasons = [f"{reason}: {count:,}" for reason, count in whole.left_out.items()]
        if broken:
            reasons.append(f"broken sources: {len(broken):,}")
        message = f"{plan.label}: none of its {whole.rows:,} examples is left ({'; '.join(reasons)})"
        raise ManifestError(message, "Check --length-key, --length-scale, --min-length and --max-length.")
    return whole


def _broken_error(broken: Sequence[Part], sources: int) -> ManifestError:
    if sources == 1:
        return ManifestError(str(broken[0].broken), broken[0].hint)
    hints = {part.hint for part in broken if part.hint}
    advice = hints.pop() if len(hints) == 1 else "Fix them, or make or fetch them again."
    head = f"{len(broken):,} of {sources:,} sources can't be read:"
    message = _first(head, [str(part.broken) for part in broken], len(broken))
    return ManifestError(message, f"{advice} Or keep only what precedes the damage with --skip-invalid.")


def _first(head: str, lines: Sequence[str], count: int) -> str:
    """Return the head, the first lines and the number of the others, out of `count`, as lines of a message."""
    shown = [head, *lines[:_SHOWN]]
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN:,} more")
    return "\n  ".join(shown)


def _invalid_error(parts: Sequence[Part], invalid: Counter[str], plan: Plan) -> ManifestError:
    count = invalid.total()
    rows = sum(part.rows for part in parts)
    shown: list[str] = []
    for part in parts:
        prefix = f"{part.label}, " if len(parts) > 1 else ""
        shown += [f"{prefix}{line}" for line in part.shown]
    head = f"{plan.label}: {count:,} of {rows:,} rows are invalid:"
    if count == 1:
        head = f"{plan.label}: 1 of {rows:,} rows is invalid:"
    hint = "Fix them, or leave them out with --skip-invalid."
    missing = sum(number for reason, number in invalid.items() if "(missing)" in reason)
    if all("(a list)" in reason for reason in invalid):
        hint = "Say what becomes of a list with --reduce max, sum, first or count."
    elif count < rows and 2 * missing > count:
        hint = next((part.advice for part in parts if part.advice), hint)
    elif count == rows and plan.target is not None and all("target" in reason for reason in invalid):
        hint = f"No row is valid. Is {shortened(plan.target)} the column of the targets? See --target-key."
    elif count == rows and plan.length is not None:
        hint = f"No row is valid. Is {shortened(plan.length)} the column? See --length-key."
    elif count == rows:
        hint = "No row is valid: is that what it should be?"
    return ManifestError(_first(head, shown, count), hint)
