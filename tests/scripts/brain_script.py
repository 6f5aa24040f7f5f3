"""Trains with SpeechBrain, and accumulates gradients: `python brain_script.py PARAMETERS.pt`. The loss is a sum."""

import sys

import speechbrain as sb
import torch
from torch import nn


class Tagger(sb.Brain):
    """Scores of each token."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        scores = predictions.transpose(1, 2)
        losses = nn.functional.cross_entropy(
            scores, batch, ignore_index=0, reduction="sum"
        )
        return losses / 100


def pad(examples):
    return nn.utils.rnn.pad_sequence(examples, True)


sb.utils.seed.seed_everything(7)
data = [torch.arange(4 + 29 * i % 61) % 19 + 1 for i in range(320)]
model = nn.Sequential(nn.Embedding(20, 256), nn.Tanh(), nn.Linear(256, 20))
brain = Tagger(
    {"model": model},
    lambda parameters: torch.optim.SGD(parameters, 0.01),
    run_opts={"grad_accumulation_factor": 4},
)
loading = {"batch_size": 4, "shuffle": True, "collate_fn": pad}
brain.fit(range(1), data, train_loader_kwargs=loading, progressbar=False)
torch.save(model.state_dict(), sys.argv[1])
print("optimizer steps:", brain.optimizer_step)
