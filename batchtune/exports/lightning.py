"""Lightning: a LightningDataModule with our own batch sampler, and the Trainer that leaves it alone."""

from __future__ import annotations

from batchtune.exports.base import Export, Tuned
from batchtune.exports.snippets import python_snippet

_REMARKS = (
    "`lengths` are those of the data set's examples, in its order and in the unit above; or the path of the manifest "
    "that was tuned on, whose row i is example i",
    "use_distributed_sampler=False is needed: each rank takes its own batches, and Lightning would deal them once more",
    "Batches differ in size: tell `self.log` theirs with batch_size=",
)
_CODE = '''\
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from batchtune import BucketBatchSampler

CONFIG = @CONFIG@


class BucketDataModule(LightningDataModule):
    """Training batches; collate_fn makes a padded batch of a list of examples."""

    def __init__(self, dataset, lengths, collate_fn, num_workers=4):
        super().__init__()
        self.dataset, self.lengths = dataset, lengths
        self.collate_fn, self.num_workers = collate_fn, num_workers

    def train_dataloader(self):
        sampler = BucketBatchSampler.from_config(CONFIG, self.lengths)
        return DataLoader(
            self.dataset, batch_sampler=sampler, collate_fn=self.collate_fn, num_workers=self.num_workers
        )


def fit(model, data, **options):
    """Trains a LightningModule on a BucketDataModule; options are the Trainer's."""
    Trainer(use_distributed_sampler=False, **options).fit(model, datamodule=data)
'''


def render(tuned: Tuned) -> str:
    """The snippet.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    return python_snippet(tuned, "Lightning", _REMARKS, _CODE)


EXPORT = Export(name="lightning", title="Lightning", file="batchtune_lightning.py", render=render)
