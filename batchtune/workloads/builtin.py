"""The built-in workloads: `conformer-ctc`, a speech recogniser with CTC loss, and `transformer-lm`, a causal LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchtune.results import BatchShape
from batchtune.workloads.training import (
    Blocks,
    ModelSize,
    Natural,
    SelfAttention,
    Spans,
    TrainingConfig,
    TrainingWorkload,
    feed_forward,
    whole,
)

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
