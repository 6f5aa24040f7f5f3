"""Plain PyTorch: a DataLoader with our own batch sampler, and the loop around it."""

from __future__ import annotations

from batchtune.exports.base import Export, Tuned
from batchtune.exports.snippets import python_snippet

_REMARKS = (
    "`lengths` are those of the data set's examples, in its order and in the unit above; or the path of the manifest "
    "that was tuned on, whose row i is example i",
    "With DistributedDataParallel each rank takes its own batches, as many as every other rank: no DistributedSampler "
    "besides, and the process group before the first batch",
)
_CODE = '''\
from torch.utils.data import DataLoader

from batchtune import BucketBatchSampler

CONFIG = @CONFIG@


def train_loader(dataset, lengths, collate_fn, num_workers=4):
    """The loader; collate_fn makes a padded batch of a list of examples."""
    sampler = BucketBatchSampler.from_config(CONFIG, lengths)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def train(model, optimizer, loss_of, loader, epochs):
    """Trains; loss_of(model, batch) is the loss of a batch."""
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
'''


def render(tuned: Tuned) -> str:
    """The snippet.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    return python_snippet(tuned, "PyTorch", _REMARKS, _CODE)


EXPORT = Export(name="pytorch", title="PyTorch", file="batchtune_pytorch.py", render=render)
