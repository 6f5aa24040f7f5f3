"""Accelerate: model and optimizer prepared, the batches from our own batch sampler."""

from __future__ import annotations

from batchtune.exports.base import Export, Tuned
from batchtune.exports.snippets import python_snippet

_REMARKS = (
    "`lengths` are those of the data set's examples, in its order and in the unit above; or the path of the manifest "
    "that was tuned on, whose row i is example i",
    "The loader is left out of `prepare`: the sampler deals each process its own batches, as many as every other has, "
    "and accelerate would deal them once more",
    "So batches are sent to the device by hand, and `accelerator.accumulate` is not told where an epoch ends",
)
_CODE = '''\
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from batchtune import BucketBatchSampler

CONFIG = @CONFIG@


def train_loader(dataset, lengths, collate_fn, num_workers=4):
    """The loader; collate_fn makes a padded batch of a list of examples."""
    sampler = BucketBatchSampler.from_config(CONFIG, lengths)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def train(model, optimizer, loss_of, loader, epochs):
    """Trains; loss_of(model, batch) is the loss of a batch."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, send_to_device(batch, accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
'''


def render(tuned: Tuned) -> str:
    """The snippet.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    return python_snippet(tuned, "Accelerate", _REMARKS, _CODE)


EXPORT = Export(name="accelerate", title="Accelerate", file="batchtune_accelerate.py", render=render)
