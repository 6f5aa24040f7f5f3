"""A script that accelerate trains on several ranks: `torchrun ranked_script.py [FAULT]`; only rank 1 has the fault."""

import contextlib
import sys
import time

import torch
from accelerate import Accelerator
from frames import Lengths, collate, layers
from torch import distributed
from torch.utils.data import DataLoader

FAULT = "".join(sys.argv[1:])
FAILS_ABOVE = 200  # examples


def fail():
    """Have the fault."""
    match FAULT:
        case "caught":
            torch.empty(1 << 42)
        case "hangs":
            time.sleep(1000)


class Model(torch.nn.Module):
    """Two layers, which fail on rank 1 in a large batch."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, batch):
        """Return the loss."""
        if len(batch) > FAILS_ABOVE and distributed.get_rank() == 1:
            fail()
        return self.layers(batch).square().mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = Model()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Lengths(400), 4, shuffle=True, collate_fn=collate)
    # It gets one batch ahead.
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    for _ in range(4):
        for batch in loader:
            with (
                contextlib.suppress(RuntimeError if FAULT == "caught" else ()),
                accelerator.accumulate(model),
            ):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
