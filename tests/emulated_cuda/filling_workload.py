"""A layer whose parameters, gradients and states of AdamW take 64 MiB each, and batches of 1 MiB for each example."""

import torch

MIB = 1 << 20


class Filling:
    """Trains on a few numbers of the batch."""

    def setup(self, device):
        self.device = device
        self.layer = torch.nn.Linear(4096, 4096, bias=False, device=device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), foreach=False)

    def make_batch(self, shape):
        return torch.ones(shape.batch_size, MIB, dtype=torch.uint8, device=self.device)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.layer(batch[:1, :4096].float()).square().mean().backward()
        self.optimizer.step()
