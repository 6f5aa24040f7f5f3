"""Draws batches of any shape from the examples of a training script's data set, through its own collate function.

A padded batch is as long as its longest example, and has the target of the one with the longest target. So the longest
one many times, with one that has the target and padding, *is* the batch of that shape: masks, offsets, and whatever
else depends on padding come from the script's own code. An example that the data set lacks is another one, cropped or
repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchtune.lengths import FloatArray, IntArray, Unit, spaced
from batchtune.scripts.collated import followed_collated, groups_of
from batchtune.scripts.following import (
    NAME_THEM,
    Keys,
    Leaves,
    Relations,
    followed,
    followed_sizes,
)
from batchtune.scripts.learning import Template, longest_of, shown
from batchtune.scripts.packed_rows import batches_of, packed_row
from batchtune.scripts.relations import Axes, Place, Relation, Terms, Unclear
from batchtune.scripts.trees import flatten, measures, rebuilt, sizes

Collate = Callable[[list[Any]], Any]

# Of a data set without indices, to learn from.
_EXAMPLES = 200
# An example with padding has at most this share of the longest length, if there is one.
_SHORTER = 0.9
# An example that is longer than asked for by less stands for it.
_NEAR = 1.02


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples by their sizes: which they are in the data set, and how long; arrays of shape (examples,)."""

    indices: IntArray
    lengths: FloatArray
    targets: FloatArray | None

    @classmethod
    def of(
        cls,
        indices: Sequence[int],
        lengths: Sequence[float],
        targets: Sequence[float] | None,
    ) -> Pool:
        """Return these examples as arrays."""
        target_sizes = None
        if targets is not None:
            target_sizes = np.asarray(targets, np.float64)
        return cls(
            np.asarray(indices, np.int64),
            np.asarray(lengths, np.float64),
            target_sizes,
        )

    def within(self, length: float, target: float | None) -> IntArray:
        """Return the positions of the examples whose length and target are at most as long."""
        fits = self.lengths <= length
        if target is not None and self.targets is not None:
            fits &= self.targets <= target
        return np.flatnonzero(fits)

    def longest_of(self, positions: IntArray) -> int:
        """Return the position of the longest example among these, of equal ones that with the longest target."""
        keys = [self.lengths[positions]]
        if self.targets is not None:
            keys.insert(0, self.targets[positions])
        return int(positions[np.lexsort(keys)[-1]])

    def nearest(self, length: float, target: float | None) -> int | None:
        """Return the position of the shortest example that is as long, with at most this target; None without one."""
        fits = self.within(np.inf, target)
        longer = fits[self.lengths[fits] >= length]
        if not longer.size:
            return None
        same = longer[self.lengths[longer] == self.lengths[longer].min()]
        return self.longest_of(same)

    def with_target(self, length: float, target: float) -> int | None:
        """Return the position of the example with the longest target within both; None without one."""
        fits = self.within(length, target)
        if self.targets is None or not fits.size:
            return None
        return int(fits[np.argmax(self.targets[fits])])


class Drawn:
    """Draws batches of any shape, as the script's DataLoader would deliver them.

    Attributes:
        lines: What the batches are made of, such as `sig: [B, L] float32`.
        packed: Whether they are rows of sequences without padding.
        indices: Which examples were measured; None in a stream, which can't be asked for one.
        lengths, targets: Their sizes, in the script's units; no targets without a second length.
        places: The leaves that have these sizes, by `L` and `T`.
    """

    def __init__(
        self,
        lines: tuple[str, ...],
        packed: bool,
        terms: Terms,
        template: Template | None,
        places: Mapping[str, Place],
        *,
        totals: set[str],
        is_even: bool,
        indices: Sequence[int] | None,
        dataset: Any,
        collate: Collate,
    ) -> None:
        self.lines = lines
        self.packed = packed
        self.indices = indices
        self.lengths = tuple(terms["L"].astype(int).tolist())
        self.targets: tuple[int, ...] | None = None
        if "T" in terms:
            self.targets = tuple(terms["T"].astype(int).tolist())
        self._template = template
        self.places = places
        self._totals = totals
        # No padding makes their examples equally long.
        self._is_even = is_even or bool(totals)
        self._dataset = dataset
        self._collate = collate
        self._measured = Pool.of([], [], None)
        if indices is not None:
            self._measured = Pool.of(indices, self.lengths, self.targets)
        self._pool = self._measured

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        collate: Collate,
        *,
        length_key: str | None = None,
        target_key: str | None = None,
        every: int = 1,
    ) -> Drawn:
        """Measure about 200 examples, or every so many of them, and learn what the collate function makes of them.

        `length_key` and `target_key` name leaves; a key that names none is ignored.

        Raises:
            Unclear: No axis, or more than two, vary; the batch does not show them; or `collate` fails.
        """
        keys = (length_key, target_key)
        count = count_of(dataset)
        indices: range | None = None
        if count is None:
            examples = list(itertools.islice(iter(dataset), _EXAMPLES))
        else:
            indices = spaced(count)[::every]
            examples = [dataset[index] for index in indices]
        leaves = flatten(examples)
        _check_unpacked(leaves)
        groups = groups_of(len(examples))
        batches = flatten(
            [_collated(collate, [examples[i] for i in group]) for group in groups]
        )
        template: Template | None = None
        try:
            terms, of_examples = followed(leaves, {}, "examples", keys)
            relations, packed = followed_collated(batches, groups, terms)
            template = Template(examples[longest_of(terms)], of_examples)
        except Unclear as unclear:
            # Only collating may tell how long they are, as where it makes tokens of texts.
            terms, of_examples = _collated_terms(examples, collate, keys, unclear)
            relations, packed = followed_collated(batches, groups, terms)
        places = {
            relation.term: place
            for place, relation in reversed(of_examples.items())
            if relation == Relation(relation.term)
        }
        return cls(
            shown(batches, relations),
            packed,
            terms,
            template,
            places,
            totals={relation.term for relation in relations.values()} & {"ΣL", "ΣT"},
            is_even=any(key == "inner" for _, key in relations),
            indices=indices,
            dataset=dataset,
            collate=collate,
        )

    @property
    def unit(self) -> Unit | None:
        """The unit of the lengths as far as the leaf tells that has them: whole numbers are tokens."""
        if self._template is None:
            return None
        path = self.places["L"][0]
        (leaf,) = flatten([self._template.tree], stops={path})[path]
        first = leaf[0] if isinstance(leaf, (list, tuple)) else leaf
        kind = str(getattr(first, "dtype", type(first).__name__))
        if "int" in kind:
            return "tokens"
        return "samples" if len(sizes(leaf)) == 1 else "frames"

    def use(self, pool: Pool) -> None:
        """Draw from these examples of the data set from now on, rather than from those that were measured."""
        self._pool = pool

    def make(self, axes: Axes) -> Any:
        """Return a batch of this shape; without a target, it is the longest of the measured examples within the length.

        Raises:
            Unclear: No example is as long, or the script's collate function fails.
        """
        return _collated(self._collate, self._examples(axes))

    def twins(self, loader: Any, _: Any) -> Iterator[tuple[Axes, Any, Any]]:
        """Yield batches of the loader's own: shapes, each with the batch and one that is drawn in its shape."""
        if self.indices is None:
            stream = iter(self._dataset)
            while examples := list(itertools.islice(stream, loader.batch_size)):
                yield self._twin(examples)
            return
        for indices in loader.batch_sampler:
            yield self._twin([self._dataset[index] for index in indices])

    def _twin(self, examples: list[Any]) -> tuple[Axes, Any, Any]:
        lengths, targets = np.array([self.sizes(example) for example in examples]).T
        own = _collated(self._collate, examples)
        if self.packed:
            axes = Axes.packed(lengths.astype(int).tolist())
            return axes, own, self.make(axes)
        axes = Axes(len(examples), self._size_of_batch(lengths, "ΣL"))
        if self.targets is not None:
            target = self._size_of_batch(targets, "ΣT")
            axes = replace(axes, target_length=target)
        if self._pool is self._measured or self._totals:
            return axes, own, self.make(axes)
        # Of its own examples: only these are surely as long.
        if self.targets is None:
            targets = None
        pool = Pool(np.arange(len(examples)), lengths, targets)
        drawn = self._padded(axes, pool, examples.__getitem__)
        return axes, own, _collated(self._collate, drawn)

    def _size_of_batch(self, sizes: FloatArray, total: str) -> int:
        """Return the size of a batch's examples: the largest, or of those that add up the mean."""
        if total in self._totals:
            return math.ceil(float(sizes.mean()))
        return int(sizes.max())

    def sizes(self, example: Any) -> tuple[float, float]:
        """Return the sizes of an example along the length and the target, 0 without one."""
        if self._template is None:
            example = _collated(self._collate, [example])
        found = [0.0, 0.0]
        for number, term in enumerate("LT"):
            if term in self.places:
                path, key = self.places[term]
                (leaf,) = flatten([example], stops={path})[path]
                found[number] = measures(leaf)[key]
        return found[0], found[1]

    def _examples(self, axes: Axes) -> list[Any]:
        """Return the examples of a batch."""
        if axes.sequences is not None:
            examples = {size: self._sequence(size) for size in set(axes.sequences)}
            return [examples[size] for size in axes.sequences]
        if axes.target_length is None and self.targets is not None:
            axes = replace(axes, target_length=self._longest_target(axes.length))
        return self._padded(axes, self._pool, self._dataset_item)

    def _longest_target(self, length: float) -> int:
        """Return the longest target of the measured examples that are no longer, or of all if none is that short."""
        assert self.targets is not None
        targets = [
            target
            for own, target in zip(self.lengths, self.targets, strict=True)
            if own <= length
        ]
        return max(targets or self.targets)

    def _dataset_item(self, index: int) -> Any:
        return self._dataset[int(index)]

    def _sequence(self, size: int) -> Any:
        """Return an example of this size for a packed batch: cropped, which is exact, or else the nearest one."""
        if self._template is not None:
            return self._template.sized(Axes(1, size))
        position = self._pool.nearest(size, None)
        if position is None:
            raise _too_short(size)
        return self._dataset_item(self._pool.indices[position])

    def _padded(self, axes: Axes, pool: Pool, item: Callable[[int], Any]) -> list[Any]:
        """Return the examples of a padded batch, from a pool of which `item` returns each."""
        length = axes.length
        target = axes.target_length
        longest = pool.nearest(length, target)
        if longest is not None and not self._stands_for(pool, longest, axes):
            longest = None
        if longest is not None:
            first = item(pool.indices[longest])
            has_target = pool.targets is not None and pool.targets[longest] == target
        elif self._template is not None:
            first = self._template.sized(replace(axes, batch_size=1))
            has_target = True
        else:
            raise _too_short(length)
        examples = [first] * axes.batch_size
        if self._is_even or axes.batch_size == 1:
            return examples
        is_padded = False
        if target is not None and not has_target:
            examples[-1], is_padded = self._with_target(axes, first, pool, item)
        if not is_padded and (has_target or target is None or axes.batch_size > 2):
            examples[0] = self._shorter(axes, first, pool, item)
        return examples

    def _stands_for(self, pool: Pool, position: int, axes: Axes) -> bool:
        """Return whether an example that is as long stands for one of exactly this size."""
        if self._template is None:
            return True
        target = axes.target_length
        if self._is_even and target is not None:
            if pool.targets is None or pool.targets[position] != target:
                return False
        near = 1.0 if pool is self._measured else _NEAR
        return bool(pool.lengths[position] <= near * axes.length)

    def _with_target(
        self, axes: Axes, first: Any, pool: Pool, item: Callable[[int], Any]
    ) -> tuple[Any, bool]:
        """Return an example with the target, and whether it is shorter than the longest: then it is padded."""
        target = axes.target_length
        assert target is not None
        if pool.targets is None:
            pool = self._measured
            item = self._dataset_item
        position = pool.with_target(axes.length, target)
        if position is not None and pool.targets is not None:
            is_long = pool is not self._measured or pool.targets[position] == target
            if is_long or self._template is None:
                is_shorter = bool(pool.lengths[position] < axes.length)
                return item(pool.indices[position]), is_shorter
        if self._template is None:
            return first, False
        return self._template.sized(_shortened(axes)), axes.length > 1

    def _shorter(
        self, axes: Axes, first: Any, pool: Pool, item: Callable[[int], Any]
    ) -> Any:
        """Return an example that is padded in the batch, if there is one; else the longest."""
        positions = pool.within(_SHORTER * axes.length, axes.target_length)
        if positions.size:
            return item(pool.indices[pool.longest_of(positions)])
        if self._template is None or pool is not self._measured:
            return first
        return self._template.sized(_shortened(axes))


def count_of(dataset: Any) -> int | None:
    """Return the number of examples, if they can be chosen; torch's streams have a `__getitem__` that fails."""
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return None
    return len(dataset)


def _shortened(axes: Axes) -> Axes:
    """Return the shape of one example that is shorter than the longest."""
    return replace(axes, batch_size=1, length=max(1, int(_SHORTER * axes.length)))


def _too_short(length: float) -> Unclear:
    return Unclear(
        f"the script's data set shows no example as long as {length:,.0f}, and none can be made longer",
        "Give a manifest in the order of the data set, or none: then batchtune measures its examples.",
    )


def _collated_terms(
    examples: Sequence[Any], collate: Collate, keys: Keys, unclear: Unclear
) -> tuple[Terms, Relations]:
    """Return the lengths of examples, and of what, as they are in a batch of their own; raise `unclear` without."""
    try:
        alone = flatten([_collated(collate, [example]) for example in examples])
        return followed_sizes(alone, {}, "collated examples", keys)
    except Unclear:
        raise unclear from None


def _check_unpacked(leaves: Leaves) -> None:
    """Raise Unclear if the data set has packed its examples: each is a row of sequences already."""
    rows = leaves.get("seq_lengths")  # as TRL writes them
    if rows is None:
        rows = [packed_row(example) for example in batches_of(leaves)]
    counts = [0 if row is None else len(row) for row in rows]
    most_sequences = max(counts)
    if min(counts) > 0 and most_sequences > 1:
        raise Unclear(
            f"the examples of the script's data set are packed already, up to {most_sequences} sequences in one",
            "Let the script pack when it makes batches, from a data set of single sequences: with TRL "
            "packing=False and padding_free=True, otherwise with transformers' DataCollatorWithFlattening.",
        )


def _collated(collate: Collate, examples: Sequence[Any]) -> Any:
    """Return a batch of copies: collate functions may change dicts and lists. Raises Unclear if the function fails."""
    try:
        return collate([rebuilt(example, {}) for example in examples])
    except Exception as error:
        raise Unclear(
            f"the script's collate function fails: {type(error).__name__}: {error}",
            NAME_THEM,
        ) from error
