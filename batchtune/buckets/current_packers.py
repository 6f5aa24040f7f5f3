"""A user's current packer, `--current NAME:key=value`: what axolotl, TRL or verl makes of the same lengths, exactly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args, get_origin

import msgspec
import numpy as np

from batchtune.buckets.current_settings import (
    Given,
    Known,
    Settings,
    Size,
    read_settings,
)
from batchtune.epochs.layout import Dealing
from batchtune.lengths import IntArray
from batchtune.packing.packed import Packed
from batchtune.packing.ranks import karmarkar_karp
from batchtune.packing.time_law import DENSE_7B
from batchtune.packing.twins import (
    MicroBatches,
    axolotl_batches,
    trl_bfd,
    verl_micro_batches,
)
from batchtune.results import PackedRow

Steps: TypeAlias = list[list[MicroBatches]]
"""The micro-batches of each rank in each optimizer step."""


class PackerSettings(Settings, frozen=True, kw_only=True):
    """The settings of a framework's packer."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens of a micro-batch, as the framework understands the settings."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens of a sequence."""

    @property
    def cuts(self) -> bool:
        """Whether the framework cuts longer sequences; otherwise it leaves them out."""
        return False

    @abstractmethod
    def steps(self, tokens: IntArray, order: list[int], dealing: Dealing) -> Steps:
        """Return the micro-batches of an epoch of sequences in this order, none longer than `longest`.

        Raises ValueError if the framework makes none of them.
        """

    def describe(self) -> str:
        """Return the settings in a few words."""
        given = msgspec.to_builtins(self).items()
        words = [f"{name}={value}" for name, value in given if value is not None]
        return f"{self.NAME}, {', '.join(words)}"


class AxolotlSettings(PackerSettings, frozen=True, kw_only=True):
    """The settings of axolotl's multipack with attention that keeps sequences apart."""

    NAME = "axolotl"
    SIGNS = ("sequence_len",)

    sequence_len: Size
    micro_batch_size: Size = 1
    sample_packing_bin_size: Size = 200
    sample_packing_group_size: Size = 100_000
    excess_length_strategy: Literal["drop", "truncate"] = "drop"

    @property
    def max_tokens(self) -> int:
        """micro_batch_size × sequence_len: axolotl packs a micro-batch as one row."""
        return self.micro_batch_size * self.sequence_len

    @property
    def longest(self) -> int:
        """sequence_len."""
        return self.sequence_len

    @property
    def cuts(self) -> bool:
        """Whether longer ones are truncated; by default they are dropped."""
        return self.excess_length_strategy == "truncate"

    def steps(self, tokens: IntArray, order: list[int], dealing: Dealing) -> Steps:
        """Return the bins, dealt in turn."""
        batches = axolotl_batches(
            tokens.tolist(),
            order,
            self.max_tokens,
            bin_size=self.sample_packing_bin_size,
            group_size=self.sample_packing_group_size,
        )
        return _in_turn([batch[0] for batch in batches], dealing)


class TrlSettings(PackerSettings, frozen=True, kw_only=True):
    """The settings of TRL's SFTTrainer with packing=True and the strategy bfd."""

    NAME = "trl"
    SIGNS = ("max_length",)

    max_length: Size
    per_device_train_batch_size: Size = 1

    @property
    def max_tokens(self) -> int:
        """per_device_train_batch_size × max_length: so many packed rows are flattened."""
        return self.per_device_train_batch_size * self.max_length

    @property
    def longest(self) -> int:
        """max_length."""
        return self.max_length

    @property
    def cuts(self) -> bool:
        """Whether longer ones are truncated."""
        return True

    def steps(self, tokens: IntArray, order: list[int], dealing: Dealing) -> Steps:
        """Return the packed rows, so many at a time, shuffled and dealt in turn."""
        rows = trl_bfd(tokens[order].tolist(), self.max_length)
        places = np.random.default_rng(len(rows)).permutation(len(rows)).tolist()
        size = self.per_device_train_batch_size
        batches = []
        for first in range(0, len(rows), size):
            batch = []
            for row in places[first : first + size]:
                batch += [order[place] for place in rows[row]]
            batches.append(batch)
        return _in_turn(batches, dealing)


class VerlSettings(PackerSettings, frozen=True, kw_only=True):
    """The settings of verl's dynamic batches.

    Attributes:
        train_batch_size: Sequences of all ranks in a step.
        ppo_mini_batch_size: Sequences of all ranks between two optimizer steps; None: train_batch_size.
        keeps_cap: Whether micro-batches are added until the cap is kept, as from verl 0.9.1 on.
    """

    NAME = "verl"
    SIGNS = ("ppo_max_token_len_per_gpu", "train_batch_size")

    ppo_max_token_len_per_gpu: Size
    train_batch_size: Size
    ppo_mini_batch_size: Size | None = None
    keeps_cap: bool = True

    @property
    def max_tokens(self) -> int:
        """ppo_max_token_len_per_gpu."""
        return self.ppo_max_token_len_per_gpu

    @property
    def longest(self) -> int:
        """ppo_max_token_len_per_gpu."""
        return self.ppo_max_token_len_per_gpu

    def steps(self, tokens: IntArray, order: list[int], dealing: Dealing) -> Steps:
        """Return the micro-batches of each mini-batch, dealt to ranks by work; what fills no step is left out."""
        ranks = dealing.world_size
        size = self.ppo_mini_batch_size or self.train_batch_size
        if self.train_batch_size % size or size % ranks:
            raise ValueError(
                f"train_batch_size must be a multiple of ppo_mini_batch_size, and that of the {ranks:,} ranks, got "
                f"{self.train_batch_size:,} and {size:,}"
            )
        taken = len(order) // self.train_batch_size * self.train_batch_size
        if not taken:
            raise ValueError(
                f"train_batch_size is {self.train_batch_size:,}, for {len(order):,} sequences"
            )
        steps = []
        for first in range(0, taken, size):
            held = order[first : first + size]
            work = [
                24576 * int(tokens[index]) + int(tokens[index]) ** 2 for index in held
            ]
            parts = karmarkar_karp(work, ranks, equal_size=True)
            of_ranks = [[held[place] for place in sorted(part)] for part in parts]
            packed = verl_micro_batches(
                [tokens[part].tolist() for part in of_ranks],
                self.max_tokens,
                keeps_cap=self.keeps_cap,
            )
            steps.append(
                [
                    [[part[place] for place in batch] for batch in batches]
                    for part, batches in zip(of_ranks, packed, strict=True)
                ]
            )
        return steps


PackerCurrent = Given[PackerSettings]
KINDS: dict[str, type[PackerSettings]] = {
    kind.NAME: kind for kind in (AxolotlSettings, TrlSettings, VerlSettings)
}


def read_packer(text: str) -> PackerCurrent | None:
    """Read and check the settings of a packer, `verl:key=value,key=value`; None if the text names no packer.

    Raises UsageError as `read_settings` does.
    """
    name, separator, settings = text.partition(":")
    if not separator or name not in KINDS:
        return None
    kind = KINDS[name]
    fields = ", ".join(map(_written, msgspec.structs.fields(kind)))
    known = Known(
        kinds=(kind,),
        hint=f"Write {name}:key=value,key=value; known are {fields}.",
        lacking=f"settings of {name}",
    )
    return read_settings(settings, known)


def _written(field: msgspec.structs.FieldInfo) -> str:
    """Return how a setting is written: its name, with its values if these are few."""
    if get_origin(field.type) is not Literal:
        return field.name
    return f"{field.name}={'|'.join(get_args(field.type))}"


def price_packer(
    current: PackerCurrent, lengths: IntArray, dealing: Dealing, seed: int
) -> PackedRow:
    """Return what an epoch of shuffled sequences with these lengths comes to in the user's packer.

    Raises BatchtuneError if the settings don't work for these lengths.
    """
    settings = current.settings
    tokens = np.minimum(lengths, settings.longest)
    is_cut = tokens < lengths
    order = np.random.default_rng(seed).permutation(lengths.size)
    if not settings.cuts:
        order = order[~is_cut[order]]
    if not order.size:
        raise current.wrong(
            f"all sequences are longer than {settings.longest:,} tokens", None
        )
    try:
        steps = settings.steps(tokens, order.tolist(), dealing)
    except ValueError as error:
        raise current.wrong(str(error), None) from error
    if not steps:
        raise current.wrong(
            f"they make fewer micro-batches than the {dealing.world_size:,} ranks need",
            None,
        )
    seconds = DENSE_7B.of_sequences(tokens)
    batches: MicroBatches = []
    ends = []
    rank_seconds = []
    for step in steps:
        of_ranks = []
        for rank in step:
            batches += rank
            of_ranks.append(float(seconds[np.concatenate(rank)].sum()))
        ends.append(len(batches))
        rank_seconds.append(of_ranks)
    packed = Packed.of_lists(batches)
    totals = packed.sums(tokens)
    step_tokens = np.add.reduceat(totals, [0, *ends[:-1]])
    loads = np.array(rank_seconds)
    total = int(totals.sum())
    cut = int(np.count_nonzero(is_cut[packed.sequences]))
    return PackedRow(
        packer=settings.NAME,
        max_tokens=settings.max_tokens,
        batches=packed.count,
        lower_bound=-(-total // settings.max_tokens),
        tokens=total,
        fill=total / (packed.count * settings.max_tokens),
        largest_tokens=int(totals.max()),
        over_cap=int(np.count_nonzero(totals > settings.max_tokens)),
        cut_sequences=cut,
        cut_tokens=int((lengths - tokens)[packed.sequences].sum()),
        left_out=lengths.size - packed.sequences.size,
        steps=len(steps),
        step_tokens_deviation=float(step_tokens.std() / step_tokens.mean()),
        slowest_rank=float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()),
    )


def _in_turn(batches: Sequence[list[int]], dealing: Dealing) -> Steps:
    """Return micro-batches as ranks take them in turn; what is not enough for all ranks is left out."""
    ranks = dealing.world_size
    count = len(batches) // ranks * ranks
    together = ranks * dealing.accumulate
    steps = []
    for first in range(0, count, together):
        step = batches[first : min(first + together, count)]
        steps.append([list(step[rank::ranks]) for rank in range(ranks)])
    return steps
