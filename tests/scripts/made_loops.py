"""Training loops that look ahead and accumulate as frameworks do, with the sizes of the batches that each step used."""

from itertools import islice

import torch


def batches(count, start=0):
    """Batches whose lengths tell them apart: of 2 examples, 10 + number long, with targets of 3."""
    lengths = range(10 + start, 10 + start + count)
    return [
        (torch.ones(1, 1, 1).expand(2, length, 4), torch.ones(2, 3))
        for length in lengths
    ]


class Trainer:
    """A model with its optimizer; `steps` are the lengths that each optimizer step was made of."""

    def __init__(self, *, skipped_steps=0):
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = []
        self._lengths = []
        self._skipped = skipped_steps

    def train(self, batch):
        self.model(batch[0]).sum().backward()
        self._lengths.append(batch[0].shape[1])

    def step(self):
        if self._skipped:  # as a gradient scaler does, whose gradients overflow
            self._skipped -= 1
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(self._lengths)
        self._lengths = []


def plain(trainer, loader, accumulate):
    """A loop of one's own; an incomplete accumulation ends with the epoch."""
    pending = 0
    for batch in loader:
        trainer.train(batch)
        pending += 1
        if pending == accumulate:
            trainer.step()
            pending = 0
    if pending:
        trainer.step()


def one_ahead(trainer, loader, accumulate):
    """As accelerate's loader: it gets a batch before it gives the one before."""
    plain(trainer, ahead_by_one(loader), accumulate)


def in_groups(trainer, loader, accumulate):
    """As the Trainer of Transformers: it gets all batches of a step, from a loader that is one ahead."""
    iterator = ahead_by_one(loader)
    while group := list(islice(iterator, accumulate)):
        for batch in group:
            trainer.train(batch)
        trainer.step()


def ahead_by_one(loader):
    iterator = iter(loader)
    current = next(iterator)
    for following in iterator:
        yield current
        current = following
    yield current
