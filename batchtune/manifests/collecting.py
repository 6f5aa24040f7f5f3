"""Raw rows → checked, scaled and filtered lengths, with everything counted that is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from batchtune.errors import ManifestError, shortened
from batchtune.lengths import FloatArray
from batchtune.manifests.base import Rows
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.planning import Reading
from batchtune.manifests.values import (
    LARGEST,
    SMALLEST,
    Count,
    Unreadable,
    Values,
    fault,
    measured,
    numbers,
    reduced,
)
from batchtune.units import counted

SHOWN = 5
_LONGEST_SHOWN = 100
# A key may be the path of a file of targets, which has to be whole to be found.
_LONGEST_KEY = 400


@dataclass(slots=True)
class Part:
    """What one source gave.

    Attributes:
        label: The source, for messages.
        lengths: Shape (count,), of the valid examples that the user's limits leave, in the order of the file.
        targets: Shape (count,), or None.
        ids: One for each, or None if they were not asked for.
        rows: How many examples there were.
        invalid: Reason → number of invalid examples.
        shown: The first of these, for the message.
        left_out: Reason → number of examples left out by the reader or the user's limits.
        broken: Why the source could not be read to its end, or None.
        hint: What to do about it.
        notes: For the user.
        advice: What to do where most values are missing; the format's own.
    """

    label: str
    lengths: FloatArray
    targets: FloatArray | None
    ids: list[str | None] | None
    rows: int
    invalid: Counter[str]
    shown: list[str]
    left_out: Counter[str]
    broken: str | None = None
    hint: str | None = None
    notes: tuple[str, ...] = ()
    advice: str | None = None

    @classmethod
    def empty(cls, label: str, *, targets: bool, ids: bool) -> Part:
        """Nothing, of a source that could not be read at all."""
        none = np.empty(0)
        return cls(label, none, none if targets else None, [] if ids else None, 0, Counter(), [], Counter())


class Collector:
    """Takes the rows of a source, block by block, and keeps only numbers (and ids, where they are asked for).

    Args:
        label: The source, for messages.
        reading: What is read.
        options: The user's limits.

    Attributes:
        rows: How many were taken.
    """

    def __init__(self, label: str, reading: Reading, options: ReadOptions) -> None:
        self._label = label
        self._reading = reading
        self._options = options
        self._lengths = _Growing()
        self._targets = _Growing()
        self._ids: list[str | None] = []
        self._hashes: list[npt.NDArray[np.int64]] = []
        self._left_out: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._shown: list[str] = []
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Checks some rows and keeps the lengths of the valid ones."""
        reading = self._reading
        self.rows += len(rows.lengths)
        self._left_out.update(rows.left_out)
        if reading.unique_ids:
            self._hashes.append(np.fromiter(map(hash, rows.names()), dtype=np.int64, count=len(rows.lengths)))
        raw = self._prepared(rows.lengths, reading.count_length)
        factor = reading.scaling.factor
        with np.errstate(over="ignore"):  # what becomes infinite is invalid, and said to be
            lengths = numbers(raw)
            if factor != 1:
                lengths = lengths * float(factor.numerator) / float(factor.denominator)
        kept = (lengths >= SMALLEST) & (lengths <= LARGEST)
        self._refuse(rows, ~kept, "length", reading.length, (rows.lengths, raw), lengths)
        if reading.target is not None and rows.targets is not None:
            raw = self._prepared(rows.targets, reading.count_target)
            targets = numbers(raw)
            valid = (targets >= 0) & (targets <= LARGEST)
            self._refuse(rows, kept & ~valid, "target length", reading.target, (rows.targets, raw), targets)
            kept &= valid
            self._filter(kept, lengths)
            self._targets.extend(targets[kept])
        else:
            self._filter(kept, lengths)
        self._lengths.extend(lengths if kept.all() else lengths[kept])
        if reading.with_ids:
            names = rows.names()
            self._ids += [names[index] for index in np.flatnonzero(kept).tolist()]

    def finish(self) -> Part:
        """All that was collected."""
        return Part(
            label=self._label,
            lengths=self._lengths.take(),
            targets=self._targets.take() if self._reading.target is not None else None,
            ids=self._ids if self._reading.with_ids else None,
            rows=self.rows,
            invalid=self._invalid,
            shown=self._shown,
            left_out=self._left_out,
        )

    def repeated_ids(self) -> set[int]:
        """The hashes that occur more than once: of ids that do, or of such that only have the same hash."""
        if not self._hashes:
            return set()
        hashes = np.sort(np.concatenate(self._hashes))
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())

    def _prepared(self, values: Values, count: Count | None) -> Values:
        found = values if count is None else measured(values, count)
        return found if self._reading.reduction is None else reduced(found, self._reading.reduction)

    def _refuse(
        self,
        rows: Rows,
        refused: npt.NDArray[np.bool_],
        what: str,
        key: str,
        values: tuple[Values, Values],
        scaled: FloatArray,
    ) -> None:
        """Counts invalid values by reason; they are shown as they stand in the file.

        Args:
            rows: In which they are.
            refused: Which of the rows.
            what: They are.
            key: Their column.
            values: As they stand in the file, and measured and reduced.
            scaled: The numbers that came of them.
        """
        for index in np.flatnonzero(refused).tolist():
            stands, value = (_plain(one[index]) for one in values)
            reason = fault("" if stands == "" else value, scaled[index])
            self._invalid[f"invalid {what} ({reason})"] += 1
            if len(self._shown) < SHOWN:
                shown = value if isinstance(value, Unreadable) and not isinstance(stands, list) else stands
                said = "missing" if value is None else f"{shortened(shown, _LONGEST_SHOWN)} ({reason})"
                self._shown.append(f"{rows.place(index)}: {shortened(key, _LONGEST_KEY)} is {said}")

    def _filter(self, kept: npt.NDArray[np.bool_], lengths: FloatArray) -> None:
        shortest, longest = self._options.min_length, self._options.max_length
        if shortest is not None:
            self._drop(kept, lengths < shortest, f"shorter than --min-length {shortest:.15g}")
        if longest is not None:
            self._drop(kept, lengths > longest, f"longer than --max-length {longest:.15g}")

    def _drop(self, kept: npt.NDArray[np.bool_], dropped: npt.NDArray[np.bool_], reason: str) -> None:
        if count := int((kept & dropped).sum()):
            self._left_out[reason] += count
            kept &= ~dropped


def _plain(value: object) -> object:
    """A value without NumPy's wrapping."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(slots=True)
class _Growing:
    """Numbers in one block of memory that grows in place, so that they are never held twice."""

    _buffer: FloatArray = field(default_factory=lambda: np.empty(4096))
    _size: int = 0

    def extend(self, values: FloatArray) -> None:
        """Adds some, shape (count,)."""
        size = self._size + values.size
        if size > self._buffer.size:
            self._buffer.resize(max(size, self._buffer.size * 3 // 2), refcheck=False)
        self._buffer[self._size : size] = values
        self._size = size

    def take(self) -> FloatArray:
        """All of them, shape (count,); nothing can be added afterwards."""
        self._buffer.resize(self._size, refcheck=False)
        return self._buffer


def merged(parts: Sequence[Part], label: str, options: ReadOptions, keys: tuple[str | None, str | None]) -> Part:
    """One part of all, with what was left out counted together.

    Args:
        parts: At least one. They are emptied, so that nothing is held twice.
        label: All sources, for messages.
        options: The user's.
        keys: The columns of length and target, for messages; None if there is nothing to choose.

    Raises:
        ManifestError: There were no rows, invalid ones or broken sources that are not to be skipped, or none is
            left.
    """
    rows = sum(part.rows for part in parts)
    broken = [part for part in parts if part.broken is not None]
    invalid: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for part in parts:
        invalid.update(part.invalid)
        left_out.update(part.left_out)
    if broken and not options.skip_invalid:
        raise _broken_error(broken, len(parts))
    if rows == 0 and not broken:
        raise ManifestError(f"{label} holds no examples", "Check that it was written to its end.")
    if invalid and not options.skip_invalid:
        raise _invalid_error(parts, label, rows, invalid, keys)
    left_out.update(invalid)
    notes = [note for part in parts for note in part.notes]
    notes += (f"Broken: {part.broken}. {counted(part.rows, 'example')} before that kept." for part in broken)
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    if whole.lengths.size == 0:
        raise _nothing_left_error(label, rows, left_out, broken)
    return Part(label, whole.lengths, whole.targets, whole.ids, rows, invalid, [], left_out, notes=tuple(notes))


def _joined(parts: Sequence[Part]) -> Part:
    lengths, targets = _Growing(), _Growing()
    ids: list[str | None] = []
    with_targets, with_ids = parts[0].targets is not None, parts[0].ids is not None
    for part in parts:
        lengths.extend(part.lengths)
        part.lengths = np.empty(0)
        if part.targets is not None:
            targets.extend(part.targets)
            part.targets = np.empty(0)
        ids += part.ids or ()
        part.ids = None
    whole = Part.empty("", targets=with_targets, ids=with_ids)
    return replace(
        whole,
        lengths=lengths.take(),
        targets=targets.take() if with_targets else None,
        ids=ids if with_ids else None,
    )


def _broken_error(broken: Sequence[Part], count: int) -> ManifestError:
    if count == 1:
        return ManifestError(str(broken[0].broken), broken[0].hint)
    head = f"{len(broken):,} of {count:,} sources can't be read:"
    rest = [f"and {len(broken) - SHOWN:,} more"] if len(broken) > SHOWN else []
    return ManifestError(
        "\n  ".join([head, *(str(part.broken) for part in broken[:SHOWN]), *rest]),
        _common_hint(broken),
    )


def _most_are_missing(invalid: Counter[str]) -> bool:
    return 2 * sum(count for reason, count in invalid.items() if "(missing)" in reason) > invalid.total()


def _common_hint(broken: Sequence[Part]) -> str:
    hints = {part.hint for part in broken if part.hint}
    advice = hints.pop() if len(hints) == 1 else "Fix them, or make or fetch them anew."
    return f"{advice} Or keep only what precedes the damage with --skip-invalid."


def _invalid_error(
    parts: Sequence[Part], label: str, rows: int, invalid: Counter[str], keys: tuple[str | None, str | None]
) -> ManifestError:
    count = invalid.total()
    shown = [f"{part.label}, {line}" if len(parts) > 1 else line for part in parts for line in part.shown][:SHOWN]
    head = f"{label}: {count:,} of {rows:,} rows {'is' if count == 1 else 'are'} invalid:"
    rest = [f"and {count - SHOWN:,} more"] if count > SHOWN else []
    message = "\n  ".join([head, *shown, *rest])
    if all("(a list)" in reason for reason in invalid):
        return ManifestError(message, "Say what becomes of a list with --reduce max, sum, first or count.")
    if count < rows:
        advice = next((part.advice for part in parts if part.advice and _most_are_missing(invalid)), None)
        return ManifestError(message, advice or "Fix them, or leave them out with --skip-invalid.")
    length, target = keys
    if target is not None and all("target" in reason for reason in invalid):
        hint = f"No row is valid. Is {shortened(target)} the column of the targets? See --target-key."
        return ManifestError(message, hint)
    if length is None:
        return ManifestError(message, "No row is valid: is that what it should be?")
    return ManifestError(message, f"No row is valid. Is {shortened(length)} the column? See --length-key.")


def _nothing_left_error(label: str, rows: int, left_out: Counter[str], broken: Sequence[Part]) -> ManifestError:
    reasons = [f"{reason}: {count:,}" for reason, count in left_out.items()]
    if broken:
        reasons.append(f"broken sources: {len(broken):,}")
    return ManifestError(
        f"{label}: none of its {rows:,} examples is left ({'; '.join(reasons)})",
        "Check --length-key, --length-scale, --min-length and --max-length.",
    )
