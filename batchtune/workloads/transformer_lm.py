"""`builtin:transformer-lm`: a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchtune.shapes import BatchShape
from batchtune.workloads.training import (
    Blocks,
    SelfAttention,
    Size,
    TrainingConfig,
    TrainingWorkload,
    feed_forward,
    whole,
)


class TransformerLMConfig(TrainingConfig, frozen=True, kw_only=True):
    """Options of `builtin:transformer-lm`.

    Sizes and their parameters (input and output embedding are one matrix): tiny 1.4 million, small 5.3
    million, base 110 million, large 335 million.
    """

    SIZES: ClassVar[Mapping[str, Size]] = {
        "tiny": Size(dim=128, layers=2, heads=2, vocab=8192),
        "small": Size(dim=256, layers=4, heads=4, vocab=8192),
        "base": Size(dim=768, layers=12, heads=12, vocab=32000),
        "large": Size(dim=1024, layers=24, heads=16, vocab=32000),
    }


class TransformerLM(TrainingWorkload[TransformerLMConfig, Tensor]):
    """Next-token prediction with a pre-norm transformer; its options are the fields of `TransformerLMConfig`.

    A length counts tokens, and characters or bytes just the same. A target length is added to it: prompt and
    answer are trained on as one sequence.
    """

    CONFIG = TransformerLMConfig

    def build_model(self) -> nn.Module:
        """Return the language model."""
        return LanguageModel(self.config)

    def make_batch(self, shape: BatchShape) -> Tensor:
        """Random tokens, (batch_size, positions + 1): each position predicts the token after it."""
        positions = whole(shape.length) + whole(shape.target_length or 0)
        return torch.randint(
            self.config.hyper.vocab,
            (shape.batch_size, positions + 1),
            device=self.device,
        )

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy over all positions."""
        logits: Tensor = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class LanguageModel(nn.Module):
    """Tokens (batch, positions) to logits (batch, positions, vocab) of the token after each."""

    def __init__(self, config: TransformerLMConfig) -> None:
        super().__init__()
        hyper = config.hyper
        self.embedding = nn.Embedding(hyper.vocab, hyper.dim)
        nn.init.normal_(
            self.embedding.weight, std=hyper.dim**-0.5
        )  # as it is the output layer's weight too
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Blocks(config, lambda: Block(hyper, config.dropout))
        self.norm = nn.LayerNorm(hyper.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.blocks(self.dropout(self.embedding(tokens)))
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Causal self-attention and feed-forward, each with a residual connection."""

    def __init__(self, hyper: Size, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hyper.dim)
        self.attention = SelfAttention(hyper.dim, hyper.heads, causal=True)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = feed_forward(hyper.dim, nn.GELU(), dropout)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map (batch, positions, dim) to the same shape."""
        x = x + self.dropout(self.attention(self.norm(x), angles))
        output: Tensor = x + self.feed_forward(x)
        return output
