"""Packs sequences into micro-batches for ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from batchtune.arguments import whole
from batchtune.epochs.table import OverlongError, checked_lengths
from batchtune.errors import listed, shortened
from batchtune.lengths import AnyArray, FloatArray, IntArray
from batchtune.packing.packed import Packed
from batchtune.packing.packers import PACKERS
from batchtune.packing.ranks import dealt, exchanged

# An int64 holds the tokens of a million sequences that are this long.
_MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLaw:
    """The time of a micro-batch, from its total tokens, the sum of its squared lengths and its number of sequences.

    Attention within each sequence makes the time grow with the squares. Only ratios count when micro-batches are
    evened out, so the coefficients may also be FLOPs.

    Raises:
        ValueError: A coefficient is negative or not finite, or none but `seconds_per_batch` is positive.
    """

    seconds_per_token: float
    seconds_per_squared_token: float = 0.0
    seconds_per_sequence: float = 0.0
    seconds_per_batch: float = 0.0

    def __post_init__(self) -> None:
        coefficients = astuple(self)
        are_numbers = all(isinstance(value, Real) for value in coefficients)
        if not are_numbers or not all(0 <= value < math.inf for value in coefficients):
            raise ValueError(
                "the coefficients of a time law must be numbers, finite and at least 0, got "
                f"{shortened(coefficients)}"
            )
        if not any(coefficients[:-1]):
            raise ValueError(
                "a time law needs a positive seconds_per_token, seconds_per_squared_token or seconds_per_sequence"
            )

    def of_sequences(self, lengths: AnyArray) -> FloatArray:
        """Return the seconds that each sequence adds to its micro-batch, shape (sequences,)."""
        tokens = lengths.astype(np.float64)
        linear = self.seconds_per_token + self.seconds_per_squared_token * tokens
        return linear * tokens + self.seconds_per_sequence


# The FLOPs of a dense model with a hidden size of 4,096: 12·h²·L + 2·h·L² a layer, divided by 2·h. verl balances by it.
DENSE_7B = TimeLaw(seconds_per_token=24576.0, seconds_per_squared_token=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How sequences are packed.

    Attributes:
        max_tokens: The most tokens of a micro-batch, at least 1.
        packer: `even` fills micro-batches to the cap and evens out their time, `first-fit` and `best-fit` are those
            for descending lengths.
        time_law: The time of a micro-batch; by default proportional to the FLOPs of a dense 7B model.
        cut_at: Longer sequences count as this long, at most `max_tokens`, and the caller cuts them; None: no sequence
            may be longer than `max_tokens`.

    Raises:
        ValueError: An attribute breaks its rule.
    """

    max_tokens: int
    packer: str = "even"
    time_law: TimeLaw = DENSE_7B
    cut_at: int | None = None

    def __post_init__(self) -> None:
        cap = whole("max_tokens", self.max_tokens, 1, highest=_MOST_TOKENS)
        object.__setattr__(self, "max_tokens", cap)
        if not isinstance(self.packer, str) or self.packer not in PACKERS:
            raise ValueError(
                f"packer must be one of {', '.join(PACKERS)}, got {shortened(self.packer)}"
            )
        if not isinstance(self.time_law, TimeLaw):
            raise ValueError(
                f"time_law must be a batchtune.TimeLaw, got {shortened(self.time_law)}"
            )
        if self.cut_at is None:
            return
        cut_at = whole("cut_at", self.cut_at, 1)
        if cut_at > cap:
            raise ValueError(
                f"cut_at must be at most max_tokens, {cap:,}, got {cut_at:,}"
            )
        object.__setattr__(self, "cut_at", cut_at)

    def checked(self, lengths: npt.ArrayLike) -> IntArray:
        """Return the lengths that count; raise ValueError if one is no whole number or longer than allowed."""
        values = checked_lengths(lengths, hint="")
        unsound = (values > _MOST_TOKENS) | (values != np.floor(values))
        if unsound.any():
            entry = int(unsound.argmax())
            raise ValueError(
                f"lengths must be whole numbers of tokens, at most 2**40, but entry {entry} is {values[entry]}: fix it"
            )
        tokens: IntArray = values.astype(np.int64)
        if self.cut_at is not None:
            return np.minimum(tokens, self.cut_at)
        overlong = np.flatnonzero(tokens > self.max_tokens)
        if overlong.size:
            raise OverlongError(
                f"{overlong.size:,} of {tokens.size:,} sequences are longer than max_tokens, {self.max_tokens:,}, the "
                f"longest with {tokens.max():,} tokens: those with index {listed(overlong.tolist())}. Raise "
                f"max_tokens, leave them out, or cut them, cut_at={self.max_tokens}"
            )
        return tokens

    def packed(self, tokens: IntArray, multiple: int = 1) -> Packed:
        """Return the micro-batches of sequences with these lengths, as many as a multiple if that is possible."""
        seconds = self.time_law.of_sequences(tokens)
        order = np.argsort(-tokens, kind="stable")
        pack_sorted = PACKERS[self.packer]
        owners = pack_sorted(tokens[order], seconds[order], self.max_tokens, multiple)
        packed = Packed.of_owners(order, owners)
        return packed.split_to(-(-packed.count // multiple) * multiple, seconds)

    def evened(self, packed: Packed, tokens: IntArray, world_size: int) -> Packed:
        """Return the micro-batches as ranks take them in turn, so that all ranks take about as long.

        Their number, a multiple of the ranks, stays; some sequences may be exchanged.
        """
        packed = packed.ordered(dealt(self.seconds(packed, tokens), world_size))
        seconds = self.time_law.of_sequences(tokens)
        return exchanged(packed, tokens, seconds, self.max_tokens, world_size)

    def seconds(self, packed: Packed, tokens: IntArray) -> FloatArray:
        """Return the time of each micro-batch."""
        added = packed.sums(self.time_law.of_sequences(tokens))
        return self.time_law.seconds_per_batch + added


def budget_of(
    max_tokens: int,
    *,
    packer: str = "even",
    time_law: TimeLaw | Mapping[Any, float] | None = None,
    cut_at: int | None = None,
) -> Budget:
    """Return the budget that a sampler's arguments describe, a time law also by its own arguments.

    Raises ValueError as `Budget` and `TimeLaw` do.
    """
    if isinstance(time_law, Mapping):
        time_law = TimeLaw(**time_law)
    return Budget(
        max_tokens=max_tokens,
        packer=packer,
        time_law=time_law or DENSE_7B,
        cut_at=cut_at,
    )


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int,
    *,
    packer: str = "even",
    time_law: TimeLaw = DENSE_7B,
    cut_at: int | None = None,
    world_size: int = 1,
    accumulate: int = 1,
) -> list[list[int]]:
    """Pack the sequences of one global batch into micro-batches of at most `max_tokens`, and deal these to ranks.

    The result is the same on all ranks. Every sequence is in one micro-batch. A rank's micro-batches are
    `[rank::world_size]`: the same number for every rank, the slowest first.

    Example::

        micro_batches = batchtune.pack(lengths, 16_384, world_size=8)
        for micro_batch in micro_batches[rank::8]:
            ...  # of the sequences with these indices

    Args:
        lengths: Shape (sequences,): whole numbers of tokens, at least 1.
        max_tokens: The most tokens of a micro-batch.
        packer: `even`, `first-fit` or `best-fit`, as for `batchtune.PackedBatchSampler`.
        time_law: The time of a micro-batch, a `batchtune.TimeLaw`.
        cut_at: Longer sequences count as this long, and you cut them.
        world_size: The ranks that share the micro-batches.
        accumulate: Each rank's number of micro-batches is a multiple of this.

    Raises:
        OverlongError: A sequence is longer than `max_tokens`; the message counts and names them.
        ValueError: An argument breaks its rule, or there are too few sequences to give each rank the same number of
            micro-batches.
    """
    budget = Budget(
        max_tokens=max_tokens, packer=packer, time_law=time_law, cut_at=cut_at
    )
    ranks = whole("world_size", world_size, 1)
    multiple = ranks * whole("accumulate", accumulate, 1)
    tokens = budget.checked(lengths)
    packed = budget.packed(tokens, multiple)
    if packed.count % multiple:
        raise ValueError(_why_uneven(budget, tokens, ranks, multiple))
    return list(budget.evened(packed, tokens, ranks).lists())


def _why_uneven(
    budget: Budget, tokens: IntArray, world_size: int, multiple: int
) -> str:
    """Explain why the micro-batches can't be dealt evenly."""
    fewest = budget.packed(tokens).count
    needed = -(-fewest // multiple) * multiple
    return (
        f"{tokens.size:,} sequences can't be dealt evenly to {world_size:,} ranks with an accumulation of "
        f"{multiple // world_size:,}: the fewest micro-batches found are {fewest:,}, the next multiple of "
        f"{multiple:,} is {needed:,}, and each needs a sequence. Pack more sequences at once, lower world_size or "
        "accumulate, or raise max_tokens"
    )
