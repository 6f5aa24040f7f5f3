"""A training step whose memory and time depend on the padded length alone."""

import time

import torch


class Steady:
    """Holds 1 MiB a unit of length; a step takes 10 µs a unit."""

    def setup(self, device):
        self.weight = torch.ones(4, requires_grad=True)

    def make_batch(self, shape):
        self.padded = shape.padded_length
        return torch.ones(int(shape.padded_length * (1 << 20)), dtype=torch.uint8)

    def step(self, batch):
        self.weight.sum().backward()
        until = time.perf_counter() + 1e-5 * self.padded
        while time.perf_counter() < until:
            pass
