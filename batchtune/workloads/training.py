"""The common part of the built-in workloads: options with range checks, layers, and one plain training step."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from batchtune.errors import UsageError, invalid_field
from batchtune.results import BatchShape

LEARNING_RATE = 1e-4
# torch's default of 65536 makes the first steps overflow and be skipped, and then the optimizer's state,
# which a trial has to include, would appear late.
FP16_FIRST_SCALE = 1024.0

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=LEARNING_RATE),
    "sgd": partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=LEARNING_RATE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The hyperparameters that a `size` stands for."""

    dim: int
    layers: int
    heads: int
    vocab: int


Natural = Annotated[int, msgspec.Meta(ge=1)]


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options that every built-in workload takes."""

    SIZES: ClassVar[Mapping[str, ModelSize]]

    # A preset; `dim`, `layers`, `heads` and `vocab` override it one by one.
    size: Literal["tiny", "small", "base", "large"] = "small"
    dim: Natural | None = None  # a multiple of 2 * heads (rotary positions turn pairs)
    layers: Natural | None = None
    heads: Natural | None = None
    # Number of output classes, for CTC the blank included.
    vocab: Annotated[int, msgspec.Meta(ge=3)] | None = None
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    # By autocast; the parameters stay in fp32, and fp16 scales its loss.
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpoint: bool = False  # whether each block's activations are computed again in the backward pass instead of kept
    optimizer: Literal["adamw", "sgd", "adafactor"] = "adamw"
    # How ranks train together; None: by DDP, if there are any.
    parallel: Literal["ddp", "fsdp2"] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # of parameters, batches and dropout

    def __post_init__(self) -> None:
        hyper = self.hyper
        if hyper.dim % (2 * hyper.heads):
            raise ValueError(
                f"dim must be a multiple of 2 * heads, got dim={hyper.dim}, heads={hyper.heads}"
            )
        if self.parallel == "fsdp2" and self.optimizer == "adafactor":
            raise ValueError(
                "parallel=fsdp2 needs another optimizer: torch's adafactor takes no sharded parameters"
            )

    @property
    def hyper(self) -> ModelSize:
        """The preset with what is set explicitly in place of its own values."""
        given = {
            name: getattr(self, name)
            for name in ("dim", "layers", "heads", "vocab")
            if getattr(self, name) is not None
        }
        return replace(self.SIZES[self.size], **given)


Batch = TypeVar("Batch")
Config = TypeVar("Config", bound=TrainingConfig)


class TrainingWorkload(ABC, Generic[Config, Batch]):
    """A workload whose step is forward, loss, backward and optimizer step; a subclass has the model and the loss.

    The same seed and the same sequence of calls give the same numbers on the CPU.
    """

    CONFIG: ClassVar[type[TrainingConfig]]

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls.CONFIG)  # type: ignore[attr-defined]  # what inspect reads

    def __init__(self, **options: Any) -> None:
        """Check the options; raise ValueError with the rule for one that is out of range."""
        try:
            self.config = msgspec.convert(options, self.CONFIG)  # type: ignore[assignment]  # its own kind
        except msgspec.ValidationError as error:
            raise ValueError(invalid_field(error)) from None

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
            self.model = wrapped(self.build_model().train(), self.config.parallel)
        # torch chooses between its implementations of an optimizer.
        self.optimizer = OPTIMIZERS[self.config.optimizer](self.model.parameters())
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=FP16_FIRST_SCALE,
            enabled=self.config.dtype == "fp16",
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


def wrapped(model: nn.Module, parallel: str | None) -> nn.Module:
    """Return the model as the ranks of the process group train it; unchanged without a process group."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        if parallel is not None:
            raise UsageError(
                f"parallel={parallel} needs ranks that train together",
                "Start some with --nproc-per-node, or simulate them with --simulate-world-size.",
            )
        return model
    if parallel != "fsdp2":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Blocks):
            for block in module.blocks:
                fully_shard(block)
    fully_shard(model)
    return model


def rotary_angles(positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Return angles of rotary position embeddings (Su et al., 2021, arXiv:2104.09864, equation 15), in radians.

    Shape (positions, head_dim / 2), fp32. A table kept between batches would grow with the longest batch seen so far
    and add to the memory of every later trial.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    return torch.outer(torch.arange(positions, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle (Su et al., RoFormer, 2021)."""
    cosine = angles.cos().to(x.dtype)
    sine = angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cosine - second * sine, first * sine + second * cosine), dim=-1
    )


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the sequences of a packed row lie, one after the other.

    Attributes:
        lengths: Tokens of each.
        positions: Of each token in its sequence, from 0, shape (tokens,).
        ends: Where each begins in the row, and the last one ends, shape (sequences + 1,), int32.
    """

    lengths: list[int]
    positions: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Spans:
        """Return those of sequences with these lengths."""
        tokens = torch.tensor(lengths, device=device)
        ends = F.pad(tokens.cumsum(0), (1, 0))
        begins = ends[:-1].repeat_interleave(tokens, output_size=sum(lengths))
        positions = torch.arange(sum(lengths), device=device) - begins
        return cls(list(lengths), positions, ends.to(torch.int32))


def attend_within(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Spans
) -> Tensor:
    """Return causal attention within each sequence of a row; all of shape (1, heads, tokens, features).

    On a GPU in half precision one kernel does it (FlashAttention for variable lengths); elsewhere each sequence is on
    its own. Neither builds a mask, so memory and time grow as if each were a row of its own.
    """
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        longest = max(spans.lengths)
        mixed = varlen_attn(
            queries[0].transpose(0, 1),
            keys[0].transpose(0, 1),
            values[0].transpose(0, 1),
            cu_seq_q=spans.ends,
            cu_seq_k=spans.ends,
            max_q=longest,
            max_k=longest,
            window_size=(-1, 0),
        )
        assert isinstance(mixed, Tensor)
        return mixed.transpose(0, 1).unsqueeze(0)
    sequences = zip(
        torch.split(queries, spans.lengths, dim=2),
        torch.split(keys, spans.lengths, dim=2),
        torch.split(values, spans.lengths, dim=2),
        strict=True,
    )
    attended = [
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
        for query, key, value in sequences
    ]
    return torch.cat(attended, dim=2)


class SelfAttention(nn.Module):
    """Multi-head self-attention, in a packed row within each sequence.

    Without a mask, as every example of a batch has its full length, and without dropout inside, torch uses its fused
    kernels on every device, and memory does not grow with the square of the length.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.queries_keys_values = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: Tensor, spans: Spans | None = None) -> Tensor:
        """Map (batch, positions, dim) to the same shape."""
        batch_size, positions, dim = x.shape
        projected = self.queries_keys_values(x).view(
            batch_size, positions, 3, self.heads, dim // self.heads
        )
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        queries = rotate(queries, angles)
        keys = rotate(keys, angles)
        if spans is not None:
            mixed = attend_within(queries, keys, values, spans)
        else:
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=self.causal
            )
        output: Tensor = self.output(
            mixed.transpose(1, 2).reshape(batch_size, positions, dim)
        )
        return output


def feed_forward(dim: int, activation: nn.Module, dropout: float) -> nn.Sequential:
    """Return a LayerNorm and two linear layers with four times the width between them."""
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, 4 * dim),
        activation,
        nn.Dropout(dropout),
        nn.Linear(4 * dim, dim),
        nn.Dropout(dropout),
    )


class Blocks(nn.Module):
    """A stack of blocks with rotary positions: (batch, positions, dim) to the same shape."""

    def __init__(
        self, config: TrainingConfig, make_block: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        hyper = config.hyper
        self.checkpointed = config.checkpoint
        self.head_dim = hyper.dim // hyper.heads
        self.blocks = nn.ModuleList(make_block() for _ in range(hyper.layers))

    def forward(self, x: Tensor, spans: Spans | None = None) -> Tensor:
        """Keep each block's activations for the backward pass, or have them computed again there.

        With `spans`, x is one packed row, in which positions restart with each sequence.
        """
        arguments: tuple[Any, ...] = (
            rotary_angles(x.shape[1], self.head_dim, x.device),
        )
        if spans is not None:
            angles = rotary_angles(max(spans.lengths), self.head_dim, x.device)
            arguments = (angles[spans.positions], spans)
        for block in self.blocks:
            x = (
                checkpoint(block, x, *arguments, use_reentrant=False)
                if self.checkpointed
                else block(x, *arguments)
            )
        return x


def whole(value: float) -> int:
    """Return a length as a count: rounded up, but not for the rounding error of a division before it."""
    return math.ceil(value - 1e-6)
