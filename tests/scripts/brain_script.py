"""Trains with SpeechBrain, and accumulates gradients: `python brain_script.py PARAMETERS.pt`. The loss is a sum."""

import sys

import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from torch import nn

COUNT = 320
ACCUMULATION = 4


class Tagger(sb.Brain):
    """Scores of each token."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch.to(self.device).tokens.data)

    def compute_objectives(self, predictions, batch, stage):
        tokens = batch.tokens.data.long()
        losses = nn.functional.cross_entropy(
            predictions.transpose(1, 2), tokens, ignore_index=0, reduction="sum"
        )
        return losses / 100


def tokens_of(index):
    random = torch.Generator().manual_seed(index)
    return torch.randint(1, 20, (4 + 29 * index % 61,), generator=random)


def main():
    sb.utils.seed.seed_everything(7)
    data = DynamicItemDataset({str(i): {"index": i} for i in range(COUNT)})
    data.add_dynamic_item(tokens_of, takes="index", provides="tokens")
    data.set_output_keys(["id", "tokens"])
    model = nn.Sequential(nn.Embedding(20, 256), nn.Tanh(), nn.Linear(256, 20))
    brain = Tagger(
        modules={"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, 0.01),
        run_opts={"grad_accumulation_factor": ACCUMULATION},
    )
    loading = {"batch_size": 4, "shuffle": True}
    brain.fit(range(1), data, train_loader_kwargs=loading, progressbar=False)
    torch.save(brain.modules.state_dict(), sys.argv[1])
    print("optimizer steps:", brain.optimizer_step)


if __name__ == "__main__":
    main()
