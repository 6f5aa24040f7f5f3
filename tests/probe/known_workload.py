"""A workload whose memory is known: it holds exactly a·B·L + b·B·L² bytes, and does a real optimizer step.

The optimizer is written out: torch's own import its compiler, which takes each worker process another second.
"""

import os
import sys

import torch


class Known:
    """Prints to both streams all the time, as real training code does."""

    def __init__(self, a=20_000.0, b=400.0):
        self.a, self.b = a, b

    def setup(self, device):
        print("setting up", flush=True)
        self.model = torch.nn.Linear(64, 64).to(device)
        self.momentum = {}

    def size(self, shape):
        return shape.batch_size * shape.length * (self.a + self.b * shape.length)

    def make_batch(self, shape):
        print("{not json", file=sys.stderr, flush=True)
        return torch.ones(int(self.size(shape)), dtype=torch.uint8)

    def step(self, batch):
        os.write(1, b"step\n")
        loss = self.model(batch[:64].float()).square().mean()
        loss.backward()
        descend(self.model, self.momentum)


class Packed(Known):
    """The same of packed batches: a row holds exactly a·Σ L + b·Σ L² + c·n bytes."""

    packed = True

    def __init__(self, a=40_000.0, b=100.0, c=10_000.0):
        super().__init__(a, b)
        self.c = c

    def size(self, shape):
        per_token = self.a * shape.tokens + self.b * shape.squared_tokens
        return per_token + self.c * shape.batch_size


def descend(model, momentum):
    """A step of gradient descent with momentum, whose state the first step makes."""
    with torch.no_grad():
        for parameter in model.parameters():
            state = momentum.setdefault(parameter, torch.zeros_like(parameter))
            state.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * state)
            parameter.grad = None
