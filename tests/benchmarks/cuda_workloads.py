"""A training whose process holds more than its batches need, for `cuda_truth.py`."""

from __future__ import annotations

import torch

from batchtune import BatchShape
from batchtune.workloads.builtin import TransformerLM

MIB = 1 << 20
STEPS_BETWEEN_VALIDATIONS = 50


class Surrounded:
    """`builtin:transformer-lm` of size base in bf16.

    Args:
        held_mib: What the process holds besides, in blocks of 1 MiB.
        accumulate: Micro-batches of a step.
        validates: Whether a validation batch follows every 50th step.
        packed: Whether batches are packed rows.
        apart: Whether each batch is one micro-batch, and a step has as many of them, instead of the same one again.
    """

    def __init__(
        self,
        held_mib=0,
        accumulate=1,
        validates=False,
        packed=False,
        apart=False,
    ):
        self.lm = TransformerLM(size="base", dtype="bf16", packed=packed)
        self.packed = packed
        self.apart = apart
        self.held_mib = held_mib
        self.accumulate = accumulate
        self.validates = validates
        self.steps = 0

    def setup(self, device):
        """Build the model, in between the blocks."""
        self.held = [self._block(device) for _ in range(self.held_mib // 2)]
        self.lm.setup(device)
        self.held += [self._block(device) for _ in range(self.held_mib // 2)]

    def _block(self, device):
        return torch.empty(MIB, dtype=torch.uint8, device=device)

    def make_batch(self, shape):
        """Make random tokens."""
        return self.lm.make_batch(shape)

    def step(self, batch):
        """Train on the batch as often as micro-batches are accumulated; then validate, if it is time."""
        for _ in range(1 if self.apart else self.accumulate):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.lm.loss(batch)
            loss.backward()
        del loss
        self.steps += 1
        if self.apart and self.steps % self.accumulate:
            return
        self.lm.optimizer.step()
        self.lm.optimizer.zero_grad(set_to_none=True)
        if self.validates and self.steps % STEPS_BETWEEN_VALIDATIONS == 0:
            self._validate()

    def _validate(self):
        self.lm.model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            self.lm.loss(self.lm.make_batch(BatchShape(32, 512.0)))
        self.lm.model.train()
