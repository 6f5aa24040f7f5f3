"""Measures on a real GPU what batchtune promises: `python tests/gpu/evidence.py [PART...] [--manifest FILE]`.

Without names all parts run, the most telling first: the first three take about 12 minutes. A call ends by itself
after `--minutes` (7), and each part after minutes of its own, counted over all calls. Each part writes
`DIR/PART.json` with the machine's description, and prints one line per figure. What was measured before a part
stopped, was interrupted or failed is kept, and what is missing is named. The next call goes on from there: it leaves
out what is complete, and looks for files of earlier calls in `--from` first. So where a machine is lent for a few
minutes and starts bare, copy DIR back into the checkout (into `evidence/`, which git does not ignore), and run the
same command again until it ends with 0:

    python tests/gpu/evidence.py --out RESULTS      (and again, with what came back in evidence/)
    python tests/gpu/evidence.py summarise RESULTS  (prints the rows of a figures table)

    calibration          what torch's allocator holds in each step of twelve workloads, compared with the emulated
                         device (tests/emulated_cuda): where they differ is what not to trust of that
    proof                `tune` of speech and a language model under 2 GiB, by both allocators, then 500 shuffled steps
    recipes              seconds an epoch of tests/benchmarks/recipes.py, of those with lengths in the checkout
    tests-probe          tests/gpu/test_probe_on_cuda.py: each test that has run is not run again
    speech               the frontier of a conformer of 104 million parameters; every fourth of its lengths by the
                         searches of NeMo and Lightning
    epoch                epochs of the recommended table, SpeechBrain, Lhotse and fixed batches: measured and predicted
    tests-truth          tests/gpu/test_truth_on_cuda.py, and so on
    whole                the frontier of `speech` on the whole device, at four lengths
    tests-ranks
    tests-packed
    tests-scripts
    tests-surroundings
    tests-loaders
    tests-dali

All but `whole` get `--memory` (16GiB) of the device, so that steps are short. `epoch` uses the probe of `speech`.

Parts share `--manifest`: lengths of utterances. Anything that batchtune reads will do; what needs options is first made
a Parquet file by `batchtune scan ... -o lengths.parquet`. Without a manifest lengths are made; every figure says so.

Needs, besides Python 3.10 and torch: typer, rich, numpy, scipy, pyarrow, jinja2, psutil, nvidia-ml-py
and pytest, and as wheels, all pure Python or small: msgspec, plotly, ruamel.yaml, and for the tests hypothesis and
pytest-timeout. The checkout need not be installed. `--device cpu --memory 700MiB --quick` tries all parts in minutes,
with tiny models and half of that memory, on a machine without a GPU; tests are skipped there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
from gpu.evidence_bench import Bench
from gpu.evidence_parts import PARTS
from gpu.evidence_record import Evidence, Missing, Record, read_evidence, summarise

from batchtune.errors import BatchtuneError
from batchtune.probe.doctor import examine
from batchtune.results import Doctor


def checked_machine(device: str) -> Doctor:
    """What this machine is.

    Raises:
        BatchtuneError: The device that is asked for is not there.
    """
    found = examine(120)
    if device.startswith("cpu"):
        return found
    if not [gpu for gpu in found.gpus if gpu.device is not None]:
        reason = found.torch.problem or found.nvml_problem or "PyTorch sees none"
        raise BatchtuneError(
            f"there is no CUDA device: {reason}",
            "Try the harness with --device cpu --memory 700MiB --quick.",
        )
    return found


def run_part(
    name: str,
    options: argparse.Namespace,
    machine: Doctor,
    command: str,
    deadline: float,
) -> bool:
    """Runs what earlier calls left of a part, and writes its file, whatever happens; whether it is complete."""
    part, path = PARTS[name], options.out / f"{name}.json"
    earlier = earlier_evidence(path, machine, options.device)
    if earlier is not None and earlier.complete:
        print(f"{name}: complete", flush=True)
        return True
    seconds_left = 60 * part.minutes * options.stretch - (
        earlier.seconds if earlier else 0.0
    )
    record = Record(
        part=name,
        path=path,
        command=command,
        device=options.device,
        machine=msgspec.to_builtins(machine),
        notes=["Tried with --quick: tiny models, few examples."]
        if options.quick
        else [],
        earlier=earlier,
    )
    seconds_left = min(seconds_left, deadline - time.monotonic())
    expected = part.expected_minutes or part.minutes
    print(
        f"{name}: about {expected:g} min, at most {max(0.0, seconds_left) / 60:.1f}",
        flush=True,
    )
    try:
        if seconds_left <= 0:
            raise Missing(
                f"its {part.minutes * options.stretch:g} minutes, or those of the call, are over"
            )
        part.run(Bench(options, name, record, time.monotonic() + seconds_left))
    except Missing as missing:
        record.miss(str(missing))
    except BatchtuneError as error:
        record.miss(f"{error.message}. {error.hint or ''}".strip())
    except BaseException as error:
        record.miss(
            "interrupted"
            if isinstance(error, KeyboardInterrupt)
            else f"{type(error).__name__}: {error}"
        )
        raise
    finally:
        record.finish()
    return record.complete


def earlier_evidence(path: Path, machine: Doctor, device: str) -> Evidence | None:
    """What earlier calls have measured of a part; None if nothing.

    Raises:
        BatchtuneError: It is of another machine, or can't be read.
    """
    if not path.exists():
        return None
    try:
        earlier = read_evidence(path)
    except ValueError as error:
        raise BatchtuneError(
            str(error), "Remove it, or give another --out and --from."
        ) from None
    name = msgspec.structs.replace(
        earlier, device=device, machine=msgspec.to_builtins(machine)
    ).machine_name
    if earlier.machine_name != name:
        raise BatchtuneError(
            f"{path} is of {earlier.machine_name}; this is {name}",
            "Give another --out and --from.",
        )
    return earlier


def copy_earlier(folder: Path, out: Path) -> None:
    """Copies the files of earlier calls that `out` lacks. Only their content: they may have come back read-only."""
    if out.resolve().is_relative_to(folder.resolve()):
        return
    for path in folder.rglob("*"):
        target = out / path.relative_to(folder)
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evidence.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="all unless named; or summarise, then folders",
    )
    parser.add_argument("--manifest", help="lengths; made ones without")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("evidence"),
        help="default: evidence",
    )
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        metavar="DIR",
        default=Path("evidence"),
        help="files of earlier calls, which DIR gets first; default: evidence",
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:N or cpu; default: cuda"
    )
    parser.add_argument(
        "--memory", default="16GiB", help="cap on the worker's memory; default: 16GiB"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.0,
        help="longest that this call may take; default: 7",
    )
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="times the minutes of each part; default: 1",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny models and few examples, to try the harness",
    )
    options = parser.parse_args(argv)
    if options.parts[:1] != ["summarise"] and (
        unknown := [part for part in options.parts if part not in PARTS]
    ):
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the parts, or summarises; 1 where something is missing."""
    options = _parsed(argv)
    deadline = time.monotonic() + 60 * options.minutes
    if options.parts[:1] == ["summarise"]:
        return summarise(
            [Path(folder) for folder in options.parts[1:]] or [options.out]
        )
    try:
        machine = checked_machine(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        copy_earlier(options.earlier, options.out)
        for part in PARTS:
            earlier_evidence(options.out / f"{part}.json", machine, options.device)
    except (BatchtuneError, OSError) as error:
        message: Any = error.message if isinstance(error, BatchtuneError) else error
        print(f"Error: {message}", getattr(error, "hint", None) or "", file=sys.stderr)
        return 1
    on_cpu = options.device.startswith("cpu")
    if options.quick and on_cpu:
        # Threads that wait for each other crawl on a busy machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    flags = [one for one in argv if one not in options.parts]
    complete = []
    try:
        for part in options.parts or list(PARTS):
            needs_gpu = part.startswith("tests-") or part == "recipes"
            if on_cpu and not options.parts and needs_gpu:
                continue
            command = f"python tests/gpu/evidence.py {shlex.join([part, *flags])}"
            complete.append(run_part(part, options, machine, command, deadline))
    except KeyboardInterrupt:
        return 130
    print(f"{sum(complete)} of {len(complete)} parts are complete")
    return 0 if all(complete) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
