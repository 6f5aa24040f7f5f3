"""Measures on a real GPU everything that batchtune promises: `python tests/gpu/evidence.py PART... [--manifest FILE]`.

Each part stops by itself after `--minutes` (8), writes `DIR/PART.json` with the machine's description, and prints one
line per figure. What was measured before a part stopped, was interrupted or failed is kept, and what is missing is
named. `python tests/gpu/evidence.py summarise DIR...` prints the rows of a figures table.

    tests     tests/gpu, with a JUnit file; where each failure was raised
    speech    the frontier of a conformer of 104 million parameters, against the searches of NeMo and Lightning
    epoch     epochs of the recommended table, SpeechBrain, Lhotse and fixed batches: measured and predicted times
    soak      2,000 shuffled steps of recommended tables close to the limit, with both settings of the allocator
    language  a transformer of 335 million parameters on two lengths, with checkpointing and without
    verify    `batchtune tune --verify` and `batchtune report`, as a user runs them

Parts named together share `--manifest`: lengths of utterances for all but `language`, which takes two lengths, of
prompts and answers. Anything that batchtune reads will do; what needs options is first made a Parquet file by
`batchtune scan ... -o lengths.parquet`. Without a manifest lengths are made, and every figure says so.

Needs, besides Python 3.10 and torch: typer, rich, numpy, scipy, pandas, pyarrow, jinja2, nvidia-ml-py and pytest, and
as wheels, all pure Python or small: msgspec, plotly, ruamel.yaml, and for `tests` hypothesis and pytest-timeout. The
checkout need not be installed. `--device cpu --memory 700MiB --quick` tries all parts but `tests` in minutes, with
tiny models and half of that memory, on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
from gpu.evidence_bench import Bench
from gpu.evidence_parts import PARTS
from gpu.evidence_record import Missing, Record, summarise

from batchtune.errors import BatchtuneError
from batchtune.results import Doctor
from batchtune.tuning.doctor import examine


def checked_machine(device: str) -> tuple[Doctor, list[str]]:
    """What this machine is, and what makes figures taken on it doubtful.

    Raises:
        BatchtuneError: The device that is asked for is not there.
    """
    found = examine(120)
    if device.startswith("cpu"):
        return found, []
    if not [gpu for gpu in found.gpus if gpu.device is not None]:
        reason = found.torch.problem or found.nvml_problem or "PyTorch sees none"
        raise BatchtuneError(
            f"there is no CUDA device: {reason}", "Try the harness with --device cpu --memory 700MiB --quick."
        )
    return found, [
        f"another process uses {gpu.name}: process {one.pid}; figures taken now are doubtful"
        for gpu in found.gpus
        for one in gpu.processes or []
    ]


def run_part(part: str, options: argparse.Namespace, machine: Doctor, warnings: Sequence[str], command: str) -> bool:
    """Runs one part and writes its file, whatever happens; whether it is complete."""
    record = Record(
        part=part,
        path=options.out / f"{part}.json",
        command=command,
        device=options.device,
        machine=msgspec.to_builtins(machine),
        notes=list(warnings) + (["Tried with --quick: tiny models, few examples."] if options.quick else []),
    )
    print(f"{part}: at most {options.minutes:g} min", flush=True)
    try:
        PARTS[part](Bench(options, part, record))
    except Missing as missing:
        record.miss(str(missing))
    except BatchtuneError as error:
        record.miss(f"{error.message}. {error.hint or ''}".strip())
    except BaseException as error:
        record.miss("interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}")
        raise
    finally:
        record.finish()
    return record.complete


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evidence.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", metavar="PART", help=f"{', '.join(PARTS)}; or summarise, then folders")
    parser.add_argument("--manifest", help="lengths; made ones without")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("evidence"), help="default: evidence")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu; default: cuda")
    parser.add_argument("--memory", help="cap on the worker's memory, such as 700MiB; default: the whole device")
    parser.add_argument("--minutes", type=float, default=8.0, help="longest that a part may take; default: 8")
    parser.add_argument("--quick", action="store_true", help="tiny models and few examples, to try the harness")
    options = parser.parse_args(argv)
    if options.parts[0] != "summarise" and (unknown := [part for part in options.parts if part not in PARTS]):
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the parts, or summarises; 1 where something is missing."""
    options = _parsed(argv)
    if options.parts[0] == "summarise":
        return summarise([Path(folder) for folder in options.parts[1:]] or [options.out])
    try:
        machine, warnings = checked_machine(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
    except (BatchtuneError, OSError) as error:
        message: Any = error.message if isinstance(error, BatchtuneError) else error
        print(f"Error: {message}", getattr(error, "hint", None) or "", file=sys.stderr)
        return 1
    if options.quick and options.device.startswith("cpu"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other crawl on a busy machine
    for warning in warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    flags = [one for one in argv if one not in options.parts]
    try:
        complete = [
            run_part(part, options, machine, warnings, f"python tests/gpu/evidence.py {shlex.join([part, *flags])}")
            for part in options.parts
        ]
    except KeyboardInterrupt:
        return 130
    return 0 if all(complete) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
