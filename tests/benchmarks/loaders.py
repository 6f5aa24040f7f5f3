"""Predicted against measured waits of real DataLoaders: `python tests/benchmarks/loaders.py`.

Datasets whose batches have a known cost: `sleeping` (a wait for a disk or a network), `busy` (a fixed amount of
computing, which takes as long alone), `mixed` (half of each, alternating), and `sharing`, whose workers sleep as if
they computed on 2 processors that nothing else uses: the more of them at once, the longer. Each batch costs 0.5 to 1.5
times the average. The consumer sleeps for each step, as a training process does that waits for its GPU.

The queue is fitted to few settings: no worker, 1 and 2, and one of them with long steps. It then predicts the mean
wait, the first batch apart, of settings that were not used: other numbers of workers and other prefetch factors, each
with no step and with steps shorter and longer than what production takes. The printed ratio is predicted / measured. A
prediction holds if it is within 10% of the measured wait, or, as most waits are near zero where steps are long, within
10% of the time of a batch (wait + step).

Each is measured 3 times, and the median counts. Other programs slow computing down: for at most `--patience` seconds in
all, batches that compute wait for quiet moments, and are measured up to 8 times until the others kept no more than 0.15
processors busy meanwhile. If that never comes, the row says `disturbed` and judges nothing. Exits with 1 where a
prediction does not hold, or where more than half were disturbed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from batchtune.cost.loader_queue import QueueObservation, fit_queue, predict_waits
from batchtune.cost.loader_simulation import QueueSetting
from batchtune.results import LoaderQueue

TOLERANCE = 0.1
PROCESSORS = len(os.sched_getaffinity(0))
SHARED = 2  # processors of the dataset `sharing`
QUIET, TRIES, MOST = 0.15, 3, 8
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
    computing: Any = None  # how many workers share processors now: a multiprocessing.Value

    @property
    def processors(self) -> int:
        """That its workers share."""
        return PROCESSORS if self.computing is None else SHARED

    def __getitem__(self, index: int) -> torch.Tensor:
        place = index % len(self.units)
        if self.computing is not None:
            share_processors(self.sleep_seconds[place], self.computing)
            return torch.zeros(self.floats)
        for _ in range(PARTS):
            if self.sleep_seconds[place]:
                time.sleep(self.sleep_seconds[place] / PARTS)
            compute(int(self.units[place] / PARTS))
        return torch.zeros(self.floats)


@dataclass(frozen=True)
class Measured:
    """One run: the mean wait without the first and the mean step, the rate, processors busy by it and by others."""

    wait: float
    step: float
    rate: float
    processors: float
    others: float


def share_processors(seconds: float, computing: Any) -> None:
    """Sleeps for as long as so much computing takes on shared processors."""
    with computing.get_lock():
        computing.value += 1
    now = time.perf_counter()
    while seconds > 0:
        time.sleep(min(seconds, 1e-3))
        before, now = now, time.perf_counter()
        seconds -= (now - before) * min(1.0, SHARED / computing.value)
    with computing.get_lock():
        computing.value -= 1


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


def measure(
    known: Known, setting: QueueSetting, step: float, batches: int, until: float = 0.0, *, tries: int = TRIES
) -> Measured:
    """Runs a loader until the consumer has taken so many batches: the median by its wait of several runs.

    Until a time on the monotonic clock, batches that compute wait for quiet moments, and are repeated if disturbed.
    """
    computes = bool(known.units.any())
    runs: list[Measured] = []
    while len(runs) < tries or (computes and not _quiet(runs) and len(runs) < MOST and time.monotonic() < until):
        while computes and time.monotonic() < until and _others_now() > QUIET:
            pass
        runs.append(_run(known, setting, step, batches))
    counted = runs if not computes else _quiet(runs) or [min(runs, key=lambda run: run.others)]
    return sorted(counted, key=lambda run: run.wait)[len(counted) // 2]


def _quiet(runs: list[Measured]) -> list[Measured]:
    return [run for run in runs if run.others <= QUIET]


def _others_now() -> float:
    """How many processors other programs keep busy, for a fifth of a second."""
    begun, busy = time.perf_counter(), _machine_seconds()
    time.sleep(0.2)
    return (_machine_seconds() - busy) / (time.perf_counter() - begun)


def _run(known: Known, setting: QueueSetting, step: float, batches: int) -> Measured:
    more = {"prefetch_factor": setting.prefetch_factor, "in_order": setting.in_order} if setting.workers else {}
    asked = range(batches + setting.workers * setting.prefetch_factor)
    loader = DataLoader(known, batch_size=None, sampler=asked, num_workers=setting.workers, **more)
    begun, busy, own = time.perf_counter(), _machine_seconds(), _own_seconds()
    iterator = iter(loader)
    waits, delivered, steps = [], [], []
    for _ in range(batches):
        asked_at = time.perf_counter()
        next(iterator)
        delivered.append(time.perf_counter())
        waits.append(delivered[-1] - asked_at)
        if step:
            time.sleep(step)
        steps.append(time.perf_counter() - delivered[-1])
    del iterator  # waits for the workers' end
    seconds, own = time.perf_counter() - begun, _own_seconds() - own
    others = (_machine_seconds() - busy - own) / seconds
    rate = (batches - 1) / (delivered[-1] - delivered[0])
    return Measured(float(np.mean(waits[1:])), float(np.mean(steps)), rate, own / seconds, max(0.0, others))


def _machine_seconds() -> float:
    """Processor seconds that all programs, and the machine's host, have used since its start."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def observe(
    known: Known, setting: QueueSetting, step: float, batches: int, until: float = 0.0, *, tries: int = TRIES
) -> tuple[QueueObservation, Measured]:
    """Measures a setting as the fit takes it."""
    run = measure(known, setting, step, batches, until, tries=tries)
    observation = QueueObservation(
        setting=setting,
        batches=batches,
        batches_per_second=run.rate,
        processors=run.processors if known.computing is None else float(np.mean(known.sleep_seconds)) * run.rate,
        step_seconds=run.step if step else 0.0,
    )
    return observation, run


def fit(known: Known, seconds: float, batches: int, costs: np.ndarray, until: float) -> LoaderQueue:
    """Fits the queue to the measured settings, and prints both."""
    observations = []
    for workers, prefetch, times in FITTED:
        setting = QueueSetting(workers=workers, prefetch_factor=prefetch)
        observation, run = observe(known, setting, times * seconds / max(1, workers), batches, until)
        observations.append(observation)
        _print_row(setting, run, "")
    queue = fit_queue(observations, known.processors, costs)
    assert queue is not None
    times_ms = (1e3 * value for value in (queue.batch_seconds, queue.receive_seconds, queue.latency_seconds))
    print(
        "  fitted: a batch {:.2f} ms, received in {:.2f} ms, latency {:.2f} ms, ".format(*times_ms)
        + f"{queue.busy:.0%} computes, {queue.processors:.2f} processors; error {queue.relative_error:.1%}"
    )
    return queue


def predicted_wait(queue: LoaderQueue, setting: QueueSetting, step: float, batches: int, costs: np.ndarray) -> float:
    """The mean wait of the same batches, the first apart."""
    asked = costs[: batches + setting.workers * setting.prefetch_factor]
    relative = asked / asked.mean()
    queue = msgspec.structs.replace(queue, batch_seconds=queue.batch_seconds * float(asked.mean()))
    return float(predict_waits(queue, setting, relative, step).waits[: batches - 1].mean())


def compare(name: str, known: Known, seconds: float, batches: int, costs: np.ndarray, until: float) -> list[bool]:
    """Prints all for one dataset; for each prediction that can be judged, whether it holds."""
    print(f"{name}: batches of {seconds * 1e3:g} ms on average, {known.processors} processors")
    print(
        f"  {'workers':>7}{'prefetch':>9}{'step':>9}{'others':>8}{'processors':>11}{'wait':>10}"
        f"{'predicted':>12}{'ratio':>7}{'a batch':>9}  idle, predicted"
    )
    queue = fit(known, seconds, batches, costs, until)
    judged = []
    for workers, prefetch in PREDICTED:
        setting = QueueSetting(workers=workers, prefetch_factor=prefetch)
        alone = seconds / workers * max(1.0, workers * queue.busy / known.processors)
        for times in STEPS:
            run = measure(known, setting, times * alone, batches, until)
            wait = predicted_wait(queue, setting, run.step, batches, costs)
            error = (wait - run.wait) / (run.wait + run.step)
            idle = [mean / (mean + run.step) for mean in (run.wait, wait)]
            words = f"{wait * 1e3:7.2f} ms{wait / run.wait:7.2f}{error:+9.1%}{idle[0]:8.0%}{idle[1]:5.0%}"
            if run.others > QUIET and known.units.any():
                words += "  disturbed"
            else:
                judged.append(abs(error) <= TOLERANCE)
                words += "" if judged[-1] else "  does not hold"
            _print_row(setting, run, words)
    return judged


def _print_row(setting: QueueSetting, run: Measured, predicted: str) -> None:
    print(
        f"  {setting.workers:>7}{setting.prefetch_factor:>9}{run.step * 1e3:>6.1f} ms{run.others:>8.2f}"
        f"{run.processors:>11.2f}{run.wait * 1e3:>7.2f} ms  {predicted}",
        flush=True,
    )


def known_datasets(seconds: float, batches: int, floats: int = 50_000) -> tuple[dict[str, Known], np.ndarray]:
    """The datasets by name, and the batches' relative costs, with mean 1."""
    costs = np.random.default_rng(0).uniform(0.5, 1.5, batches + 16)
    costs /= costs.mean()
    sleeping, computing = costs * seconds, costs * seconds * units_per_second()
    datasets = {
        "sleeping": Known(sleeping, 0 * computing, floats),
        "busy": Known(0 * sleeping, computing, floats),
        "mixed": Known(sleeping / 2, computing / 2, floats),
        "sharing": Known(sleeping, 0 * computing, floats, multiprocessing.Value("i", 0)),
    }
    return datasets, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("datasets", nargs="*", help="sleeping, busy, mixed or sharing; all unless given")
    parser.add_argument("--ms", type=float, default=40.0, help="of an average batch")
    parser.add_argument("--batches", type=int, default=60, help="taken of each setting")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for quiet moments, in all")
    parser.add_argument("--floats", type=int, default=50_000, help="in each batch")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*worker processes in total")
    torch.set_num_threads(1)
    datasets, costs = known_datasets(options.ms / 1e3, options.batches, options.floats)
    until = time.monotonic() + options.patience
    chosen = options.datasets or list(datasets)
    judged = [
        held
        for name in chosen
        for held in compare(name, datasets[name], options.ms / 1e3, options.batches, costs, until)
    ]
    asked = len(chosen) * len(PREDICTED) * len(STEPS)
    print(f"of {asked} predictions {sum(judged)} hold, {len(judged) - sum(judged)} do not", end=", ")
    print(f"{asked - len(judged)} were disturbed by other programs")
    raise SystemExit(not all(judged) or len(judged) < asked / 2)


if __name__ == "__main__":
    main()
