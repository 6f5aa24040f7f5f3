"""A workload of your own: a tagger of tokens, for --workload examples/custom_workload.py:TinyTagger."""
# ruff: noqa: D101, D102 - the comments say it in less room

import torch
from torch import nn


class TinyTagger:
    def __init__(self, dim: int = 128, vocab: int = 10_000, tags: int = 50):  # set with --set dim=256
        self.dim, self.vocab, self.tags = dim, vocab, tags

    def setup(self, device):  # once: the model and its optimizer
        self.device = device
        layer = nn.TransformerEncoderLayer(self.dim, nhead=4, dim_feedforward=4 * self.dim, batch_first=True)
        parts = [nn.Embedding(self.vocab, self.dim), nn.TransformerEncoder(layer, 2), nn.Linear(self.dim, self.tags)]
        self.model = nn.Sequential(*parts).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def make_batch(self, shape):  # for each shape: a padded batch on the device
        size = (shape.batch_size, int(shape.length))
        tokens = torch.randint(self.vocab, size, device=self.device)
        return tokens, torch.randint(self.tags, size, device=self.device)

    def step(self, batch):  # a full training step, as your training runs it
        tokens, tags = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tags.flatten()).backward()
        self.optimizer.step()
