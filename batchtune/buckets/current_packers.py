"""A user's current packer, `--current NAME:key=value`: what the framework makes of the same lengths, exactly."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
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
from batchtune.lengths import FloatArray, IntArray
from batchtune.packing.figures import row_of
from batchtune.packing.packed import Packed
from batchtune.packing.packing import Budget
from batchtune.packing.ranks import karmarkar_karp
from batchtune.packing.time_law import DENSE_7B, TimeLaw
from batchtune.packing.twins import (
    MicroBatches,
    axolotl_batches,
    axolotl_epoch_length,
    slime_steps,
    trl_bfd,
    verl_micro_batches,
)
from batchtune.results import PackedRow

# axolotl counts the batches of so many orders, with at least as many ranks of one, to know how long epochs are.
_ORDERS = 4
# No sequence is longer.
_UNLIMITED = 2**53
Steps: TypeAlias = list[list[MicroBatches]]
"""The micro-batches of each rank in each optimizer step."""


class PackerSettings(Settings, frozen=True, kw_only=True):
    """The settings of a framework's packer."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens of a micro-batch, as the framework understands the settings."""

    @property
    def longest(self) -> int:
        """The most tokens of a sequence; by default those of a micro-batch."""
        return self.max_tokens

    @property
    def cuts(self) -> bool:
        """Whether the framework cuts longer sequences; otherwise it leaves them out."""
        return False

    @abstractmethod
    def steps(self, lengths: list[int], dealing: Dealing) -> Steps:
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

    def steps(self, lengths: list[int], dealing: Dealing) -> Steps:
        """Return the bins, dealt in turn, as many as axolotl counts for an epoch."""
        batches = self._bins(lengths, range(len(lengths)))
        counts = [len(batches)]
        further = 0 if dealing.world_size >= _ORDERS else _ORDERS - 1
        for seed in range(further):
            order = np.random.default_rng(seed).permutation(len(lengths))
            counts.append(len(self._bins(lengths, order.tolist())))
        length = axolotl_epoch_length(counts)
        return _in_turn([batch[0] for batch in batches[:length]], dealing)

    def _bins(self, lengths: list[int], order: Sequence[int]) -> list[MicroBatches]:
        return axolotl_batches(
            lengths,
            order,
            self.max_tokens,
            bin_size=self.sample_packing_bin_size,
            group_size=self.sample_packing_group_size,
        )


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

    def steps(self, lengths: list[int], dealing: Dealing) -> Steps:
        """Return the packed rows, so many at a time, shuffled and dealt in turn."""
        rows = trl_bfd(lengths, self.max_length)
        random.Random(len(rows)).shuffle(rows)
        size = self.per_device_train_batch_size
        batches = [
            list(chain.from_iterable(rows[first : first + size]))
            for first in range(0, len(rows), size)
        ]
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

    def steps(self, lengths: list[int], dealing: Dealing) -> Steps:
        """Return the micro-batches of each mini-batch, dealt to ranks by work; what fills no step is left out."""
        ranks = dealing.world_size
        size = self.ppo_mini_batch_size or self.train_batch_size
        if self.train_batch_size % size or size % ranks:
            raise ValueError(
                f"train_batch_size must be a multiple of ppo_mini_batch_size, and that of the {ranks:,} ranks, got "
                f"{self.train_batch_size:,} and {size:,}"
            )
        taken = len(lengths) // self.train_batch_size * self.train_batch_size
        if not taken:
            raise ValueError(
                f"train_batch_size is {self.train_batch_size:,}, for {len(lengths):,} sequences"
            )
        steps = []
        for first in range(0, taken, size):
            held = lengths[first : first + size]
            work = [24576 * length + length**2 for length in held]
            parts = karmarkar_karp(work, ranks, equal_size=True)
            of_ranks = [[first + place for place in sorted(part)] for part in parts]
            packed = verl_micro_batches(
                [[lengths[place] for place in part] for part in of_ranks],
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


class SlimeSettings(PackerSettings, frozen=True, kw_only=True):
    """The settings of slime's dynamic batches, without context parallelism.

    Attributes:
        global_batch_size: Sequences of all ranks in a step.
        balance_data: Whether micro-batches are dealt to ranks by their FLOPs, here those of a dense 7B model.
        microbatch_group_size_per_vp_stage: Each rank has a multiple of so many micro-batches in a step.
    """

    NAME = "slime"
    SIGNS = ("max_tokens_per_gpu", "global_batch_size")

    max_tokens_per_gpu: Size
    global_batch_size: Size
    balance_data: bool = False
    microbatch_group_size_per_vp_stage: Size = 1

    @property
    def max_tokens(self) -> int:
        """max_tokens_per_gpu."""
        return self.max_tokens_per_gpu

    @property
    def longest(self) -> int:
        """Any number: a sequence with more than max_tokens_per_gpu is alone."""
        return _UNLIMITED

    def steps(self, lengths: list[int], dealing: Dealing) -> Steps:
        """Return the micro-batches of each global batch; what fills none is left out."""
        work = None
        if self.balance_data:
            work = DENSE_7B.of_sequences(np.array(lengths)).tolist()
        steps = slime_steps(
            lengths,
            self.max_tokens,
            world_size=dealing.world_size,
            global_batch_size=self.global_batch_size,
            multiple=self.microbatch_group_size_per_vp_stage,
            work=work,
        )
        if not steps:
            raise ValueError(
                f"global_batch_size is {self.global_batch_size:,}, for {len(lengths):,} sequences"
            )
        return steps


PackerCurrent = Given[PackerSettings]
KINDS: dict[str, type[PackerSettings]] = {
    kind.NAME: kind
    for kind in (AxolotlSettings, SlimeSettings, TrlSettings, VerlSettings)
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
    current: PackerCurrent,
    lengths: IntArray,
    dealing: Dealing,
    seed: int,
    time_law: TimeLaw = DENSE_7B,
    proofs: FloatArray | None = None,
) -> PackedRow:
    """Return what an epoch of shuffled sequences with these lengths comes to in the user's packer.

    The time law and the proofs are those of `packing.figures.row_of`. Raises BatchtuneError if the settings don't work
    for these lengths.
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
        steps = settings.steps(tokens[order].tolist(), dealing)
    except ValueError as error:
        raise current.wrong(str(error), None) from error
    if not steps:
        raise current.wrong(
            f"they make fewer micro-batches than the {dealing.world_size:,} ranks need",
            None,
        )
    # Rank after rank and step after step.
    slots = list(chain.from_iterable(steps))
    sizes = [len(slot) for slot in slots]
    packed = Packed.of_lists(chain.from_iterable(slots))
    budget = Budget(max_tokens=settings.max_tokens, time_law=time_law)
    row = row_of(
        Packed(order[packed.sequences], packed.sizes),
        np.repeat(np.arange(len(slots)), sizes),
        lengths,
        tokens,
        budget,
        dealing.world_size,
        proofs,
    )
    return msgspec.structs.replace(row, packer=settings.NAME)


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
