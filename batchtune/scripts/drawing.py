"""Draws batches of any shape from the examples of a training script's data set, through its own collate function.

A padded batch is as long as its longest example, and its targets as long as its longest target. So the longest example
many times, with one that has the target and padding, *is* the batch of that shape. Nothing of it is inferred: masks,
offsets and tokens come from the script's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from batchtune.errors import WorkloadError
from batchtune.lengths import FloatArray, IntArray, RowLength, Unit, spaced
from batchtune.manifests.formats import INPUTS
from batchtune.results import BatchShape
from batchtune.scripts.relations import (
    LeafAxis,
    Relation,
    Scale,
    Seen,
    Terms,
    Unclear,
    first_fit,
    fitted,
    scale_by_rows,
)
from batchtune.scripts.trees import (
    batches_of,
    flatten,
    is_offsets,
    leaves_of,
    measured,
    measures,
    packed_row,
    rebuilt,
    sizes,
)

# Finds what the sizes and values in a training script's examples or batches follow.

Leaves = dict[str, list[Any]]
Relations = dict[LeafAxis, Relation]

NAME_THEM = (
    "Name the leaf that has the length with --length-key, and the target's with "
    "--target-key, or write the training step as a workload: --workload FILE.py:NAME."
)


# The names of the leaves that have the length and the target, from the user; a name of no leaf is ignored.
LengthKeys = tuple[str | None, str | None]


def followed_sizes(
    leaves: Leaves, terms: Terms, noun: str, keys: LengthKeys | None = None
) -> tuple[Terms, Relations]:
    """Return all terms, and how every size that varies follows them.

    With `keys`, sizes that follow no term become terms: first the length L, then, if another is left, the target T.

    Raises:
        Unclear: A size follows no term, or none follows a length.
    """
    seen = measured(leaves)
    relations: Relations = {}
    left: Seen = {}
    for place, values in seen.items():
        if place[1] == "value":
            continue
        relation = first_fit(terms, values)
        if relation is not None:
            relations[place] = relation
        elif np.ptp(values) > 0 and not _is_text(leaves[place[0]][0]):
            left[place] = values
    if keys is not None:
        _check_named(keys[0], seen, relations, noun)
        terms = dict(terms)
        _found(terms, "L", relations, left, keys)
        _found(terms, "T", relations, left, keys[::-1])
    if left:
        raise Unclear(
            f"in the script's {noun}, {ranges(left)} follows neither the batch size nor another length",
            NAME_THEM,
        )
    if "T" in terms and fitted("T", terms["T"], terms["L"]) is not None:
        raise Unclear(
            f"the length that was named follows a finer size of the script's {noun}",
            "Name the finer one with --length-key.",
        )
    if not any("L" in relation.term for relation in relations.values()):
        raise Unclear(
            f"no size of the script's {noun} follows a length: there may be nothing to tune",
            NAME_THEM,
        )
    return terms, relations


def followed(
    leaves: Leaves, terms: Terms, noun: str, keys: LengthKeys | None = None
) -> tuple[Terms, Relations]:
    """Return what `followed_sizes` does, and how numbers follow the terms that stand alone, or one for each row.

    Raises:
        Unclear: As `followed_sizes` does; or it is ambiguous how a number follows a term.
    """
    terms, relations = followed_sizes(leaves, terms, noun, keys)
    for place, values in measured(leaves).items():
        shape = sizes(leaves[place[0]][0])
        is_row = len(shape) == 1 and has_rows(place[0], relations)
        if place[1] == "value" and (shape in ((), (1,)) or is_row):
            relation = first_fit(terms, values)
            # Few numbers that hardly grow, such as the largest of some tokens, fit 1/475·L+7 by accident.
            if relation is not None and (relation.ratio >= 1 or relation.offset <= 2):
                relations[place] = relation
    for place, relation in relations.items():
        if not relation.sure:
            raise Unclear(
                f"the script's {noun} don't tell whether {place[0]} follows {relation}",
                NAME_THEM,
            )
    return terms, relations


def _check_named(key: str | None, seen: Seen, relations: Relations, noun: str) -> None:
    """Raise Unclear if the leaf that should have the length has the same sizes in all."""
    named = {
        place: values
        for place, values in seen.items()
        if place[1] != "value" and _names(key, place[0]) and values.max() > 1
    }
    named = {place: named[place] for place in named.keys() - relations.keys()}
    if named and not any(map(np.ptp, named.values())):
        raise Unclear(
            f"--length-key {key} names a part of the script's {noun} whose length never varies: {ranges(named)}",
            "Name another, or leave it out.",
        )


def _found(
    terms: Terms,
    term: str,
    relations: Relations,
    left: Seen,
    keys: LengthKeys,
) -> None:
    """Make the size that the first key names, or the longest, a term, and take what follows it from those left."""

    def rank(place: LeafAxis) -> tuple[int, bool, float]:
        path = place[0]
        is_input = path.rpartition(".")[2] in INPUTS
        named = _names(keys[0], path) - _names(keys[1], path)
        return named, is_input, left[place].mean()

    # Without a batch axis it may be a total over the batch, such as the nodes of graphs.
    single = [
        place for place in left if "B" not in terms or has_rows(place[0], relations)
    ]
    if not single:
        return
    terms[term] = left[max(single, key=rank)]
    for place, values in list(left.items()):
        relation = fitted(term, terms[term], values)
        if relation is not None:
            relations[place] = relation
            del left[place]


def _names(key: str | None, path: str) -> bool:
    return key is not None and f"{path}.".startswith(f"{key}.")


def _is_text(leaf: Any) -> bool:
    """Return whether a leaf is a list of texts: the words of a transcript are no length that a model sees."""
    return isinstance(leaf, (list, tuple)) and any(isinstance(x, str) for x in leaf)


def has_rows(path: str, relations: Mapping[LeafAxis, Relation]) -> bool:
    """Return whether the first axis of a leaf is the batch size."""
    return relations.get((path, 0)) == Relation("B")


def ranges(seen: Seen) -> str:
    """Describe sizes for a message: `sig axis 0 from 8,000 to 48,000`."""
    return "; ".join(
        f"{path} axis {key} from {values.min():,.0f} to {values.max():,.0f}"
        for (path, key), values in seen.items()
        if key != "value"
    )


Collate = Callable[[list[Any]], Any]

# The example that shows padding is at most this part of the longest one, if there is one.
_SHORTER = 0.9


# Sizes that are padded, each by itself, add up to a little more than those of a batch.
_ADDED_UP = 0.75


class Drawn:
    """Draws batches, as the script's DataLoader would deliver them; its examples are known by the rows of a manifest.

    Attributes:
        lines: What the batches are made of, such as `sig: [B, L] float32`.
        packed: Whether they are rows of sequences without padding.
        indices: Which examples were measured.
        lengths, targets: Their sizes, each in a batch of its own; no targets without a second size that varies.
        scale, target_scale: How these follow the manifest's lengths; no scale of targets if it has none.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        length_key: str | None = None,
        target_key: str | None = None,
        every: int = 1,
    ) -> None:
        """Measure about 200 examples, or every nth; a key names a leaf, or is ignored.

        Raises:
            Unclear: No size, or more than two, vary; or `collate` fails.
        """
        self._dataset = dataset
        self._collate = collate
        self.indices = spaced(len(dataset))[::every]
        sequences = []
        alone = []
        for index in self.indices:
            example = dataset[index]
            sequences.append(_sequences_in(example))
            alone.append(collated(collate, [example]))
        _check_unpacked(sequences)
        # With a pair, lists of one item for each example are seen as such.
        pair = collated(collate, [dataset[index] for index in self.indices[:2]])
        together = flatten([*alone, pair])
        measured = {path: group[:-1] for path, group in together.items()}
        batches = list(batches_of(measured))
        leaves = {
            path: group
            for path, group in measured.items()
            # The padding of a packed batch may be sequences of its own.
            if not all(is_offsets(path, batch) for batch in batches)
        }
        terms, relations = followed_sizes(
            leaves, {}, "collated batches", (length_key, target_key)
        )
        self.lengths: list[int] = terms["L"].astype(int).tolist()
        self.targets: list[int] | None = None
        if "T" in terms:
            self.targets = terms["T"].astype(int).tolist()
        self._places = {
            relation.term: place
            for place, relation in reversed(relations.items())
            if relation == Relation(relation.term)
        }
        longest = int(np.argmax(terms["L"]))
        shortest = int(np.argmin(terms["L"]))
        four = [dataset[self.indices[i]] for i in (longest, shortest, longest, longest)]
        self._seen = flatten([alone[shortest], collated(collate, four)])
        self._ways = {
            term: _way(_pair(self._seen, place)[1], terms[term][[longest, shortest]])
            for term, place in self._places.items()
        }
        self.packed = self._ways["L"] == "Σ" and self.targets is None
        # As graphs: their nodes and their edges.
        self._adds_up = self._ways["L"] == "Σ" and not self.packed
        self.scale = Scale(1.0)
        self.target_scale: Scale | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """Return a line for each leaf: its shape, and its type."""
        names: dict[tuple[float, float], str] = {(1, 4): "B"}
        for term, place in self._places.items():
            names.setdefault(_pair(self._seen, place), self._ways[term] + term)
        lines = []
        for path, (leaf, _) in self._seen.items():
            kind = str(getattr(leaf, "dtype", type(leaf).__name__))
            words = []
            for key in [key for key in measures(leaf) if key != "value"]:
                pair = _pair(self._seen, (path, key))
                word = f"{pair[0]:.0f}" if pair[0] == pair[1] else "…"
                words.append(names.get(pair, word))
            shape = ", ".join(words)
            lines.append(f"{path or 'batch'}: [{shape}] {kind.removeprefix('torch.')}")
        return tuple(lines)

    @property
    def unit(self) -> Unit:
        """The unit of the lengths as far as their leaf tells: whole numbers are tokens."""
        leaf = self._seen[self._places["L"][0]][0]
        is_whole = "int" in str(getattr(leaf, "dtype", ""))
        return "tokens" if is_whole else "frames"

    def size(self, index: int) -> tuple[float, float]:
        """Return the sizes of an example along the length and the target, 0 without one."""
        batch = collated(self._collate, [self._dataset[index]])
        found = {"T": 0.0}
        for term, (path, key) in self._places.items():
            found[term] = measures(leaves_of(batch, {path})[path])[key]
        return found["L"], found["T"]

    def follows(
        self, rows: Sequence[RowLength], digit: float, options: Mapping[str, Any]
    ) -> bool:
        """Draw by these rows of a manifest from now on; return whether they are the data set's examples, in its order.

        `digit` is what the manifest's lengths are rounded to.

        Raises:
            WorkloadError: The manifest has targets, but the batches have no second length.
            Unclear: --per-unit is wrong.
        """
        by_number = {row.number: row for row in rows}
        if not by_number.keys() >= set(self.indices):
            return False
        known = [by_number[index] for index in self.indices]
        lengths = [row.length for row in known]
        scale = scale_by_rows(self.lengths, lengths, digit, options.get("per_unit"))
        if scale is None and self.targets is not None:
            # The manifest may hold the other one of two lengths.
            self.lengths, self.targets = self.targets, self.lengths
            self._places = {"L": self._places["T"], "T": self._places["L"]}
            self._ways = {"L": self._ways["T"], "T": self._ways["L"]}
            scale = scale_by_rows(self.lengths, lengths, digit, options.get("per_unit"))
        if scale is None:
            return False
        self.scale = scale
        self._has_all = len(rows) == len(self._dataset)
        self._numbers = np.array([row.number for row in rows])
        self._lengths = np.array([row.length for row in rows])
        self._targets = np.zeros(len(rows))
        if known[0].target is not None:
            if self.targets is None:
                raise WorkloadError(*NO_TARGETS)
            given = [row.target or 0.0 for row in known]
            per_unit = options.get("target_per_unit")
            self.target_scale = scale_by_rows(self.targets, given, digit, per_unit)
            if self.target_scale is None:
                return False
            self._targets = np.array([row.target or 0.0 for row in rows])
        elif self.targets is not None:
            measured = dict(zip(self.indices, self.targets, strict=True))
            self._targets = np.array(
                [float(measured.get(row.number, 0)) for row in rows]
            )
        return True

    def make(self, shape: BatchShape) -> Any:
        """Return a batch of this shape, in the manifest's units.

        Without a target length, the targets are as long as those of measured examples up to the
        batch's length.
        """
        if shape.sequences is None:
            return self._batch(self._padded(np.arange(self._numbers.size), shape))
        nearest = {length: self._nearest(length) for length in set(shape.sequences)}
        return self._batch([nearest[length] for length in shape.sequences])

    def twins(self, batch_size: int) -> Iterator[tuple[BatchShape, Any, Any]]:
        """Yield shapes of batches of random examples, each with that batch and one that is drawn.

        The drawn one has the longest of these examples, and that with the longest target. Batches
        that are not padded have no twins: nothing stands in for another example.
        """
        random = np.random.default_rng(0)
        measured = np.flatnonzero(np.isin(self._numbers, list(self.indices)))
        while not (self._adds_up or self.packed):
            among = random.choice(
                measured, min(batch_size, measured.size), replace=False
            )
            own = self._batch(among.tolist())
            target = None
            if self.targets is not None:
                target = float(self._targets[among].max())
            longest = float(self._lengths[among].max())
            shape = BatchShape(among.size, longest, target)
            yield shape, own, self._batch(self._padded(among, shape))

    def random(self, count: int) -> tuple[IntArray, FloatArray]:
        """Return the positions of random examples, and their lengths; the same ones each time."""
        random = np.random.default_rng(0)
        positions = random.choice(
            self._numbers.size, count, replace=count > self._numbers.size
        )
        return positions, self._lengths[positions]

    def example(self, position: int) -> Any:
        """Return the data set's example at a position."""
        return self._dataset[int(self._numbers[position])]

    def collated(self, examples: Sequence[Any]) -> Any:
        """Return the batch of these examples. Raises Unclear if the collate function fails."""
        return collated(self._collate, examples)

    def _batch(self, positions: Sequence[int]) -> Any:
        """Return the batch of the examples at these positions; each is read once."""
        examples = {position: self.example(position) for position in set(positions)}
        return self.collated([examples[position] for position in positions])

    def _nearest(self, length: float) -> int:
        """Return the position of the shortest example that is as long, or else of the longest."""
        beyond = self._lengths - length
        return int(np.argmin(np.where(beyond >= 0, beyond, np.inf)))

    def _padded(self, among: IntArray, shape: BatchShape) -> list[int]:
        """Return the positions of the examples of a padded batch, all among these."""
        lengths = self._lengths[among]
        targets = self._targets[among]
        within = lengths <= shape.length
        target = shape.target_length
        if target is None:
            target = float(targets[within].max(initial=0.0))
        too_much = targets > target

        def first_of(*keys: Any) -> int:
            return int(among[np.lexsort(keys[::-1])[0]])

        # A multiple to which lengths are padded stands for shorter ones; of very many rows, others are known.
        barred = ~within if self._has_all else lengths < shape.length
        away = np.abs(lengths - shape.length)
        longest = first_of(too_much, barred, away, -targets)
        with_target = first_of(~within, too_much, -targets, lengths)
        shorter = first_of(lengths > _SHORTER * shape.length, too_much, -lengths)
        positions = [longest] * shape.batch_size
        missing = target - self._targets[longest]
        if self._adds_up:
            # Enough of those with the target that all targets are as many; the lengths are more.
            more = int(np.ceil(shape.batch_size * missing / max(target, 1.0)))
            return positions + [with_target] * more
        if missing > 0 and shape.batch_size > 1:
            positions[-1] = with_target
        is_padded = self._lengths[positions[-1]] < self._lengths[longest]
        if not is_padded and self._lengths[shorter] <= _SHORTER * shape.length:
            # In a batch of two, the target matters more than the padding.
            if shape.batch_size > 2 or (missing <= 0 and shape.batch_size > 1):
                positions[0] = shorter
        return positions


NO_TARGETS = (
    "the manifest has target lengths, but the script's batches have no second length",
    "Leave out --target-key, or name the part of a batch that holds the targets with it.",
)


def _pair(seen: Leaves, place: LeafAxis) -> tuple[float, float]:
    """Return a size in the batch of the shortest example, and in that of it and three of the longest."""
    path, key = place
    shortest, mixed = (measures(leaf)[key] for leaf in seen[path])
    return shortest, mixed


def _way(mixed: float, alone: FloatArray) -> str:
    """Return how a batch grows with four examples: padded "", padded and flat "B·", or added up "Σ".

    `alone` are the sizes of the longest, which is there three times, and of the shortest. Raises Unclear if they don't
    add up.
    """
    padded = alone.max()
    if mixed == padded:
        return ""
    if mixed == 4 * padded:
        return "B·"
    total = 3 * alone[0] + alone[1]
    if mixed < _ADDED_UP * total:
        raise Unclear(
            f"its collate function makes {mixed:g} rows of examples that make {total:g} one by one: it fills rows of a "
            "fixed length, which don't show how long the examples are",
            "Let it put the sequences of a batch into one row, without padding, as transformers' "
            "DataCollatorWithFlattening does.",
        )
    return "Σ"


def _sequences_in(example: Any) -> int:
    """Return how many sequences an example shows that it is made of; 0 if it shows none."""
    leaves = leaves_of(example)
    row = leaves.get("seq_lengths", packed_row(leaves))  # as TRL writes them
    return 0 if row is None else len(row)


def _check_unpacked(sequences: Sequence[int]) -> None:
    """Raise Unclear if the data set has packed its examples: each is a row of sequences already."""
    if min(sequences) > 0 and max(sequences) > 1:
        raise Unclear(
            f"the examples of the script's data set are packed already, up to {max(sequences)} sequences in one",
            "Let the script pack when it makes batches, from a data set of single sequences: with TRL "
            "packing=False and padding_free=True, otherwise with transformers' DataCollatorWithFlattening.",
        )


def collated(collate: Collate, examples: Sequence[Any]) -> Any:
    """Return a batch of copies: collate functions may change dicts and lists. Raises Unclear if the function fails."""
    try:
        return collate([rebuilt(example, {}) for example in examples])
    except Exception as error:
        raise Unclear(
            f"the script's collate function fails: {type(error).__name__}: {error}",
            NAME_THEM,
        ) from error
