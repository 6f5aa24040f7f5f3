"""Self-attention with rotary positions, and the feed-forward part: what both built-in models are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotary_angles(positions: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of rotary position embeddings (Su et al., 2021, arXiv:2104.09864, equation 15).

    They are computed for each batch, not kept in a table: a table grows with the longest batch seen so far
    and would add it to the memory of every later trial.

    Returns:
        Shape (positions, head_dim / 2), radians, fp32.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    return torch.outer(torch.arange(positions, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle (Su et al., RoFormer, 2021)."""
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head self-attention.

    There is no mask, as every example of a batch has its full length, and no dropout inside, so that torch's
    fused kernels are used on every device and memory does not grow with the square of the length.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.queries_keys_values = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map (batch, positions, dim) to the same shape."""
        batch_size, positions, dim = x.shape
        projected = self.queries_keys_values(x).view(batch_size, positions, 3, self.heads, dim // self.heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(queries, angles), rotate(keys, angles), values, is_causal=self.causal
        )
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch_size, positions, dim))
        return output


def feed_forward(dim: int, activation: nn.Module, dropout: float) -> nn.Sequential:
    """LayerNorm and two linear layers with four times the width between them."""
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, 4 * dim),
        activation,
        nn.Dropout(dropout),
        nn.Linear(4 * dim, dim),
        nn.Dropout(dropout),
    )
