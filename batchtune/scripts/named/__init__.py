"""Training scripts for workloads that are named by their framework: `torch:FILE.py:NAME`, `transformers:FOLDER`.

Such a name stands for a command, which is run like any training script. `train` is the script for torch, transformers
and Lightning. The first two make up examples; Lightning's modules and SpeechBrain's scripts bring their own data.
Options from `--set` are the framework's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchtune.errors import UsageError, shortened

# The CLI option that each framework requires. Other frameworks reject it.
FLAGS = {
    "torch": "loss",
    "transformers": "task",
    "lightning": None,
    "speechbrain": "hparams",
}


def named_command(
    workload: str, value: str | None, settings: Sequence[str]
) -> list[str]:
    """Return the words of the training script that a workload stands for.

    `value` is that of the framework's flag, `settings` are those of `--set`. Raises UsageError if a file is missing.
    """
    kind, _, subject = workload.partition(":")
    location, _, name = subject.partition(":")
    path = _absolute(location)
    if kind == "speechbrain":
        pairs = [f"--{pair}" for pair in settings]
        return [sys.executable, path, _absolute(str(value)), *pairs]
    words = [sys.executable, "-m", "batchtune.scripts.named.train", kind, path, name]
    if value is not None:
        words.append(f"{FLAGS[kind]}={value}")
    return [*words, *settings]


def script_options(
    workload: str, options: dict[str, Any], unit: str | None
) -> dict[str, Any]:
    """Return the options of the script: made examples have no lengths to compare with the manifest's.

    Raises UsageError if the lengths are not counted in what the examples are made of, and no option says how they are.
    """
    if not workload.startswith(("torch:", "transformers:")):
        return options
    if "per_unit" not in options and unit not in ("tokens", "frames", "samples"):
        raise UsageError(
            f"the lengths are in {unit or 'an unknown unit'}, the examples in tokens, frames or samples",
            "Give how many of them are one unit with --per-unit: 16000 samples or 100 frames, for instance.",
        )
    return {"per_unit": 1.0, "target_per_unit": 1.0, **options}


def _absolute(location: str) -> str:
    """Return the absolute path of a file or folder: scripts run in a copy of the working folder."""
    path = Path(location)
    if not path.exists():
        raise UsageError(
            f"{shortened(location)} does not exist",
            "Write torch:FILE.py:NAME, lightning:FILE.py:NAME, speechbrain:FILE.py, or transformers:FOLDER with a "
            "config.json in the folder: batchtune downloads nothing.",
        )
    return str(path.absolute())
