"""A small speech model as a workload: `--workload tests/speech_workload.py:SpeechTagger`, lengths in seconds."""

import torch
from torch import nn

FRAMES_PER_SECOND = 100
FEATURES = 80
STRIDE = 2
LABELS = 500


class SpeechTagger:
    """Gives frames of speech labels: three strided convolutions, then six transformer layers.

    Each convolution halves the frames (10 ms at first). It takes one thread: where others use the processor too,
    two wait for each other most of the time. A step at a limit of 400 MiB takes a fraction of a second. Without
    dropout, attention keeps no matrix of all pairs: memory is then nearly linear in the length.
    """

    def __init__(
        self,
        dim=64,
        layers=6,
        dropout=0.1,
    ):
        self.dim = dim
        self.layers = layers
        self.dropout = dropout

    def setup(self, device):
        """Builds the model and AdamW."""
        torch.set_num_threads(1)
        convolutions = []
        for channels in (FEATURES, self.dim, self.dim):
            convolutions += [
                nn.Conv1d(channels, self.dim, 5, STRIDE, padding=2),
                nn.GELU(),
            ]
        self.subsample = nn.Sequential(*convolutions).to(device)
        layer = nn.TransformerEncoderLayer(
            self.dim,
            nhead=4,
            dim_feedforward=4 * self.dim,
            dropout=self.dropout,
            batch_first=True,
        )
        encoder = nn.TransformerEncoder(
            layer, num_layers=self.layers, enable_nested_tensor=False
        )
        self.tag = nn.Sequential(encoder, nn.Linear(self.dim, LABELS)).to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(
            [*self.subsample.parameters(), *self.tag.parameters()]
        )

    def make_batch(self, shape):
        """Makes frames of shape (batch, 80, frames), and the labels of what is left of them, (batch, tags)."""
        frames = max(1, round(shape.length * FRAMES_PER_SECOND))
        tags = -(-frames // STRIDE**3)
        labels = torch.randint(LABELS, (shape.batch_size, tags), device=self.device)
        return torch.randn(
            shape.batch_size, FEATURES, frames, device=self.device
        ), labels

    def step(self, batch):
        """One step of training with a loss at each tag."""
        frames, labels = batch
        self.optimizer.zero_grad()
        scores = self.tag(self.subsample(frames).transpose(1, 2))
        nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).backward()
        self.optimizer.step()
