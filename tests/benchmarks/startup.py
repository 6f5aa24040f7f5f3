"""How long `batchtune --help` takes, next to importing typer and rich: `python tests/benchmarks/startup.py`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

RUNS = 20
COMMANDS = {
    "import_typer_and_rich": [sys.executable, "-c", "import typer, rich"],
    "batchtune_help": [sys.executable, "-m", "batchtune", "--help"],
}


def seconds(command: list[str]) -> float:
    """Wall time of a command."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Runs both in turn and prints their medians, in seconds, and the ratio, as JSON."""
    for command in COMMANDS.values():
        seconds(command)  # fills the caches
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["batchtune_help"] / medians["import_typer_and_rich"]
    print(
        json.dumps(
            {
                **{name: round(value, 4) for name, value in medians.items()},
                "ratio": round(ratio, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
