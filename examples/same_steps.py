"""The same training, faster: each optimizer step's own examples, in as few micro-batches as hold them.

    python examples/same_steps.py

trains a small tagger twice, with micro-batches of 4 as they are drawn, and with SameStepBatchSampler. Both print the
loss of each step, which is the same, as it is divided by the tokens of the step; the second makes fewer micro-batches,
with less padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from batchtune import SameStepBatchSampler

EXAMPLES = 192
BATCH_SIZE = 4
ACCUMULATION = 8
# What fits: `batchtune tune` measures it, and SameStepBatchSampler.from_config reads its sampler.yaml.
BOUNDARIES = [8, 16, 32, 64]
BATCH_SIZES = [32, 16, 8, 4]


def data() -> list[Tensor]:
    """Return sequences of 2 to 64 tokens."""
    random = torch.Generator().manual_seed(0)
    lengths = (torch.randn(EXAMPLES, generator=random) + 2.5).exp().clamp(2, 64).int()
    return [torch.randint(1, 50, (int(n),), generator=random) for n in lengths]


def own_batches(sequences: list[Tensor]) -> BatchSampler:
    """Return the batches of the training as it is."""
    drawn = RandomSampler(sequences, generator=torch.Generator().manual_seed(1))
    return BatchSampler(drawn, BATCH_SIZE, drop_last=False)


def pad(examples: list[Tensor]) -> Tensor:
    """Return a padded batch; padding is 0."""
    return pad_sequence(examples, batch_first=True)


def in_steps(loader: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the micro-batches of each step, always as many."""
    batches = iter(loader)
    while step := list(itertools.islice(batches, ACCUMULATION)):
        yield step


def train(steps: Iterable[list[Tensor]]) -> tuple[list[float], int, int]:
    """Return the loss of each optimizer step of an epoch, and how many micro-batches and positions it took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    micro_batches = 0
    positions = 0
    for step in steps:
        tokens = sum(int((batch != 0).sum()) for batch in step)
        loss_of_step = 0.0
        for batch in step:
            scores = model(batch).transpose(1, 2)
            summed = nn.functional.cross_entropy(
                scores, batch, ignore_index=0, reduction="sum"
            )
            loss = summed / tokens
            loss.backward()
            loss_of_step += loss.item()
            micro_batches += 1
            positions += batch.numel()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of_step)
    return losses, micro_batches, positions


def trained() -> list[tuple[list[float], int, int]]:
    """Train in both ways, and return what `train` does of each."""
    sequences = data()
    dataset: Any = sequences
    own = DataLoader(dataset, batch_sampler=own_batches(sequences), collate_fn=pad)
    sampler = SameStepBatchSampler(
        own_batches(sequences),
        [len(sequence) for sequence in sequences],
        bucket_boundaries=BOUNDARIES,
        bucket_batch_sizes=BATCH_SIZES,
        own_accumulate=ACCUMULATION,
        accumulate="fewest",
    )
    cut = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
    return [train(in_steps(own)), train(sampler.steps(cut))]


def main() -> None:
    """Print the losses of both."""
    for name, found in zip(("as drawn", "cut by length"), trained(), strict=True):
        losses, micro_batches, positions = found
        shown = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name}: {micro_batches} micro-batches, {positions} positions: {shown}")


if __name__ == "__main__":
    main()
