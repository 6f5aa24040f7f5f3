"""Python code around batchtune's own sampler, which can run every row: for PyTorch and its trainers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from batchtune.exports.base import Export, Tuned, choose_row
from batchtune.exports.text import LengthLimits, about_data, about_row, commented, literal, padded_remark
from batchtune.results import ReadingRecord, Sweep

_LENGTHS = (
    "`lengths` are those of the data set's examples, in its order and in the unit above; or the path of the manifest "
    "that was tuned on, whose row i is example i"
)
_LEAVE_OUT = (
    "Leave them out of training, too: dataset, lengths = within_limits(dataset, lengths), before all else; the "
    "sampler refuses longer ones. `lengths` is then an array, not the path of the manifest"
)
_FILTER = (
    "A datasets.Dataset with these lengths in a column, such as length, can leave out what was left out at "
    'tuning itself: dataset.filter(lambda length: @CONDITION@, input_columns=["length"])'
)
_IMPORT_OURS = """\

from batchtune import BucketBatchSampler

CONFIG = @CONFIG@
"""
_WITHIN = '''

def within_limits(dataset, lengths):
    """The examples that were tuned with, and their lengths; `lengths` is an array."""
    lengths = np.asarray(lengths)
    kept = np.flatnonzero(@CONDITION@)
    return Subset(dataset, kept.tolist()), lengths[kept]
'''
_LOADER = '''

def train_loader(dataset, lengths, collate_fn, num_workers=4):
    """The loader; collate_fn makes a padded batch of a list of examples."""
    sampler = BucketBatchSampler.from_config(CONFIG, lengths)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def train(model, optimizer, loss_of, loader, epochs):
    """Trains; loss_of(model, batch) is the loss of a batch."""
@PREPARE@    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, @BATCH@)
            @BACKWARD@
            optimizer.step()
'''
_PREPARE = """\
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
"""
_DATA_MODULE = '''

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
_TRAINER = '''

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


def _how_read(sweep: Sweep) -> Iterator[str]:
    """Say what `from_config` must be given to read the manifest as the sweep did; nothing if it finds out itself."""
    reading = sweep.lengths.reading or ReadingRecord()
    values = ((name, getattr(reading, name)) for name in reading.__struct_fields__)
    given = [f"{name}={literal(value)}" for name, value in values if isinstance(value, str)]
    if given:
        yield f"With the path of the manifest, from_config needs to know how it is read: {', '.join(given)}"


def _render(tuned: Tuned, *, title: str, remarks: tuple[str, ...], imports: str, code: str) -> str:
    """Write comments, then the code; remarks with a condition only where examples were left out at tuning."""
    sweep = tuned.sweep
    chosen = choose_row(sweep, title)
    limits = LengthLimits.of(sweep)
    condition = limits.condition("length")
    head = [
        f"{title}: {about_row(chosen.row, sweep)}",
        about_data(sweep),
        *(remark.replace("@CONDITION@", condition) for remark in remarks if limits or "@CONDITION@" not in remark),
        *padded_remark(sweep),
        *limits.left_out,
    ]
    if limits:
        head.append(_LEAVE_OUT)
        sides = [LengthLimits(limits.shortest, None, ()), LengthLimits(None, limits.longest, ())]
        kept = [side.condition("lengths") for side in sides if side]
        kept = kept if len(kept) == 1 else [f"({side})" for side in kept]
        code = _WITHIN.replace("@CONDITION@", " & ".join(kept)) + code
        imports = f"import numpy as np\n{imports}".replace("import DataLoader\n", "import DataLoader, Subset\n")
    else:
        head += _how_read(sweep)
    return commented(head) + imports + _IMPORT_OURS.replace("@CONFIG@", literal(tuned.config)) + code


def _export(name: str, title: str, *, remarks: tuple[str, ...], imports: str, code: str) -> Export:
    render = partial(_render, title=title, remarks=remarks, imports=imports, code=code)
    return Export(name=name, title=title, file=f"batchtune_{name}.py", render=render)


EXPORTS = (
    _export(
        "transformers",
        "Transformers",
        remarks=(
            _LENGTHS.replace("the data set's examples, in its order", "the training examples, in their order"),
            "per_device_train_batch_size, group_by_length and dataloader_drop_last do nothing here: the table decides",
            "remove_unused_columns does nothing here: data_collator is given all columns of an example",
            "The loader is returned as it is, not prepared by accelerate: each process takes its own batches",
            _FILTER,
        ),
        imports="from torch.utils.data import DataLoader\nfrom transformers import Trainer\n",
        code=_TRAINER,
    ),
    _export(
        "accelerate",
        "Accelerate",
        remarks=(
            _LENGTHS,
            "The loader is left out of `prepare`: the sampler deals each process its own batches, as many as every "
            "other has, and accelerate would deal them once more",
            "So batches are sent to the device by hand, and `accelerator.accumulate` is not told where an epoch ends",
        ),
        imports=(
            "from accelerate import Accelerator\nfrom accelerate.utils import send_to_device\n"
            "from torch.utils.data import DataLoader\n"
        ),
        code=_LOADER.replace("@PREPARE@", _PREPARE)
        .replace("@BATCH@", "send_to_device(batch, accelerator.device)")
        .replace("@BACKWARD@", "accelerator.backward(loss)"),
    ),
    _export(
        "lightning",
        "Lightning",
        remarks=(
            _LENGTHS,
            "use_distributed_sampler=False is needed: each rank takes its own batches, and Lightning would deal them "
            "once more",
            "Batches differ in size: tell `self.log` theirs with batch_size=",
        ),
        imports="from lightning import LightningDataModule, Trainer\nfrom torch.utils.data import DataLoader\n",
        code=_DATA_MODULE,
    ),
    _export(
        "pytorch",
        "PyTorch",
        remarks=(
            _LENGTHS,
            "With DistributedDataParallel each rank takes its own batches, as many as every other rank: no "
            "DistributedSampler besides, and the process group before the first batch",
        ),
        imports="from torch.utils.data import DataLoader\n",
        code=_LOADER.replace("@PREPARE@", "").replace("@BATCH@", "batch").replace("@BACKWARD@", "loss.backward()"),
    ),
)
