"""Finds how sizes and values follow the axes of a batch, from pairs that were seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchtune.errors import WorkloadError

# A leaf's path, and what of it is measured: the size of an axis, its largest `value`, its longest item (`inner`).
Place = tuple[str, int | str]
# One number for each example or batch.
Numbers = npt.NDArray[np.float64]
Seen = dict[Place, Numbers]
Terms = dict[str, Numbers]

NAME_THEM = (
    "Name the leaf that has the length with --length-key, and the target's with "
    "--target-key, or write the training step as a workload: --workload FILE.py:NAME."
)

# What would fit this rarely without being related is taken for related.
_CHANCE = 1e-4
# From so many examples even a ratio or a rounding that is not plain is known well enough.
_MANY = 30
# Values that are not whole may be rounded: durations to 0.01 s.
_ROUNDED = 0.005


class Unclear(WorkloadError):
    """What a training script's examples or batches don't tell: the message shows what was seen, the hint what helps."""


@dataclass(frozen=True)
class Axes:
    """A batch's shape in units of its own axes, such as samples or tokens, not in the manifest's unit."""

    batch_size: int
    length: int
    target_length: int | None = None

    def terms(self) -> dict[str, int]:
        """Return what sizes can follow: an axis, or the total over a batch that is packed without padding."""
        terms = {
            "B": self.batch_size,
            "L": self.length,
            "B·L": self.batch_size * self.length,
        }
        if self.target_length is not None:
            terms["T"] = self.target_length
            terms["B·T"] = self.batch_size * self.target_length
        return terms


@dataclass(frozen=True)
class Relation:
    """How a size or value follows a term: step·⌊ratio·term + offset⌋, or ratio·term if it is not whole.

    A relation is `sure` unless unrelated numbers may have fitted it, or another rounding would have fitted too.
    """

    term: str
    ratio: float = 1.0
    offset: float = 0.0
    step: int = 1
    whole: bool = True
    sure: bool = True

    def at(self, axes: Axes) -> float:
        """Return the size or value in a batch of this shape."""
        value = self.ratio * axes.terms()[self.term] + self.offset
        return self.step * math.floor(value + 1e-6) if self.whole else value

    def term_of(self, seen: float) -> int:
        """Return the largest term that has this size or value."""
        if not self.whole:
            return round(seen / self.ratio)
        beyond = (seen / self.step + 1 - self.offset) / self.ratio
        return math.ceil(beyond - 1e-6) - 1

    def __str__(self) -> str:
        if self.step > 1 and self.step * self.ratio == 1:
            return f"{self.term} to a multiple of {self.step}"
        ratio = self.step * self.ratio
        if ratio == 1:
            word = self.term
        elif ratio < 1:
            word = f"1/{1 / ratio:g}·{self.term}"
        else:
            word = f"{ratio:g}·{self.term}"
        offset = math.trunc(self.step * self.offset)
        return f"{word}{offset:+}" if offset else word


def fitted(term: str, base: Numbers, seen: Numbers) -> Relation | None:
    """Return the relation that all seen sizes or values follow, plain ratios first; None if they follow none.

    `base` is the term in each of the batches or examples, `seen` the size or value there.
    """
    if np.ptp(base) == 0 or np.ptp(seen) == 0:
        return None
    if (seen == base).all():
        return Relation(term)
    if (seen != np.round(seen)).any():
        return _proportional(term, base, seen)
    # A few sizes may all be even by chance, so whether they are multiples matters only if they don't fit as they are.
    for step in (1, int(np.gcd.reduce(seen.astype(np.int64)))):
        scaled = seen / step
        through_zero = float(base @ scaled / (base @ base))
        slope = float(np.polyfit(base, scaled, 1)[0])
        plain = (1 / step, _plain(through_zero), _plain(slope))
        for ratio in (*plain, slope):
            found = _with_ratio(term, ratio, step, base, scaled)
            if found is not None and slope > 0:
                sure = found.sure and (ratio in plain or len(base) >= _MANY)
                return replace(found, sure=sure)
    return None


def _plain(slope: float) -> float:
    return round(slope) if slope >= 1 else 1 / round(1 / max(slope, 1e-9))


def _with_ratio(
    term: str,
    ratio: float,
    step: int,
    base: Numbers,
    scaled: Numbers,
) -> Relation | None:
    """Return the relation with this ratio if one offset explains every number."""
    rest = np.round(scaled - ratio * base, 9)
    lowest = float(rest.max())
    beyond = float(rest.min()) + 1
    if lowest >= beyond:
        return None
    sure = _chance(1 / (np.ptp(scaled) + 1), len(base))
    if lowest + 1 == beyond:
        return Relation(term, ratio, lowest, step, sure=sure)
    # Rounded up, rounded down, and one for each stride begun, as in a spectrogram.
    offsets = [one for one in (1 - ratio, 0, 1) if lowest <= one + 1e-8 < beyond]
    if step * ratio == 1:  # padded to a multiple
        offsets = offsets[:1]
    if len(offsets) != 1:
        sure = sure and len(base) >= _MANY
    return Relation(
        term, ratio, (offsets or [(lowest + beyond) / 2])[0], step, sure=sure
    )


def _proportional(term: str, base: Numbers, seen: Numbers) -> Relation | None:
    ratio = float(base @ seen / (base @ base))
    if np.abs(ratio * base - seen).max() > _ROUNDED * np.abs(seen).max() or ratio <= 0:
        return None
    spread = np.ptp(seen) / np.abs(seen).max()
    sure = _chance(2 * _ROUNDED / spread, len(base))
    for digits in range(1, 6):
        per_unit = float(f"{1 / ratio:.{digits}g}")
        if abs(per_unit * ratio - 1) < 1e-4:
            ratio = 1 / per_unit
            break
    return Relation(term, ratio, whole=False, sure=sure)


def _chance(share: float, count: int) -> bool:
    """Return whether `count` unrelated numbers hardly ever fit a line that each meets with this probability."""
    return min(1.0, share) ** (count - 2) < _CHANCE


def fitted_backwards(term: str, base: Numbers, seen: Numbers) -> Relation | None:
    """Return the relation of sizes that are finer than the term, such as samples to the frames made of them."""
    back = fitted(term, seen, base)
    if back is None or back.step > 1 or back.ratio >= 1:
        return None
    offset = (1 - back.offset) / back.ratio - 1
    return Relation(term, 1 / back.ratio, offset, sure=back.sure)


def first_fit(terms: Terms, seen: Numbers) -> Relation | None:
    """Return the relation to the first term that explains what was seen; None without one."""
    for term, base in terms.items():
        found = fitted(term, base, seen) or fitted_backwards(term, base, seen)
        if found is not None:
            return found
    return None


def told_apart(
    varying: Seen, length_key: str | None, target_key: str | None, noun: str
) -> tuple[Terms, dict[Place, Relation]]:
    """Return the length and, with a second independent size, the target; and how every size follows them.

    Of two independent sizes the one that is longer on average is the length, unless a key names another.

    Raises:
        Unclear: No size varies, or a third one does; or the target that `target_key` names follows the length.
    """
    if not varying:
        raise Unclear(f"no size of the script's {noun} follows a length", NAME_THEM)
    terms: Terms = {}
    relations: dict[Place, Relation] = {}
    left = dict(varying)
    for term, key, other in (
        ("L", length_key, target_key),
        ("T", target_key, length_key),
    ):
        if left:
            founder = min(left, key=lambda place: _rank(place, key, other, left))
            terms[term] = left[founder]
            followers = _followers(term, left[founder], left)
            relations |= followers
            left = {place: left[place] for place in left if place not in followers}
    if left:
        raise Unclear(
            f"more than two sizes of the script's {noun} vary on their own: {_ranges(varying)}",
            NAME_THEM,
        )
    for place, relation in relations.items():
        if not relation.sure:
            raise Unclear(
                f"{len(terms['L'])} {noun} don't tell whether {place[0]} follows {relation}: {_ranges(varying)}",
                NAME_THEM,
            )
        if relation.term == "L" and _names(target_key, place):
            raise Unclear(
                f"the target {place[0]} follows the length exactly in all {len(terms['L'])} {noun}",
                "Leave out --target-key: the length alone gives the shape.",
            )
    return terms, relations


def _names(key: str | None, place: Place) -> bool:
    return key is not None and (place[0] == key or place[0].startswith(f"{key}."))


def _rank(
    place: Place, key: str | None, other: str | None, left: Seen
) -> tuple[bool, bool, float]:
    """Sort first what the key names, last what the other names, and between them what is longest."""
    return not _names(key, place), _names(other, place), -float(left[place].mean())


def _followers(term: str, base: Numbers, left: Seen) -> dict[Place, Relation]:
    followers = {}
    for place, seen in left.items():
        found = first_fit({term: base}, seen)
        if found is not None:
            followers[place] = found
    return followers


def _ranges(varying: Seen) -> str:
    """Describe sizes for a message: `sig axis 0 from 8,000 to 48,000`."""
    return "; ".join(
        f"{path} axis {key} from {seen.min():,.0f} to {seen.max():,.0f}"
        for (path, key), seen in varying.items()
    )
