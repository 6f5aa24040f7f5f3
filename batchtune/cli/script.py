"""`batchtune record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    Quiet,
    ScriptCommand,
    option,
    script_words,
)
from batchtune.errors import UsageError

EXAMPLES = {
    "record": """
batchtune record -- python train.py
batchtune record --run my-run --per-unit 16000 -- torchrun --nproc-per-node 2 train.py --epochs 1
""",
}


def record(
    command: ScriptCommand = None,
    run: Annotated[
        Path, option("Run folder: training.jsonl is written there.", "DIR")
    ] = DEFAULT_RUN_FOLDER,
    per_unit: Annotated[
        float | None,
        option(
            "Size of a batch's length axis for one unit of the manifest, such as 16000 samples per second (default: "
            "as the run folder's probe of the script found it, or 1).",
            "X",
            min=1e-9,
            max=1e9,
        ),
    ] = None,
    target_per_unit: Annotated[
        float | None,
        option("The same for the target's axis.", "X", min=1e-9, max=1e9),
    ] = None,
    axis: Annotated[
        int,
        option(
            "The axis of the length in the batch's tensors; 0 is that of the examples.",
            "N",
            min=1,
            max=8,
        ),
    ] = 1,
    quiet: Quiet = False,
) -> None:
    """Run a training script as it is, and record its steps.

    Starts the command after `--`, and notes for each optimizer step what its batches' sizes, its time and its peak
    memory were, and whether memory ran out. The script needs no change: its PyTorch data loaders are watched. Nothing
    waits for a GPU. torch's own peak statistics are reset after each step.

    Adds to training.jsonl in the run folder, line by line, so that nothing is lost if the script is killed. `batchtune
    report` compares the last recording with what was predicted, `sweep-buckets --from-training` takes costs from all
    of them, and the next `probe-oom` or `tune` there stays below what ran out of memory. The exit code is the
    script's.
    """
    from batchtune.files import check_writable
    from batchtune.results import TRAINING_FILE, TrainingStep, read_training
    from batchtune.scripts.interposing import environment
    from batchtune.scripts.starting import run_to_the_end

    if command is None:
        raise UsageError(
            "no command to record",
            "Put it at the end of the line: batchtune record -- python train.py",
        )
    check_writable(run)
    path = run.absolute() / TRAINING_FILE
    before = path.stat().st_size if path.exists() else 0
    options = {
        "mode": "record",
        "run": str(run.absolute()),
        "per_unit": per_unit,
        "target_per_unit": target_per_unit,
        "axis": axis,
    }
    code = run_to_the_end(script_words(command), environment(options))
    steps = 0
    ooms = 0
    if path.exists():
        for line in read_training(path, after=before):
            if isinstance(line, TrainingStep):
                steps += line.oom is None
                ooms += line.oom is not None
    console.note(_summary(steps, ooms, run / TRAINING_FILE), quiet=quiet)
    raise typer.Exit(code)


def _summary(steps: int, ooms: int, path: Path) -> str:
    from batchtune.units import counted

    if not steps and not ooms:
        return (
            "Warning: nothing was recorded: no PyTorch data loader was iterated over with gradients and followed by an "
            "optimizer step. Use batchtune.Recorder in the script instead."
        )
    summary = f"Recorded {counted(steps, 'step')} in {path}."
    if ooms:
        summary += f" Memory ran out {counted(ooms, 'time')}."
    return summary
