"""Models and data that tests name on the command line."""

import torch
from torch import nn


class Tagger(nn.Module):
    """Classifies each token."""

    def __init__(self, dim=8):
        super().__init__()
        self.embedding = nn.Embedding(100, dim)
        self.output = nn.Linear(dim, 30)

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def recognizer():
    """Makes a model of frames."""
    return nn.Linear(80, 30)


tagger = Tagger()


def energy(outputs, inputs):
    assert outputs.shape[:2] == inputs.shape
    return outputs.square().mean()


def lit():
    """Makes a LightningModule, here so that the others need no Lightning."""
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Tagger()

        def training_step(self, batch):
            return energy(self.model(batch), batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.randint(100, (8, 12)))

    return Lit()
