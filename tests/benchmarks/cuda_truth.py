"""Whether recommended tables fit in shuffled training on a CUDA device: `python tests/benchmarks/cuda_truth.py`.

`tune` probes, sweeps and proves. Then the truth: whole epochs of its sampler (at most `--steps` steps), each with
another seed and in a fresh process under the limit that was probed. A row for each case: trials and OOMs a length of
the probe (a table that failed counts as one; packed batches have compositions instead of lengths), tables that the
proof ran, then processes that ran out of memory, steps, and the highest reserved share of the limit. With
`--brute-force`, the largest batch of the longest example by trying every size from the answer upwards, and the answer's
share of it. `--list` prints the cases, which are arguments; without any, all run.

Runs on a GPU, or on the emulated device, whose memory is torch's own allocator's: the row then says `emulated`. Exits
with 1 where a proven table runs out of memory, or where one is not proven.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from benchmarks.frontier import largest
from benchmarks.recipe_list import (
    librispeech,
    shared_data,
    transcribed_librispeech,
)
from public_lengths import code, sharegpt

import batchtune
from batchtune.configs import read_any_sampler_yaml
from batchtune.lengths import Lengths
from batchtune.probe.packed_search import COMPOSITIONS
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, PackedConfig
from batchtune.units import format_percent, parse_size
from batchtune.verify.plan import VerifyPlan, VerifySettings, subject_of

FIRST_SEED = 1000  # none that the proof has run
FOLDER = Path(__file__).parent
EMPTY = "import sys, torch; held = torch.empty(1 << 30, device='cuda'); print(flush=True); sys.stdin.read()"
"""A second process, which holds 4 GiB."""


def tokens():
    """Tokens of 6 to 512 with a long tail."""
    drawn = np.exp(np.random.default_rng(1).normal(4.9, 0.8, 60_000))
    return drawn.round().clip(6, 512), None


def seconds():
    """The same as 16ths of a second."""
    return tokens()[0] / 16, None


def chats():
    """Tokens of ShareGPT, at most 4,096."""
    found = sharegpt(shared_data())
    return found.clip(2, 4096).astype(float), None


def some_chats():
    """One chat of 16."""
    return chats()[0][::16], None


def code_files():
    """Tokens of files of code, at most 8,192."""
    found = code(shared_data()) // 4
    return found.clip(4, 8192).astype(float), None


@dataclass(frozen=True)
class Case:
    """What is trained on which lengths; `beside` is a program that holds memory of the device meanwhile.

    With `steps`, how many micro-batches of how many examples a training accumulates, each optimizer step keeps its
    examples, in as few micro-batches as hold them.
    """

    workload: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: Callable = tokens
    beside: str | None = None
    steps: tuple[int, int] | None = None

    @property
    def unit(self):
        """Of the lengths."""
        of_speech = (seconds, librispeech, transcribed_librispeech)
        return "s" if self.lengths in of_speech else "tokens"


def lm(size, dtype, **more):
    """Return a case of `builtin:transformer-lm`."""
    lengths = more.pop("lengths", tokens)
    options = {"size": size, "dtype": dtype, **more}
    return Case("builtin:transformer-lm", options, lengths)


def conformer(size, dtype, lengths=seconds):
    """Return a case of `builtin:conformer-ctc`."""
    options = {"size": size, "dtype": dtype}
    return Case("builtin:conformer-ctc", options, lengths)


def recipe(name, lengths, **options):
    """Return a case of one of the recipes' models."""
    return Case(f"{FOLDER / 'recipe_models.py'}:{name}", options, lengths)


def surrounded(
    beside=None,
    lengths=tokens,
    steps=None,
    **options,
):
    """Return a case of the base language model in a process that holds more."""
    workload = f"{FOLDER / 'cuda_workloads.py'}:Surrounded"
    return Case(workload, options, lengths, beside, steps)


CASES = {
    "LM tiny bf16": lm("tiny", "bf16"),
    "LM base bf16": lm("base", "bf16"),
    "LM base fp32": lm("base", "fp32"),
    "LM base bf16 checkpointed": lm("base", "bf16", checkpoint=True),
    "LM base fp32 checkpointed": lm("base", "fp32", checkpoint=True),
    "LM large bf16": lm("large", "bf16"),
    "LM large fp32": lm("large", "fp32"),
    "LM large bf16 checkpointed": lm("large", "bf16", checkpoint=True),
    "conformer base bf16": conformer("base", "bf16"),
    "conformer base fp32": conformer("base", "fp32"),
    "conformer large bf16": conformer("large", "bf16"),
    "conformer base LibriSpeech": conformer("base", "bf16", librispeech),
    "LM base ShareGPT": lm("base", "bf16", lengths=chats),
    "LM base code": lm("base", "bf16", lengths=code_files),
    "LM base packed": lm("base", "bf16", lengths=chats, packed=True),
    "encoder-decoder": recipe(
        "EncoderDecoderTraining", transcribed_librispeech, dim=512, layers=6
    ),
    "Llama": recipe("ChatTraining", chats, dim=2048, layers=16),
    "40 MiB held": surrounded(held_mib=40),
    "300 MiB held": surrounded(held_mib=300),
    "second process": surrounded(beside=EMPTY),
    "validation": surrounded(validates=True),
    "accumulation": surrounded(accumulate=2),
    "same steps": surrounded(accumulate=2, steps=(32, 8)),
    "same steps packed": surrounded(
        accumulate=2, packed=True, lengths=some_chats, steps=(32, 2)
    ),
}


@contextlib.contextmanager
def running(program):
    """Have a program run in another process, once it has printed a line; it ends with its input."""
    if program is None:
        yield
        return
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def epoch_of(lengths, folder, seed):
    """Yield the batches of a shuffled epoch of the recommended sampler."""
    path = folder / "sampler.yaml"
    config = read_any_sampler_yaml(path)
    held = lengths.runs.each(lengths.runs.values)
    if config.keeps_examples:
        order = np.random.default_rng(seed).permutation(held.size)
        size = config.pool_size // config.own_accumulate
        own = np.split(order, range(size, held.size, size))
        for batch in batchtune.SameStepBatchSampler.from_config(path, own, held):
            if isinstance(config, PackedConfig):
                yield BatchShape.packed(sorted(map(int, held[batch]), reverse=True))
            else:
                yield BatchShape(len(batch), float(held[batch].max()))
        return
    if isinstance(config, PackedConfig):
        sampler = batchtune.PackedBatchSampler.from_config(path, held, seed=seed)
        for batch in sampler:
            yield BatchShape.packed(held[batch].astype(int).tolist())
        return
    plan = VerifyPlan(
        lengths=lengths, config=config, settings=VerifySettings(seed=seed)
    )
    shuffled = itertools.islice(plan.shuffled_batches(), len(plan.first_epoch))
    yield from (planned.shape for planned in shuffled)


def epochs_that_fail(lengths, stepper, folder, seeds, most):
    """How many processes ran out of memory, the steps of all, and the most bytes reserved."""
    failed, steps, reserved = 0, 0, 0
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        stepper.start()
        for shape in itertools.islice(epoch_of(lengths, folder, seed), most):
            trial = stepper.step(shape).trial
            steps += 1
            reserved = max(reserved, trial.reserved_bytes or 0)
            if trial.outcome != "ok":
                failed += 1
                break
    return failed, steps, reserved


def share_of_brute_force(probe, measurer):
    """The largest batch of the longest example / the largest that passes alone."""
    point = probe.frontier[-1]

    def fits(size):
        shape = BatchShape(size, point.length, point.target_length)
        return measurer.measure(shape, 0).trial.outcome == "ok"

    return point.batch_size / largest(fits, point.batch_size, below=0.1)


def run_case(name, allocator, arguments, folder):
    """Tune, run the truth, and print its row; whether the table is proven and never ran out of memory."""
    case = CASES[name]
    values, targets = case.lengths()
    lengths = Lengths.of(values, targets, unit=case.unit)
    given = {
        "memory_bytes": None,
        "run": folder,
        "device": "cuda",
        "options": case.options,
        "allocator": allocator,
    }
    if arguments.memory is not None:
        given["memory_bytes"] = parse_size(arguments.memory)
    if arguments.minutes is not None:
        given["minutes"] = arguments.minutes
    if case.steps is not None:
        given["accumulate"], size = case.steps
        given["current"] = f"batch_size={size}"
    started = time.monotonic()
    tuned = batchtune.tune(case.workload, lengths, **given)
    options = dict(case.options)
    if case.steps is not None:
        swept = tuned.sweep.packed or tuned.sweep
        fewest = min(row.accumulate for row in swept.rows if row.keeps_examples)
        tuned = batchtune.tune(case.workload, lengths, **given, micro_batches=fewest)
        options.update(accumulate=fewest, apart=True)
    tuned_seconds = time.monotonic() - started
    probe, proof = tuned.probe, tuned.sweep.proof
    asked = {"workload": case.workload, "options": options}
    subject = subject_of(lengths, probe, asked, folder)
    with Supervisor(subject.settings, subject.limit_bytes, lengths=lengths) as stepper:
        failed, steps, reserved = epochs_that_fail(
            lengths, stepper, folder, arguments.seeds, arguments.steps
        )
        share = None
        if arguments.brute_force and probe.frontier:
            share = share_of_brute_force(probe, stepper)
    is_packed = probe.packed is not None
    measured = len({(trial.length, trial.target_length) for trial in probe.trials})
    if is_packed:
        measured = len(COMPOSITIONS)
    ooms = sum(trial.outcome == "oom" for trial in probe.trials)
    holds = proof is not None and proof.holds
    cells = {
        "device": "emulated" if "emulated" in probe.device.name.lower() else "real",
        "case": name,
        "memory": f"{probe.device.total_bytes / 2**30:.0f} GiB",
        "allocator": str(probe.device.allocator),
        "trials a length": f"{len(probe.trials) / measured:.1f}",
        "OOMs a length": f"{ooms / measured:.2f}",
        "tables": str(None if proof is None else proof.tables),
        "proven": str(holds),
        "OOMs": f"{failed} of {arguments.seeds} processes, {steps} steps",
        "reserved": format_percent(reserved / probe.device.limit_bytes),
        "tuned in": f"{tuned_seconds:.0f} s",
    }
    if share is not None:
        cells["of brute force"] = format_percent(share)
    print("; ".join(f"{column} {cell}" for column, cell in cells.items()), flush=True)
    return failed == 0 and holds


def main():
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--memory", help="a cap, such as 2GiB (default: the device's)")
    parser.add_argument(
        "--allocator",
        choices=["native", "expandable"],
        nargs="+",
        default=["native", "expandable"],
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--brute-force", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return 0
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown case {min(unknown)!r}: --list prints them")
    holds = True
    for name in arguments.cases or CASES:
        for allocator in arguments.allocator:
            with (
                tempfile.TemporaryDirectory() as folder,
                running(CASES[name].beside),
            ):
                holds &= run_case(name, allocator, arguments, Path(folder))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
