"""Transformers: a Trainer that takes its training batches from our own batch sampler."""

from __future__ import annotations

from batchtune.exports.base import Export, Tuned
from batchtune.exports.snippets import LengthLimits, python_snippet

_REMARKS = (
    "`lengths` are those of the training examples, in their order and in the unit above; or the path of the manifest "
    "that was tuned on, whose row i is example i",
    "per_device_train_batch_size, group_by_length and dataloader_drop_last do nothing here: the table decides",
    "remove_unused_columns does nothing here: data_collator is given all columns of an example",
    "The loader is returned as it is, not prepared by accelerate: each process takes its own batches",
)
_CODE = '''\
from torch.utils.data import DataLoader
from transformers import Trainer

from batchtune import BucketBatchSampler

CONFIG = @CONFIG@


class BucketTrainer(Trainer):
    """A Trainer: BucketTrainer(lengths=..., model=..., args=..., train_dataset=..., data_collator=...)."""

    def __init__(self, *args, lengths, **kwargs):
        super().__init__(*args, **kwargs)
        self.lengths = lengths

    def get_train_dataloader(self):
        return DataLoader(
            self.train_dataset,
            batch_sampler=BucketBatchSampler.from_config(CONFIG, self.lengths),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
        )
'''


def render(tuned: Tuned) -> str:
    """The snippet.

    Raises:
        ResultError: The sweep recommends nothing.
    """
    limits = LengthLimits.of(tuned.sweep)
    remarks = list(_REMARKS)
    if limits:
        remarks.append(
            "A datasets.Dataset with these lengths in a column, such as length, can leave out what was left out at "
            f'tuning itself: dataset.filter(lambda length: {limits.condition("length")}, input_columns=["length"])'
        )
    return python_snippet(tuned, "Transformers", remarks, _CODE)


EXPORT = Export(name="transformers", title="Transformers", file="batchtune_transformers.py", render=render)
