"""Raw rows → checked, scaled and filtered lengths, with everything counted that is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchtune.errors import ManifestError
from batchtune.lengths import FloatArray, Lengths
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.rows import Rows
from batchtune.manifests.scaling import Scaling
from batchtune.manifests.source import shortened
from batchtune.manifests.values import LARGEST, SMALLEST, fault, numbers

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns that are read."""

    length: str
    target: str | None


class Collector:
    """Takes the rows of a manifest, block by block, and keeps only numbers.

    Args:
        path: For messages.
        keys: For messages.
        scaling: What the lengths are multiplied with.
        options: The user's.
    """

    def __init__(self, path: Path, keys: Keys, scaling: Scaling, options: ReadOptions) -> None:
        self._path = path
        self._keys = keys
        self._scaling = scaling
        self._options = options
        self._lengths: list[FloatArray] = []
        self._targets: list[FloatArray] = []
        self._left_out: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._shown: list[str] = []
        self._rows = 0

    def add(self, rows: Rows) -> None:
        """Checks some rows and keeps the lengths of the valid ones."""
        self._rows += len(rows.lengths)
        self._left_out.update(rows.left_out)
        factor = self._scaling.factor
        with np.errstate(over="ignore"):  # what becomes infinite is invalid, and said to be
            lengths = numbers(rows.lengths) * float(factor.numerator) / float(factor.denominator)
        valid = (lengths >= SMALLEST) & (lengths <= LARGEST)
        for index in np.flatnonzero(~valid).tolist():
            self._refuse(rows, index, "length", self._keys.length, rows.lengths[index], lengths[index])
        if rows.targets is not None and self._keys.target is not None:
            targets = numbers(rows.targets)
            valid_targets = (targets >= 0) & (targets <= LARGEST)
            for index in np.flatnonzero(valid & ~valid_targets).tolist():
                key = self._keys.target
                self._refuse(rows, index, "target length", key, rows.targets[index], targets[index])
            valid &= valid_targets
            self._targets.append(targets[valid])
        self._lengths.append(lengths[valid])

    def finish(self, notes: tuple[str, ...]) -> Lengths:
        """All lengths, with these notes.

        Raises:
            ManifestError: There were no rows, or invalid ones that are not to be skipped, or none is left.
        """
        if self._rows == 0:
            raise ManifestError(f"{self._path} holds no examples", "Check that it was written to its end.")
        if self._invalid and not self._options.skip_invalid:
            raise self._invalid_error()
        self._left_out.update(self._invalid)
        lengths = np.concatenate(self._lengths)
        kept = self._filtered(lengths)
        if not kept.any():
            raise self._nothing_left_error()
        targets = np.concatenate(self._targets)[kept] if self._keys.target is not None else None
        left_out = dict(self._left_out)
        return Lengths.of(lengths[kept], targets, unit=self._scaling.unit, left_out=left_out, notes=notes)

    def _refuse(self, rows: Rows, index: int, what: str, key: str, value: object, scaled: float) -> None:
        reason = fault(value, scaled)
        self._invalid[f"invalid {what} ({reason})"] += 1
        if len(self._shown) < _SHOWN:
            said = "missing" if value is None else f"{shortened(value)} ({reason})"
            self._shown.append(f"{rows.place(index)}: {key!r} is {said}")

    def _filtered(self, lengths: FloatArray) -> npt.NDArray[np.bool_]:
        kept = np.ones(lengths.shape, dtype=np.bool_)
        shortest, longest = self._options.min_length, self._options.max_length
        if shortest is not None:
            self._drop(kept, lengths < shortest, f"shorter than --min-length {shortest:.15g}")
        if longest is not None:
            self._drop(kept, lengths > longest, f"longer than --max-length {longest:.15g}")
        return kept

    def _drop(self, kept: npt.NDArray[np.bool_], dropped: npt.NDArray[np.bool_], reason: str) -> None:
        if count := int(dropped.sum()):
            self._left_out[reason] += count
            kept &= ~dropped

    def _invalid_error(self) -> ManifestError:
        count = self._invalid.total()
        head = f"{self._path}: {count:,} of {self._rows:,} rows {'is' if count == 1 else 'are'} invalid:"
        rest = [f"and {count - _SHOWN:,} more"] if count > _SHOWN else []
        message = "\n  ".join([head, *self._shown, *rest])
        if count < self._rows:
            return ManifestError(message, "Mend them, or leave them out with --skip-invalid.")
        if all("(a list)" in reason for reason in self._invalid):
            return ManifestError(message, "A list of lengths is not supported: write one length for each example.")
        if all("target" in reason for reason in self._invalid):
            hint = f"No row is valid. Is {self._keys.target!r} the column of the targets? See --target-key."
            return ManifestError(message, hint)
        return ManifestError(message, f"No row is valid. Is {self._keys.length!r} the column? See --length-key.")

    def _nothing_left_error(self) -> ManifestError:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in self._left_out.items())
        return ManifestError(
            f"{self._path}: none of its {self._rows:,} examples is left ({reasons})",
            "Check --length-key, --length-scale, --min-length and --max-length.",
        )
