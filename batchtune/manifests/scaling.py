"""What the lengths count in the end, and by how much they are multiplied to get there."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from batchtune.errors import ManifestError
from batchtune.lengths import Unit

_CONVERSIONS: dict[tuple[Unit, Unit], Fraction] = {
    ("ms", "s"): Fraction(1, 1000),
    ("s", "ms"): Fraction(1000),
}
_SAMPLE_RATES = range(4000, 192_001)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The unit in the end, the factor, and what to tell the user about them."""

    unit: Unit | None
    factor: Fraction
    notes: tuple[str, ...] = ()


def scaling_for(path: Path, source: Unit | None, unit: Unit | None, scale: Fraction | None) -> Scaling:
    """Decides the unit of the lengths.

    A unit that the user gives wins; s and ms are converted into each other; a scale without a unit gives one
    only where there is no doubt.

    Args:
        path: For messages.
        source: What the lengths count in the file, or None where nothing says it.
        unit: What the user says that they count after scaling, or None.
        scale: The user's factor, or None.

    Raises:
        ManifestError: The file is in one unit, the user wants another, and no scale says how.
    """
    if scale is not None:
        return _scaled(source, unit, scale)
    if unit is not None and source is not None and unit != source:
        return _converted(path, source, unit)
    if unit is None and source is None:
        note = "Nothing says what the lengths count; give --unit, so that results and configs can say it."
        return Scaling(None, Fraction(1), (note,))
    return Scaling(unit or source, Fraction(1))


def _scaled(source: Unit | None, unit: Unit | None, scale: Fraction) -> Scaling:
    found = unit or _unit_after(source, scale)
    if found is not None:
        return Scaling(found, scale)
    before = f"{source} * {scale}" if source else f"the file's values * {scale}"
    return Scaling(None, scale, (f"Nothing says what the lengths count now ({before}); give --unit.",))


def _unit_after(source: Unit | None, scale: Fraction) -> Unit | None:
    if scale == 1:
        return source
    if source == "samples" and scale.numerator == 1 and scale.denominator in _SAMPLE_RATES:
        return "s"
    return next(
        (after for (before, after), factor in _CONVERSIONS.items() if before == source and factor == scale),
        None,
    )


def _converted(path: Path, source: Unit, unit: Unit) -> Scaling:
    factor = _CONVERSIONS.get((source, unit))
    if factor is not None:
        return Scaling(unit, factor, (f"Lengths are converted from {source} to {unit}.",))
    example = "1/16000 for 16 kHz audio" if (source, unit) == ("samples", "s") else "a number or a fraction"
    raise ManifestError(
        f"{path} has its lengths in {source}, and --unit asks for {unit}",
        f"Say how many {unit} one of the {source} is with --length-scale ({example}), or leave --unit out.",
    )
