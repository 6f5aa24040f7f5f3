"""SpeechBrain's training recipes: the names of their batching settings, and where a recipe's YAML has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.configs.tree import Keys, Node
from batchtune.errors import ResultError

# Arguments of dynamic_bucketed_batch, in its `sampler_kwargs`.
STREAM_LIMITS = ("target_batch_numel", "max_batch_numel")
# Today's name, then the one before SpeechBrain 1.0.
LIMITS = ("max_batch_length", "max_batch_len")
BUCKETS = ("num_buckets", "bucket_boundaries")
# Bucket rules of old samplers, whose buckets can't be reproduced.
OLD_RULES = ("left_bucket_length", "left_bucket_len", "bucket_length_multiplier", "multiplier", "num_quantiles")
_NOT_TRAINING = re.compile(r"val|valid|validation|dev|test|eval|infer|inference", re.IGNORECASE)
_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping in a file: the last of a chain of mappings from the document's top, and the keys that lead there."""

    chain: tuple[Node, ...]
    keys: Keys

    @property
    def node(self) -> Node:
        """The mapping itself."""
        return self.chain[-1]

    @property
    def settings(self) -> dict[str, Node]:
        """Its values by key."""
        return self.node.value if isinstance(self.node.value, dict) else {}

    def nearest(self, key: str) -> tuple[Node, tuple[Node, ...]] | None:
        """Return a key's value, its own or that of the innermost mapping around that has it, and the chain up to it."""
        for depth in range(len(self.chain), 0, -1):
            if (node := self.chain[depth - 1].get(key)) is not None:
                return node, self.chain[:depth]
        return None


def block_at(root: Node, keys: Keys) -> Block | None:
    """Return the mapping at a path of keys; None without one."""
    chain: tuple[Node, ...] = (root,)
    for key in keys:
        if (found := chain[-1].get(key)) is None:
            return None
        chain = (*chain, found)
    return Block(chain, keys) if isinstance(chain[-1].value, dict) else None


def training_block(root: Node, name: str, choose: str) -> Block | None:
    """Find the settings of the sampler that a recipe trains with; None without any."""
    blocks = blocks_with(root, LIMITS)
    # References start from settings at the top: the block is what the sampler gets.
    found = [block for block in blocks if block.keys]
    found = found or [block for block in blocks if not block.settings.keys().isdisjoint(BUCKETS)]
    return the_one_for_training(found, name, choose)


def stream_block(root: Node, name: str, choose: str) -> Block | None:
    """Find the settings of the `dynamic_bucketed_batch` that a recipe trains with, likewise."""
    found = blocks_with(root, STREAM_LIMITS)
    return the_one_for_training([block for block in found if block.keys] or found, name, choose)


def blocks_with(root: Node, names: Sequence[str]) -> list[Block]:
    """Return the mappings with any of these keys that are reached through mappings, each once despite aliases."""
    found, seen, waiting = [], set(), [Block((root,), ())]
    while waiting:
        block = waiting.pop()
        if id(block.node) in seen:
            continue
        seen.add(id(block.node))
        if not block.settings.keys().isdisjoint(names):
            found.append(block)
        inner = [(key, node) for key, node in block.settings.items() if isinstance(node.value, dict)]
        waiting += [Block((*block.chain, node), (*block.keys, key)) for key, node in reversed(inner)]
    return found


def the_one_for_training(found: Sequence[Block], name: str, choose: str) -> Block | None:
    """Return the block with `train` in its path, else the one not named for validation or test; None without any.

    If several are left, ResultError names them, and the option `choose`, which names one by its path of keys.
    """
    found = [block for block in found if not is_validation(block.keys)] or found
    found = [block for block in found if "train" in ".".join(block.keys)] or found
    if len(found) > 1:
        paths = [".".join(block.keys) for block in found]
        listed = ", ".join(paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
        raise ResultError(
            f"{name} has {len(found)} blocks of batching settings: {listed}",
            f"Say which one: {choose}{paths[0]}.",
        )
    return found[0] if found else None


def is_validation(keys: Keys) -> bool:
    """Return whether a path of keys is named for validation or test."""
    return any(_NOT_TRAINING.fullmatch(word) for key in keys for word in re.split(r"[^A-Za-z]+", key))
