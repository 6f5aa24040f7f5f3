"""Training scripts for workloads that are named by their framework: `torch:FILE.py:NAME`, `transformers:CONFIG`.

Such a name stands for a command, which is run like any training script. The scripts of torch, transformers and
Lightning are modules of this package. The first two make up examples; Lightning's modules and SpeechBrain's scripts
bring their own data. Options from `--set` are the framework's own.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.lengths import Lengths
from batchtune.workloads import parse_options


class Kind(NamedTuple):
    """A framework."""

    flags: list[str]  # options of the command line that it needs, and no other kind
    packages: list[str]


KINDS = {
    "torch": Kind(["loss"], []),
    "transformers": Kind(["task"], ["transformers", "accelerate"]),
    "lightning": Kind([], []),  # or pytorch_lightning: the user's file decides
    "speechbrain": Kind(["hparams"], ["speechbrain"]),
}


class Task(NamedTuple):
    """What a model is trained on."""

    model_class: str  # of transformers
    counts: str  # what the manifest's lengths are converted to: a key of _PER_UNIT
    length_key: str  # of the part of a batch that has these lengths
    has_targets: bool = False  # whether its labels have lengths of their own


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", "tokens", "input_ids"),
    "masked-lm": Task("AutoModelForMaskedLM", "tokens", "input_ids"),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", "tokens", "input_ids"
    ),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", "tokens", "input_ids", True),
    "ctc": Task("AutoModelForCTC", "samples", "input_values", True),
    # Whisper pads all audio to 30 seconds: only texts differ in length.
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", "tokens", "labels"),
}

# Audio has 16,000 samples or 100 frames a second.
_PER_UNIT: dict[str, dict[str | None, float]] = {
    "tokens": {"tokens": 1.0},
    "samples": {"samples": 1.0, "ms": 16.0, "s": 16000.0},
    "frames": {"frames": 1.0, "ms": 0.1, "s": 100.0},
}


class NamedScript(NamedTuple):
    """A command, and options of a training script that say how its batches follow the manifest's lengths."""

    words: list[str]
    options: dict[str, Any]


def named_script(
    workload: str,
    flags: Mapping[str, str | None],
    settings: Sequence[str],
    lengths: Lengths,
    per_unit: float | None,
) -> NamedScript:
    """Return the training script that a workload stands for.

    `flags` are the options of all kinds, `settings` are those of `--set`. Raises UsageError if a flag is missing or of
    another kind, a file does not exist, a package is not installed, or the manifest's unit can't be converted.
    """
    kind, _, subject = workload.partition(":")
    given = {flag: value for flag, value in flags.items() if value is not None}
    if list(given) != KINDS[kind].flags:
        needed = [f"--{flag}" for flag in KINDS[kind].flags]
        raise UsageError(
            f"--workload {kind}:… takes {' '.join(needed) or 'none'} of --task, --loss and --hparams"
        )
    packages = list(KINDS[kind].packages)
    if "lora" in parse_options(settings):
        packages.append("peft")
    for package in packages:
        if find_spec(package) is None:
            raise UsageError(
                f"--workload {workload} needs {package}, which is not installed",
                f"Install it: python -m pip install {package}",
            )
    if kind == "speechbrain":
        files = [_file(subject), _file(given["hparams"])]
        words = [sys.executable, *files, *(f"--{pair}" for pair in settings)]
        return NamedScript(words, {})
    words = [sys.executable, "-m", f"batchtune.scripts.named.{kind}_script"]
    if kind == "transformers":
        if not subject.endswith(".json"):
            subject = os.path.join(subject, "config.json")
        words.append(_file(subject))
    else:
        file, _, name = subject.rpartition(":")
        words += [_file(file), name]
    words += [f"{flag}={value}" for flag, value in given.items()]
    if kind == "lightning":
        return NamedScript([*words, *settings], {})
    task = _task(given, settings)
    per_unit = per_unit or _PER_UNIT[task.counts].get(lengths.unit)
    if per_unit is None:
        raise UsageError(
            f"--workload {workload} counts {task.counts}, but the lengths are in {lengths.unit or 'an unknown unit'}",
            f"Give the number of {task.counts} in one of them with --per-unit, or their unit with --unit.",
        )
    length = math.ceil(np.median(lengths.values) * per_unit)
    options = {"per_unit": per_unit, "length_key": task.length_key}
    if task.has_targets:
        options["target_key"] = "labels"
        options["target_per_unit"] = 1.0
    return NamedScript([*words, f"length={length}", *settings], options)


def _file(path: str) -> str:
    """Return the absolute path of a file: scripts run in a copy of the working folder."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise UsageError(
            f"{shortened(path)} is not a file",
            "Write torch:FILE.py:NAME, lightning:FILE.py:NAME, speechbrain:FILE.py, or transformers:FOLDER with a "
            "config.json in the folder: batchtune downloads nothing.",
        )
    return os.path.abspath(path)


def _task(given: Mapping[str, str], settings: Sequence[str]) -> Task:
    """Return the task of a transformers model, or what is known of a torch model's."""
    if "loss" in given:
        counts = "frames" if "features" in parse_options(settings) else "tokens"
        return Task("", counts, "inputs", given["loss"] == "ctc")
    task = given["task"]
    if task not in TASKS:
        raise UsageError(
            f"unknown task {shortened(task)}",
            f"{did_you_mean(task, TASKS)}Tasks: {', '.join(TASKS)}.",
        )
    return TASKS[task]
