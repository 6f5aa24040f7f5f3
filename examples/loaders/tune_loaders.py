"""Tunes three loaders of the same audio: a torch Dataset, a WebDataset pipeline, and DALI.

    python -m pip install webdataset nvidia-dali-cuda120
    python examples/loaders/tune_loaders.py

It writes wavs and tar shards of made-up speech, and runs `batchtune tune-loader` on each of `torch_loader.py`,
`webdataset_loader.py` and `dali_loader.py`, which make the same features. Then it prints for each the recommended
setting, how many clips per second it delivers, and the share of a step of `--step-ms` that a GPU would wait; and the
best of DALI's `eager` and `sync_cpu` next to torch's DataLoader. Without DALI or WebDataset its part is skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from make_audio import make_audio

HERE = Path(__file__).parent
# What is shown, the target, the option that says where the audio is, the package that it needs, the settings compared.
LOADERS = (
    ("torch", "torch_loader.py:make_dataset", "folder=wavs", "torch", "num_workers"),
    (
        "WebDataset",
        "webdataset_loader.py:make_batches",
        "shards=shards",
        "webdataset",
        "num_workers",
    ),
    (
        "DALI",
        "dali_loader.py:make_batches",
        "folder=wavs",
        "nvidia.dali",
        "num_threads",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the audio, tunes the loaders, prints a table."""
    processors = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description="Tunes three loaders of the same audio."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("loader-example"),
        help="folder of the audio and of the runs",
    )
    parser.add_argument("--clips", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--step-ms", type=float, default=25.0, help="how long a training step takes"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="how long each setting is measured, at least",
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument(
        "--workers",
        type=int,
        default=processors,
        help="at most so many processes or threads",
    )
    options = parser.parse_args(arguments)
    seconds = make_audio(options.out, options.clips)
    print(
        f"{options.clips} clips, {seconds:.0f} s in all, in batches of {options.batch_size}\n",
        flush=True,
    )

    found = {}
    for name, target, place, package, axis in LOADERS:
        if missing(package):
            print(f"{name}, skipped: {package} is not installed\n", flush=True)
            continue
        found[name] = tune(
            options,
            name,
            target,
            place,
            f"{axis}={int(axis == 'num_threads')}:{options.workers}",
        )

    print(f"{'':15}{'clips/s':>8}{'GPU idle':>10}  recommended")
    for name, tuning in found.items():
        show(name, tuning["rows"][tuning["recommended"]])
    if "DALI" in found:
        print("\nThe fastest of each:")
        show("torch", fastest(found["torch"]["rows"]))
        for mode in ("eager", "sync_cpu"):
            rows = [
                row
                for row in found["DALI"]["rows"]
                if row["arguments"]["eval_mode"] == mode
            ]
            show(f"DALI {mode}", fastest(rows))


def missing(package: str) -> bool:
    """Whether a package can't be imported."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


def tune(
    options: argparse.Namespace, name: str, target: str, place: str, sweep: str
) -> dict[str, Any]:
    """Runs `batchtune tune-loader`, which prints its report, and returns what it writes."""
    key, folder = place.split("=")
    run = options.out / f"run-{name.lower()}"
    command = [
        "batchtune",
        "tune-loader",
        str(HERE / target),
        "--run",
        str(run),
        "--force",
    ]
    command += [
        "--set",
        f"{key}={options.out / folder}",
        "--set",
        f"batch_size={options.batch_size}",
    ]
    command += [
        "--step-ms",
        str(options.step_ms),
        "--seconds",
        str(options.seconds),
        "--trials",
        str(options.trials),
    ]
    command += ["--sweep", sweep]
    if name == "DALI":
        command += ["--sweep", "eval_mode=eager,sync_cpu"]
    else:
        command += [
            "--sweep",
            "persistent_workers=true",
            "--sweep",
            "multiprocessing_context=fork",
        ]
    print(*command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)
    print(flush=True)
    tuning: dict[str, Any] = json.loads((run / "loader.json").read_text())
    return tuning


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the most clips per second."""
    return max(rows, key=lambda row: row["examples_per_second"] or 0)


def show(name: str, row: dict[str, Any]) -> None:
    """Prints a line."""
    idle = "-"  # only the best settings are run with a step
    if row["gpu_idle"] is not None:
        idle = f"{row['gpu_idle']:.1%}"
    setting = " ".join(
        f"{key}={str(value).lower()}" for key, value in row["arguments"].items()
    )
    print(
        f"{name:15}{row['examples_per_second']:>8.0f}{idle:>10}  {setting}", flush=True
    )


if __name__ == "__main__":
    main()
