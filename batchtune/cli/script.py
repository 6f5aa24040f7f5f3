"""`batchtune record` and `batchtune run`: a training script as it is."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchtune.allocators import (
    Environment,
    asked_for,
    in_words,
    settings_in,
    variables_for,
)
from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    QUIET,
    SCRIPT_COMMAND,
    ManifestOptions,
    expand,
    option,
    script_words,
)
from batchtune.errors import ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.lengths import StreamLengths
    from batchtune.results import Probe

# On the CPU, with a heap of its own, a script held up to 8% more than its probe did.
_ROOM_FOR_HEAP = 1.25

EXAMPLES = {
    "record": """
batchtune record -- python train.py
batchtune record --run my-run --per-unit 16000 -- torchrun --nproc-per-node 2 train.py --epochs 1
""",
    "run": """
batchtune run train.csv -- python train.py --epochs 10
batchtune run train.csv --run my-run -- torchrun --nproc-per-node 8 train.py
batchtune run -- accelerate launch train.py --config config.yaml
""",
}


@expand
def record(
    command: str | None = SCRIPT_COMMAND,
    run: Path = option(
        "Run folder: training.jsonl is written there.",
        "DIR",
        default=DEFAULT_RUN_FOLDER,
    ),
    per_unit: float | None = option(
        "Size of a batch's length axis for one unit of the manifest, such as 16000 samples per second (default: "
        "as the run folder's probe of the script found it, or 1).",
        "X",
        min=1e-9,
        max=1e9,
    ),
    axis: int = option(
        "The axis of the length in the batch's tensors; 0 is the axis of the examples.",
        "N",
        min=1,
        max=8,
        default=1,
    ),
    quiet: bool = QUIET,
) -> None:
    """Run a training script as it is, and record its steps.

    Starts the command after `--`, and records each optimizer step: the sizes of its batches, its time, its peak memory,
    and whether memory ran out. The script needs no change: batchtune watches its PyTorch data loaders. Nothing waits
    for a GPU. Each step resets torch's own peak statistics.

    Adds to training.jsonl in the run folder, line by line, so that nothing is lost if the script is
    killed. `batchtune report` compares the last recording with the predictions, `sweep-buckets
    --from-training` takes costs from it without a probe, and the next `probe-oom` or `tune` in this
    folder stays below what ran out of memory. The exit code is the script's.
    """
    from batchtune.files import check_writable
    from batchtune.results import TRAINING_FILE
    from batchtune.scripts import environment

    if command is None:
        raise UsageError(
            "no command to record",
            "Put it at the end of the line: batchtune record -- python train.py",
        )
    check_writable(run)
    path = run / TRAINING_FILE
    before = path.stat().st_size if path.exists() else 0
    recorder = {"run": str(run.absolute()), "per_unit": per_unit, "axis": axis}
    options = {"mode": "record", "recorder": recorder}
    code = run_to_the_end(script_words(command), environment(options))
    if path.exists() and path.stat().st_size > before:
        note = f"Recorded in {path}. `batchtune report {run}` shows it."
    else:
        note = (
            "Warning: nothing was recorded. Unless another warning says why, no PyTorch data loader was iterated over "
            "with gradients: use batchtune.Recorder in the script instead."
        )
    console.note(note, quiet=quiet)
    raise typer.Exit(code)


@expand
def run(
    source: ManifestOptions,
    run: Path = option(
        "The run folder, with sampler.yaml.", "DIR", default=DEFAULT_RUN_FOLDER
    ),
    force: bool = option(
        "Train even if the script's sampler chooses among the examples, or if the examples don't follow the "
        "lengths.",
        variable=None,
        default=False,
    ),
    command: str | None = SCRIPT_COMMAND,
) -> None:
    """Run a training script as it is, with the recommended batches.

    Starts the command after `--`. Its training DataLoader gives the batches of the run folder's
    sampler.yaml, with its own data set, collate_fn and workers; len() is the number of batches. The
    training DataLoader is the one with as many examples as the manifest; other loaders, such as
    validation, stay as they are. batchtune records each step, as `batchtune record` does:
    `batchtune report` then compares the training with the predictions.

    Each iteration is the next epoch, or the one that the script gives its sampler with set_epoch.
    On several ranks (torchrun, accelerate, Lightning), each gets its own batches, the same number
    on all. After a checkpoint within an epoch, transformers' Trainer, SpeechBrain and
    StatefulDataLoader continue at that batch; other scripts begin the epoch again.

    MANIFEST is the manifest that was tuned (default: lengths.parquet in the run folder, if tune took the lengths from
    the script). Its row i must be example i of the data set: batchtune checks 20 examples. If it can't give the script
    its batches, an error says why, and which three lines of the script to change. The exit code is the script's.
    """
    from batchtune.files import temporary_folder
    from batchtune.results import PROBE_FILE, SAMPLER_FILE, Probe, read_if_written
    from batchtune.scripts import environment
    from batchtune.scripts.running import GIVEN_FILE, LENGTHS_FILE

    if command is None:
        raise UsageError(
            "no command to run",
            "Put it at the end of the line: batchtune run MANIFEST -- python train.py",
        )
    words = script_words(command)
    stored, measured = _lengths_of_script(source, run, words)
    variables = _allocator_variables(measured, run / SAMPLER_FILE)
    probe = read_if_written(run / PROBE_FILE, Probe)
    variables |= _heap_variables(probe)
    for note in _about_tuning(run, probe, words):
        console.note(f"Warning: {note}.")
    # In the run folder, which the other nodes of a cluster see too.
    with temporary_folder("script-", run.absolute()) as scratch:
        stored.values.tofile(scratch / LENGTHS_FILE)
        options = {
            "mode": "run",
            "run": str(run.absolute()),
            "scratch": str(scratch),
            "force": force,
            "recorder": {"run": str(run.absolute())},
        }
        code = run_to_the_end(words, {**environment(options), **variables})
        if code == 0 and not (scratch / GIVEN_FILE).exists():
            console.note(
                "Warning: nothing was changed: no PyTorch DataLoader of "
                f"{stored.lengths.count:,} examples was iterated over with gradients."
            )
    raise typer.Exit(code)


def run_to_the_end(words: Sequence[str], environment: Environment) -> int:
    """Run a command to its end, and return its exit code, 128 + the signal that killed it.

    It gets this process's input and output, SIGTERM, and from a terminal Ctrl-C too. Raises UsageError if it can't be
    started.
    """
    try:
        process = subprocess.Popen(words, env=environment)
    except OSError as error:
        raise UsageError(
            f"{words[0]} can't be started: {error.strerror or error}",
            "Give the command as in a shell: -- python train.py",
        ) from error
    # Ctrl-C in a terminal reaches the script as well, which decides what to do.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_termination = signal.signal(
        signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM)
    )
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_termination)
    return code if code >= 0 else 128 - code


def _allocator_variables(measured: str | None, config: Path) -> dict[str, str]:
    """Return the variables that give a script the measured allocator; warn if the user's own ask for another."""
    settings = settings_in(os.environ)
    users = asked_for(settings)
    if measured is not None and users is None:
        return variables_for(measured, os.environ)
    if measured not in (None, users):
        console.note(
            f"Warning: {config} was measured {in_words(measured)}, but your environment asks for {settings}: batches "
            "that fit may run out of memory. Unset that, or probe with it."
        )
    return {}


def _about_tuning(folder: Path, probe: Probe | None, words: list[str]) -> Iterator[str]:
    """Yield why the batches may not be those for this command: another was tuned, or they are not proven."""
    from batchtune.files import command_text
    from batchtune.results import SWEEP_FILE, Sweep, read_if_written

    swept = read_if_written(folder / SWEEP_FILE, Sweep)
    command = command_text(words)
    if probe is not None and probe.workload.command is not None:
        tuned = probe.workload.spec
        if tuned != command:
            yield f"{folder} was tuned with `{tuned}`: what changes the model or the batches changes what fits"
    if swept is not None and swept.unproven:
        reason = ""
        if swept.proof is not None and swept.proof.reason is not None:
            reason = f" ({swept.proof.reason})"
        yield f"the batches are not proven to fit{reason}: `batchtune tune` continues where it ended"


def _heap_variables(probe: Probe | None) -> dict[str, str]:
    """Return the variables of a CPU's heap with which the probe's workers ran, where a script may take hardly more.

    Elsewhere the script keeps glibc's own heap, with which small steps take half as long.
    """
    from batchtune.probe.devices import backend_for
    from batchtune.processes.pool import allowed_memory

    if probe is None:
        return {}
    device = probe.device
    has_room = allowed_memory() > _ROOM_FOR_HEAP * device.limit_bytes
    if device.kind != "cpu" or has_room:
        return {}
    variables = backend_for("cpu").WORKER_ENVIRONMENT
    return {name: value for name, value in variables.items() if name not in os.environ}


def _lengths_of_script(
    source: ManifestOptions, folder: Path, words: list[str]
) -> tuple[StreamLengths, str | None]:
    """Read the lengths that a run folder's sampler.yaml is for, in their order, and the allocator that it needs.

    Raises ResultError for other lengths. Warns of batches that failed in `batchtune verify`.
    """
    from batchtune.configs import read_any_sampler_yaml
    from batchtune.reports.measured import batches_in
    from batchtune.results import (
        SAMPLER_FILE,
        STREAM_CONFIG_FILE,
        VERIFY_FILE,
        SamplerConfig,
        Verification,
        read_if_written,
    )
    from batchtune.run_folder import check_lengths, lengths_of
    from batchtune.scripts.running import STREAM_LINES

    path = folder / SAMPLER_FILE
    if (folder / STREAM_CONFIG_FILE).exists() and not path.exists():
        raise ResultError(
            f"{folder} is the run of a stream, which can't be given to a script",
            STREAM_LINES.format(run=folder),
        )
    how = f"tune {source.in_words} --run {shlex.quote(str(folder))} -- {shlex.join(words)}"
    config = read_any_sampler_yaml(path, " ".join(how.split()))
    source = source.or_own_lengths(folder)
    stored = source.load_stream(quiet=True, as_in=folder)
    check_lengths(
        stored.lengths,
        config.evidence.fingerprint,
        config.unit,
        path,
        lengths_of(folder),
    )
    verified = read_if_written(folder / VERIFY_FILE, Verification)
    if (
        verified
        and verified.failures
        and isinstance(config, SamplerConfig)
        and batches_in(verified) == batches_in(config)
    ):
        console.note(
            "Warning: these batches failed in `batchtune verify`: `batchtune report` of this run folder says why."
        )
    return stored, config.evidence.allocator
