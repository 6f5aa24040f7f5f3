"""Trains a LightningModule on its own data with Lightning's Trainer, for `--workload lightning:FILE.py:NAME`.

Run by itself: `python -m batchtune.scripts.named.lightning_script FILE.py NAME max_steps=2 …`. The module has a
`train_dataloader`, or `data=NAME` names a LightningDataModule of the file. Other options are the Trainer's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from batchtune.scripts.named.examples import build
from batchtune.workloads import parse_options


def train(file: str, name: str, options: dict[str, Any]) -> None:
    """Train, without validation, logs and checkpoints."""
    model = build(file, name, {})
    data = None
    if "data" in options:
        data = build(file, options.pop("data"), {})
    # Lightning under its older name, if the file imports that.
    is_older = "pytorch_lightning" in sys.modules
    package = import_module("pytorch_lightning" if is_older else "lightning.pytorch")
    defaults = {
        "devices": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    package.Trainer(**{**defaults, **options}).fit(model, datamodule=data)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], parse_options(sys.argv[3:]))
