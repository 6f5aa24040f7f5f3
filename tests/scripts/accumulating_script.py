"""Trains for 20 steps of 4 batches: `python accumulating_script.py KIND OUT.pt`. The loss is a sum.

It saves the parameters, and the examples and the loss of each step.
"""

import sys

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

kind, out = sys.argv[1:]
given = []
losses = []
steps = []
base = nn.Module
if kind == "lightning":
    import lightning

    base = lightning.LightningModule


class Model(base):
    """Finds the number that all tokens of an example are."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Sequential(
            nn.Embedding(321, 256), nn.Tanh(), nn.Linear(256, 321)
        )

    def forward(self, batch):
        given.extend(batch[:, 0].tolist())
        scores = self.scores(batch).transpose(1, 2)
        loss = nn.functional.cross_entropy(
            scores, batch, ignore_index=0, reduction="sum"
        )
        losses.append(float(loss))
        return (loss / 100,)

    def training_step(self, batch, _):
        return self(batch)[0]

    def configure_optimizers(self):
        return optimizer_of(self.parameters())


def on_step(*_):
    steps.append((sorted(given), sum(losses)))
    given.clear()
    losses.clear()


def pad(examples):
    return nn.utils.rnn.pad_sequence(examples, True)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, 0.1)


torch.manual_seed(7)
register_optimizer_step_post_hook(on_step)
data = [torch.full((4 + 29 * i % 61,), i + 1) for i in range(320)]
model = Model()
optimizer = optimizer_of(model.parameters())
loading = {"batch_size": 4, "shuffle": True, "collate_fn": pad}
loader = DataLoader(data, **loading)
if kind == "plain":
    for number, batch in enumerate(loader, 1):
        model(batch)[0].backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
elif kind == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch)[0])
            optimizer.step()
            optimizer.zero_grad()
elif kind == "lightning":
    settings = {"logger": False, "enable_checkpointing": False}
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, **settings
    ).fit(model, loader)
elif kind == "trainer":
    from transformers import Trainer, TrainingArguments

    settings = {"num_train_epochs": 1, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        remove_unused_columns=False,
        optim="sgd",
        learning_rate=0.1,
        **settings,
    )
    Trainer(model, arguments, lambda examples: {"batch": pad(examples)}, data).train()
else:
    import speechbrain as sb

    class Brain(sb.Brain):
        """The same, with SpeechBrain's ReproducibleRandomSampler."""

        def compute_forward(self, batch, stage):
            return self.modules.model(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions[0]

    factor = {"grad_accumulation_factor": 4}
    brain = Brain({"model": model}, optimizer_of, run_opts=factor)
    brain.fit(range(1), data, train_loader_kwargs=loading, progressbar=False)
torch.save((model.state_dict(), steps), out)
