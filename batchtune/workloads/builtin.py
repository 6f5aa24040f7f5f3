"""The built-in workloads: `conformer-ctc`, a speech recogniser with CTC loss, and `transformer-lm`, a causal LM."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

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
    parts = [
        torch.split(part, spans.lengths, dim=2) for part in (queries, keys, values)
    ]
    sequences = zip(*parts, strict=True)
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


FEATURES = 80
FRAMES_PER_SECOND = 100
SUBSAMPLING = 4
# What torch's cross-entropy leaves out.
NOTHING_FOLLOWS = -100


class ConformerCTCConfig(TrainingConfig, frozen=True, kw_only=True):
    """Options of `builtin:conformer-ctc`.

    Sizes and their parameters: tiny 0.5 million, small 4.1 million, base 25 million, large 104 million.
    """

    SIZES: ClassVar[Mapping[str, ModelSize]] = {
        "tiny": ModelSize(dim=64, layers=4, heads=4, vocab=1024),
        "small": ModelSize(dim=144, layers=8, heads=4, vocab=1024),
        "base": ModelSize(dim=256, layers=16, heads=4, vocab=1024),
        "large": ModelSize(dim=512, layers=17, heads=8, vocab=1024),
    }

    # Of the manifest's lengths; a frame has 10 ms.
    unit: Literal["s", "ms", "samples", "frames"] = "s"
    sample_rate: Natural = 16000  # samples per second, for lengths in samples
    # Length of the targets where the manifest has no target length.
    tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    kernel: Natural = 31  # width of the depthwise convolution in subsampled frames, odd

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    def seconds(self, length: float) -> float:
        """Return a length of the manifest in seconds."""
        per_second = {
            "s": 1,
            "ms": 1000,
            "samples": self.sample_rate,
            "frames": FRAMES_PER_SECOND,
        }
        return length / per_second[self.unit]


class SpeechBatch(NamedTuple):
    """Features (batch, frames, 80) and targets (batch, tokens) in 1..vocab-1; 0 is the blank."""

    features: Tensor
    targets: Tensor


class ConformerCTC(TrainingWorkload[ConformerCTCConfig, SpeechBatch]):
    """CTC training of a conformer on 80 features for every 10 ms.

    Two convolutions of stride 2 over time leave a quarter of the frames, 25 a second. The targets have
    `target_length` tokens, or `tokens_per_second` where the manifest has none, but at most as many as there
    are subsampled frames. No token follows itself, so an alignment always exists. Its options are the fields of
    `ConformerCTCConfig`.
    """

    CONFIG = ConformerCTCConfig

    def build_model(self) -> nn.Module:
        """Return the recogniser."""
        return Conformer(self.config)

    def make_batch(self, shape: BatchShape) -> SpeechBatch:
        """Return random features and targets, all of full length."""
        seconds = self.config.seconds(shape.length)
        # With a single frame, oneDNN's strided convolution in bf16 gives gradients of uninitialised memory.
        frames = max(SUBSAMPLING, whole(seconds * FRAMES_PER_SECOND))
        tokens = shape.target_length
        if tokens is None:
            tokens = seconds * self.config.tokens_per_second
        features = torch.randn(shape.batch_size, frames, FEATURES, device=self.device)
        # Each token is the one before plus something that is not 0 modulo the number of tokens.
        classes = self.config.hyper.vocab - 1
        # At most what the two convolutions leave of the frames.
        count = min(whole(tokens), -(-frames // SUBSAMPLING))
        steps = torch.randint(1, classes, (shape.batch_size, count), device=self.device)
        return SpeechBatch(features, steps.cumsum(dim=1) % classes + 1)

    def loss(self, batch: SpeechBatch) -> Tensor:
        """Return the mean CTC loss per target token."""
        logits: Tensor = self.model(batch.features)
        batch_size, frames, _ = logits.shape
        return F.ctc_loss(
            logits.float().log_softmax(dim=-1).transpose(0, 1),
            batch.targets,
            input_lengths=torch.full((batch_size,), frames),
            target_lengths=torch.full((batch_size,), batch.targets.shape[1]),
        )


class Conformer(nn.Module):
    """Features (batch, frames, 80) to logits (batch, subsampled frames, vocab).

    The blocks are those of Gulati et al., 2020 (arXiv:2005.08100), with rotary positions and with LayerNorm
    instead of batch normalisation in the convolution module.
    """

    def __init__(self, config: ConformerCTCConfig) -> None:
        super().__init__()
        dim = config.hyper.dim
        self.subsampling = nn.Sequential(
            nn.Conv1d(FEATURES, dim, kernel_size=3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv1d(dim, dim, kernel_size=3, stride=2, padding=1),
            nn.SiLU(),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Blocks(config, lambda: ConformerBlock(config))
        self.output = nn.Linear(dim, config.hyper.vocab)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of each subsampled frame."""
        x = self.dropout(self.subsampling(features.transpose(1, 2)).transpose(1, 2))
        logits: Tensor = self.output(self.blocks(x))
        return logits


class ConformerBlock(nn.Module):
    """Half a feed-forward step, self-attention, convolution, the other half, LayerNorm."""

    def __init__(self, config: ConformerCTCConfig) -> None:
        super().__init__()
        hyper = config.hyper
        self.first = feed_forward(hyper.dim, nn.SiLU(), config.dropout)
        self.attention_norm = nn.LayerNorm(hyper.dim)
        self.attention = SelfAttention(hyper.dim, hyper.heads, causal=False)
        self.dropout = nn.Dropout(config.dropout)
        self.convolution = ConvolutionModule(hyper.dim, config.kernel, config.dropout)
        self.second = feed_forward(hyper.dim, nn.SiLU(), config.dropout)
        self.norm = nn.LayerNorm(hyper.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map (batch, frames, dim) to the same shape."""
        x = x + 0.5 * self.first(x)
        x = x + self.dropout(self.attention(self.attention_norm(x), angles))
        x = x + self.convolution(x)
        output: Tensor = self.norm(x + 0.5 * self.second(x))
        return output


class ConvolutionModule(nn.Module):
    """Pointwise convolution with a gate, depthwise convolution over time, pointwise convolution."""

    def __init__(self, dim: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        # A pointwise convolution is a linear layer.
        self.gated = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.depthwise_norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, frames, dim) to the same shape."""
        x = F.glu(self.gated(self.norm(x)), dim=-1)
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.dropout(self.output(F.silu(self.depthwise_norm(x))))
        return output


class TransformerLMConfig(TrainingConfig, frozen=True):
    """Options of `builtin:transformer-lm`.

    Sizes and their parameters (input and output embedding are one matrix): tiny 1.4 million, small 5.3
    million, base 110 million, large 335 million.
    """

    SIZES: ClassVar[Mapping[str, ModelSize]] = {
        "tiny": ModelSize(dim=128, layers=2, heads=2, vocab=8192),
        "small": ModelSize(dim=256, layers=4, heads=4, vocab=8192),
        "base": ModelSize(dim=768, layers=12, heads=12, vocab=32000),
        "large": ModelSize(dim=1024, layers=24, heads=16, vocab=32000),
    }

    # Whether sequences stand in one row without padding, each attending to itself alone.
    packed: bool = False


class TokenBatch(NamedTuple):
    """Tokens (batch, positions), and the token that follows each, -100 where none does; `spans` of a packed row."""

    tokens: Tensor
    following: Tensor
    spans: Spans | None


class TransformerLM(TrainingWorkload[TransformerLMConfig, TokenBatch]):
    """Next-token prediction with a pre-norm transformer; its options are the fields of `TransformerLMConfig`.

    A length counts tokens, and characters or bytes just the same. A target length is added to it: prompt and
    answer are trained on as one sequence. If `packed`, the last token of a sequence predicts nothing.
    """

    CONFIG = TransformerLMConfig

    @property
    def packed(self) -> bool:
        """Whether its batches are packed rows."""
        return self.config.packed

    def build_model(self) -> nn.Module:
        """Return the language model."""
        return LanguageModel(self.config)

    def make_batch(self, shape: BatchShape) -> TokenBatch:
        """Return random tokens: of a padded batch (batch_size, length), of a packed one (1, tokens)."""
        if shape.sequences is not None:
            return packed_batch(self._random(1, shape.tokens), shape.sequences)
        positions = whole(shape.length) + whole(shape.target_length or 0)
        tokens = self._random(shape.batch_size, positions + 1)
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], None)

    def _random(self, *shape: int) -> Tensor:
        return torch.randint(self.config.hyper.vocab, shape, device=self.device)

    def loss(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross-entropy over all tokens that another one follows."""
        logits: Tensor = self.model(batch.tokens, batch.spans)
        following = batch.following.flatten()
        # A packed row may hold nothing but sequences of one token, whose mean would not be a number.
        count = (following >= 0).sum().clamp(min=1)
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), following, reduction="sum"
        )
        return total / count


def packed_batch(tokens: Tensor, lengths: Sequence[int]) -> TokenBatch:
    """Return a row of tokens, shape (1, tokens), as sequences with these lengths, one after the other."""
    spans = Spans.of(lengths, tokens.device)
    following = tokens.roll(-1, dims=1)
    following[0, spans.ends[1:].long() - 1] = NOTHING_FOLLOWS
    return TokenBatch(tokens, following, spans)


class LanguageModel(nn.Module):
    """Tokens (batch, positions) to logits (batch, positions, vocab) of the token after each; or a packed row's."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        hyper = config.hyper
        self.embedding = nn.Embedding(hyper.vocab, hyper.dim)
        # As it is the output layer's weight too.
        nn.init.normal_(self.embedding.weight, std=hyper.dim**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Blocks(config, lambda: TransformerBlock(hyper, config.dropout))
        self.norm = nn.LayerNorm(hyper.dim)

    def forward(self, tokens: Tensor, spans: Spans | None = None) -> Tensor:
        """Return the logits."""
        x = self.blocks(self.dropout(self.embedding(tokens)), spans)
        return F.linear(self.norm(x), self.embedding.weight)


class TransformerBlock(nn.Module):
    """Causal self-attention and feed-forward, each with a residual connection."""

    def __init__(self, hyper: ModelSize, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hyper.dim)
        self.attention = SelfAttention(hyper.dim, hyper.heads, causal=True)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = feed_forward(hyper.dim, nn.GELU(), dropout)

    def forward(self, x: Tensor, angles: Tensor, spans: Spans | None = None) -> Tensor:
        """Map (batch, positions, dim) to the same shape."""
        x = x + self.dropout(self.attention(self.norm(x), angles, spans))
        output: Tensor = x + self.feed_forward(x)
        return output
