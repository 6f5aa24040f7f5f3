"""What the built-in workloads share: options with range checks, and one plain training step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchtune.shapes import BatchShape

LEARNING_RATE = 1e-4
# torch's default of 65536 makes the first steps overflow and be skipped, and then the optimizer's state,
# which a trial has to include, would appear late.
FP16_FIRST_SCALE = 1024.0

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = ("adamw", "sgd", "adafactor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The hyperparameters that a `size` stands for."""

    dim: int
    layers: int
    heads: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Options that every built-in workload takes.

    Attributes:
        size: Name of a preset; `dim`, `layers`, `heads` and `vocab` override it one by one.
        dim: Width of the model; a multiple of 2 * heads (rotary positions turn pairs).
        layers: Number of blocks.
        heads: Attention heads of each block.
        vocab: Number of output classes, for CTC the blank included.
        dropout: Probability, at least 0 and below 1.
        dtype: `fp32`, or `bf16` or `fp16` by autocast; the parameters stay in fp32, and fp16 scales its loss.
        checkpoint: Whether each block's activations are computed again in the backward pass instead of kept.
        optimizer: `adamw`, `sgd` (momentum 0.9) or `adafactor`.
        seed: Of parameters, batches and dropout.

    Raises:
        ValueError: A value outside its range; the message states the rule and the value.
    """

    SIZES: ClassVar[Mapping[str, Size]]

    size: str = "small"
    dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocab: int | None = None
    dropout: float = 0.1
    dtype: str = "fp32"
    checkpoint: bool = False
    optimizer: str = "adamw"
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("size", self.size, tuple(self.SIZES))
        for name in ("dim", "layers", "heads"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.vocab is not None:
            check_integer("vocab", self.vocab, 3)
        hyper = self.hyper
        if hyper.dim % (2 * hyper.heads):
            raise ValueError(f"dim must be a multiple of 2 * heads, got dim={hyper.dim}, heads={hyper.heads}")
        check_number("dropout", self.dropout, 0.0, below=1.0)
        check_choice("dtype", self.dtype, tuple(AUTOCAST_DTYPES))
        if not isinstance(self.checkpoint, bool):
            raise ValueError(f"checkpoint must be true or false, got {self.checkpoint!r}")
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_integer("seed", self.seed, 0)

    @property
    def hyper(self) -> Size:
        """The preset with what is set explicitly in place of its own values."""
        preset = self.SIZES[self.size]
        return Size(
            dim=preset.dim if self.dim is None else self.dim,
            layers=preset.layers if self.layers is None else self.layers,
            heads=preset.heads if self.heads is None else self.heads,
            vocab=preset.vocab if self.vocab is None else self.vocab,
        )


Batch = TypeVar("Batch")
Config = TypeVar("Config", bound=TrainingConfig)


class TrainingWorkload(ABC, Generic[Config, Batch]):
    """A workload whose step is forward, loss, backward and optimizer step; a subclass says of what.

    The same seed and the same sequence of calls give the same numbers on the CPU.

    Args:
        config: The options.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model, on the current default device."""

    @abstractmethod
    def make_batch(self, shape: BatchShape) -> Batch:
        """Return a random batch of this shape on the device."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar in fp32."""

    def setup(self, device: torch.device) -> None:
        """Build the model and its optimizer on the device."""
        self.device = device
        torch.manual_seed(self.config.seed)
        with device:
            self.model = self.build_model().train()
        self.optimizer = make_optimizer(self.config.optimizer, self.model)
        self._scaler = torch.amp.GradScaler(
            device.type, init_scale=FP16_FIRST_SCALE, enabled=self.config.dtype == "fp16"
        )

    def step(self, batch: Batch) -> None:
        """Run one training step; afterwards only parameters, gradients and optimizer state are left."""
        self.optimizer.zero_grad(set_to_none=True)
        dtype = AUTOCAST_DTYPES[self.config.dtype]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss = self.loss(batch)
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.step(self.optimizer)
        self._scaler.update()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of that name; torch chooses between its implementations."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=LEARNING_RATE)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def run_block(block: nn.Module, *inputs: Tensor, checkpointed: bool) -> Tensor:
    """Return a block's output, its activations kept for the backward pass or computed again there."""
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False) if checkpointed else block(*inputs)
    return output


def whole(value: float) -> int:
    """Return a length as a count: rounded up, but not for the rounding error of a division before it."""
    return math.ceil(value - 1e-6)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless the value is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: Any, least: float, *, below: float = math.inf) -> None:
    """Raise ValueError unless the value is a number of at least `least` and less than `below`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < below:
        rule = f"at least {least:g}" + (f" and below {below:g}" if math.isfinite(below) else "")
        raise ValueError(f"{name} must be a number of {rule}, got {value!r}")
