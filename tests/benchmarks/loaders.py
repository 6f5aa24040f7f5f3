"""Predicted against measured waits of real DataLoaders: `python tests/benchmarks/loaders.py`.

Three datasets whose batches have a known cost: `sleeping` (a wait for a disk or a network), `busy` (a fixed amount of
computing, which takes as long alone) and `mixed` (half of each, alternating). Each batch costs 0.5 to 1.5 times the
average. The consumer sleeps for each step, as a training process does that waits for its GPU.

The queue is fitted to few settings: no worker, 1 and 2, and one of them with long steps. It then predicts the mean
wait, the first batch apart, of settings that were not used: other numbers of workers and other prefetch factors, each
with no step and with steps shorter and longer than what production takes. The printed ratio is predicted / measured. A
prediction holds if it is within 10% of the measured wait, or, as most waits are near zero where steps are long, within
10% of the time of a batch (wait + step).

Other programs must leave the processors alone: how many they kept busy meanwhile is printed, a run with more than 0.1
is repeated up to 4 times, and the quietest counts. Exits with 1 where a prediction does not hold.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from batchtune.cost import QueueObservation, QueueSetting, fit_queue, predict_waits
from batchtune.results import LoaderQueue

TOLERANCE = 0.1
QUIET, TRIES = 0.1, 4
PARTS = 4  # waiting and computing alternate so often in a batch
FITTED = [(0, 2, 0.0), (1, 2, 0.0), (1, 1, 0.0), (2, 2, 0.0), (1, 2, 1.5)]
PREDICTED = [(2, 1), (2, 4), (3, 1), (3, 2), (4, 2), (4, 4)]
STEPS = [0.0, 0.5, 0.8, 1.5]  # times what a batch takes all workers


@dataclass(frozen=True)
class Known(Dataset[torch.Tensor]):
    """Batches that sleep and compute for a known time, each in several parts."""

    sleep_seconds: np.ndarray
    units: np.ndarray
    floats: int

    def __getitem__(self, index: int) -> torch.Tensor:
        place = index % len(self.units)
        for _ in range(PARTS):
            if self.sleep_seconds[place]:
                time.sleep(self.sleep_seconds[place] / PARTS)
            compute(int(self.units[place] / PARTS))
        return torch.zeros(self.floats)


@dataclass(frozen=True)
class Measured:
    """One run: the mean wait without the first, processors kept busy by it and by other programs, and its rate."""

    wait: float
    rate: float
    processors: float
    others: float


def compute(units: int) -> int:
    """Computes for a time that depends on the processor alone."""
    total = 0
    for number in range(units):
        total += number * number
    return total


def units_per_second() -> float:
    """Of `compute`, at the processor's usual speed."""
    times = []
    for _ in range(30):
        begun = time.process_time()
        compute(100_000)
        times.append(time.process_time() - begun)
    return 100_000 / float(np.median(times))


def measure(known: Known, setting: QueueSetting, step: float, batches: int) -> Measured:
    """Runs a loader until the consumer has taken so many batches; the quietest of a few tries."""
    runs: list[Measured] = []
    while len(runs) < TRIES and (not runs or runs[-1].others > QUIET):
        runs.append(_run(known, setting, step, batches))
    return min(runs, key=lambda run: run.others)


def _run(known: Known, setting: QueueSetting, step: float, batches: int) -> Measured:
    more = {"prefetch_factor": setting.prefetch_factor, "in_order": setting.in_order} if setting.workers else {}
    asked = range(batches + setting.workers * setting.prefetch_factor)
    loader = DataLoader(known, batch_size=None, sampler=asked, num_workers=setting.workers, **more)
    begun, busy, own = time.perf_counter(), _machine_seconds(), _own_seconds()
    iterator = iter(loader)
    waits, delivered = [], []
    for _ in range(batches):
        asked_at = time.perf_counter()
        next(iterator)
        delivered.append(time.perf_counter())
        waits.append(delivered[-1] - asked_at)
        if step:
            time.sleep(step)
    del iterator  # waits for the workers' end
    seconds, own = time.perf_counter() - begun, _own_seconds() - own
    others = (_machine_seconds() - busy - own) / seconds
    rate = (batches - 1) / (delivered[-1] - delivered[0])
    return Measured(float(np.mean(waits[1:])), rate, own / seconds, max(0.0, others))


def _machine_seconds() -> float:
    """Processor seconds that all programs, and the machine's host, have used since its start."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def fit(known: Known, seconds: float, batches: int, costs: np.ndarray, processors: int) -> LoaderQueue:
    """Fits the queue to the measured settings, and prints both."""
    observations = []
    for workers, prefetch, times in FITTED:
        setting = QueueSetting(workers=workers, prefetch_factor=prefetch)
        step = times * seconds / max(1, workers)
        run = measure(known, setting, step, batches)
        _print_row(setting, step, run, "")
        observations.append(
            QueueObservation(
                setting=setting,
                batches=batches,
                batches_per_second=run.rate,
                processors=run.processors,
                step_seconds=step + _OVERSLEPT if step else 0.0,
            )
        )
    queue = fit_queue(observations, processors, costs)
    assert queue is not None
    print(
        f"  fitted: a batch {queue.batch_seconds * 1e3:.2f} ms, of which {queue.busy:.0%} computes, received in "
        f"{queue.receive_seconds * 1e3:.2f} ms, latency {queue.latency_seconds * 1e3:.2f} ms, {queue.processors:.2f} processors; mean "
        f"error of the rates {queue.relative_error:.1%}"
    )
    return queue


_OVERSLEPT = 1e-4


def compare(name: str, known: Known, seconds: float, batches: int, costs: np.ndarray) -> int:
    """Prints all for one dataset; how many predictions do not hold."""
    processors = len(os.sched_getaffinity(0))
    print(f"{name}: batches of {seconds * 1e3:g} ms on average, {processors} processors")
    print(
        f"  {'workers':>7}{'prefetch':>9}{'step':>9}{'others':>8}{'processors':>11}{'wait':>10}{'predicted':>12}{'ratio':>7}{'a batch':>9}  idle, predicted"
    )
    queue = fit(known, seconds, batches, costs, processors)
    failed = 0
    for workers, prefetch in PREDICTED:
        setting = QueueSetting(workers=workers, prefetch_factor=prefetch)
        slower = max(1.0, workers * queue.busy / processors)
        for times in STEPS:
            step = times * seconds * slower / workers
            run = measure(known, setting, step, batches)
            predicted = predict_waits(queue, setting, costs[: batches + workers * prefetch], step)
            wait = float(predicted.waits[: batches - 1].mean())
            held = abs(wait - run.wait) <= TOLERANCE * (run.wait + step)
            failed += not held
            idle = [mean / (mean + step) for mean in (run.wait, wait)]
            error = (wait - run.wait) / (run.wait + step)
            words = f"{wait * 1e3:7.2f} ms{wait / run.wait:7.2f}{error:+9.1%}{idle[0]:8.0%}{idle[1]:5.0%}"
            _print_row(setting, step, run, words + ("" if held else "  does not hold"))
    return failed


def _print_row(setting: QueueSetting, step: float, run: Measured, predicted: str) -> None:
    print(
        f"  {setting.workers:>7}{setting.prefetch_factor:>9}{step * 1e3:>6.1f} ms{run.others:>8.2f}"
        f"{run.processors:>11.2f}{run.wait * 1e3:>7.2f} ms  {predicted}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("datasets", nargs="*", help="sleeping, busy or mixed; all unless given")
    parser.add_argument("--ms", type=float, default=40.0, help="of an average batch")
    parser.add_argument("--batches", type=int, default=60, help="taken of each setting")
    parser.add_argument("--floats", type=int, default=50_000, help="in each batch")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*worker processes in total")
    torch.set_num_threads(1)
    seconds, units = options.ms / 1e3, units_per_second() * options.ms / 1e3
    costs = np.random.default_rng(0).uniform(0.5, 1.5, options.batches + 16)
    costs /= costs.mean()
    zero = np.zeros_like(costs)
    datasets = {
        "sleeping": Known(costs * seconds, zero, options.floats),
        "busy": Known(zero, costs * units, options.floats),
    }
    datasets["mixed"] = Known(costs * seconds / 2, costs * units / 2, options.floats)
    chosen = options.datasets or list(datasets)
    failed = sum(compare(name, datasets[name], seconds, options.batches, costs) for name in chosen)
    print(f"{failed} predictions do not hold")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
