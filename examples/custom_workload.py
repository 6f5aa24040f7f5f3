"""A workload of your own, for --workload examples/custom_workload.py:TinyTagger."""

import torch
from torch import nn


class TinyTagger:
    """Gives each token one of many tags: one layer of a transformer. --set dim=128 makes it wider."""

    def __init__(self, dim: int = 64, vocab: int = 10_000, tags: int = 2000):
        self.dim, self.vocab, self.tags = dim, vocab, tags

    def setup(self, device):
        """Builds the model and its optimizer, once."""
        embed, classify = (
            nn.Embedding(self.vocab, self.dim),
            nn.Linear(self.dim, self.tags),
        )
        encode = nn.TransformerEncoderLayer(
            self.dim, nhead=4, dim_feedforward=256, batch_first=True
        )
        self.model = nn.Sequential(embed, encode, classify).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def make_batch(self, shape):
        """Makes a padded batch of that shape on the device; what is in it does not matter."""
        size, device = (
            (shape.batch_size, int(shape.length)),
            self.model[0].weight.device,
        )
        return torch.randint(self.vocab, size, device=device), torch.randint(
            self.tags, size, device=device
        )

    def step(self, batch):
        """Runs one full training step, as your own training does."""
        self.optimizer.zero_grad()
        scores = self.model(batch[0])
        nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten()).backward()
        self.optimizer.step()
