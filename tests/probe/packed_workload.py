"""Packed workloads whose memory is known: a row holds exactly a·Σ L + b·Σ L² + c·n bytes; and wrong ones."""

import torch
from known_workload import Known


class Packed(Known):
    packed = True

    def __init__(self, a=40_000.0, b=100.0, c=10_000.0):
        super().__init__(a, b)
        self.c = c

    def size(self, shape):
        per_token = self.a * shape.tokens + self.b * shape.squared_tokens
        return per_token + self.c * shape.batch_size

    def make_batch(self, shape):
        return torch.ones(int(self.size(shape)), dtype=torch.uint8)
