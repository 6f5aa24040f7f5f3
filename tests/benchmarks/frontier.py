"""What a frontier costs and how true it is, against other searches: `python tests/benchmarks/frontier.py`.

Three searches find the largest batch that fits at each of 15 lengths, on the same workload, with the same caps (what
the data can fill), tolerance (1%, or one example), CPU limit (a real one) and supervisor:

- batchtune's probe, all of it, which also chooses the lengths;
- each length anew, doubled and then bisected, as Lightning's BatchSizeFinder is documented;
- from the last length's answer, as NVIDIA NeMo's OOMptimizer is documented (`tests/probe/peer_searches.py`).

Then the truth at each length by brute force: from 2% below batchtune's answer upwards in steps of one example, until
three in a row fail; downwards from there where nothing passed. The answer may be no higher than the truth, and no more
than the tolerance below it.

Trials and seconds are those of the search. batchtune also confirms its answers by running them in alternation, which
no other does: that is counted by itself. The workload is one whose memory is a known formula; `gpu` is a large
conformer, at 6 lengths. Exits with 1 where a target does not hold.

`frontier.py tail` compares the time to the answer on 66,816 lengths with a long tail, up to 82.5 s, and a small
transformer under 400 MiB: the whole probe, the confirmation included, with what the others take for the same lengths.
They run a single step for each try and stop at 5%, as OOMptimizer does unless told otherwise. `--busy N` runs it next
to N processes that compute all the time. At most 35 trials and 2 OOMs, 1.3 times as many next to others.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from probe.peer_searches import each_length_anew, from_the_last_answer

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Trial
from batchtune.units import format_size, parse_size

TESTS = Path(__file__).parents[1]
TAGGER = f"{TESTS / 'speech_workload.py'}:SpeechTagger"
KNOWN = f"{TESTS / 'probe' / 'known_workload.py'}:Known"
MOST_TRIALS = 35
MOST_OOMS = 2
MORE_IF_BUSY = 1.3
OOMPTIMIZER_THRESHOLD = 0.05
TOLERANCE = 0.01
TARGET_RATIO = 3
FAILED_IN_A_ROW = 3
BELOW = 0.02
KIB = 1024


def settings_of(workload, options, memory, **more):
    """Settings of a probe under all of a memory limit."""
    return ProbeSettings(
        workload=workload,
        options=options,
        memory_bytes=parse_size(memory),
        memory_fraction=1.0,
        **{"device": "cpu", "tolerance": TOLERANCE, "num_lengths": 15, **more},
    )


CASES = {
    "known": settings_of(KNOWN, {"a": 200.0 * KIB, "b": 10.0 * KIB}, "750MiB"),
    "gpu": settings_of(
        "builtin:conformer-ctc",
        {"size": "large", "dtype": "bf16", "unit": "s"},
        "16GiB",
        device="cuda",
        num_lengths=6,
    ),
}
TAIL = settings_of(TAGGER, {"layers": 3, "dropout": 0.0}, "400MiB", num_lengths=12)

PEERS = {
    "each length anew": each_length_anew,
    "from the last answer": from_the_last_answer,
}


@dataclass(frozen=True)
class Searched:
    """What one search took."""

    name: str
    trials: int
    ooms: int
    seconds: float

    def print(self, ours, lengths):
        """Print its row, next to batchtune's."""
        print(
            f"  {self.name:<22}{self.trials:>8}{self.trials / lengths:>10.2f}{self.ooms:>6}{self.seconds:>9.1f}"
            f"{self.trials / ours.trials:>10.2f}{self.seconds / ours.seconds:>11.2f}",
            flush=True,
        )


class Asked:
    """A supervisor as the peers ask it, with what it was asked."""

    def __init__(self, supervisor, *, single=False):
        self.supervisor = supervisor
        self.single = single
        self.trials: list[Trial] = []

    def __call__(self, batch_size, length):
        shape = BatchShape(batch_size, length)
        if self.single:
            trial = self.supervisor.step(shape).trial
        else:
            trial = self.supervisor.measure(shape, len(self.trials)).trial
        if trial.outcome == "error":
            raise SystemExit(f"{batch_size} x {length:g}: {trial.error}")
        self.trials.append(trial)
        return trial.outcome == "ok"


def speech_like():
    """Durations of 1 to 30 s, many short and few long."""
    drawn = np.random.default_rng(7).gamma(3.0, 3.5, 20_000)
    return Lengths.of(drawn.clip(1, 30).round(2), unit="s")


def long_tailed():
    """Lengths as those of meetings: most of a few seconds, the longest 48 times the median."""
    drawn = np.exp(np.random.default_rng(11).normal(0.55, 1.0, 66_816))
    values = drawn.clip(0.1, 80).round(2)
    values[0] = 82.5
    return Lengths.of(values, unit="s")


def probe(lengths, settings):
    """batchtune's own, in an empty run folder; also the seconds that it took after its search, to confirm."""
    begun = []

    def on_progress(_):
        begun.append(time.monotonic())

    hooks = ProbeHooks(on_progress=on_progress)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = run_probe(lengths, settings, Path(folder), hooks=hooks)
    whole = time.monotonic() - started
    trials = [trial for trial in result.trials if not trial.confirmation]
    searching = begun[0] - started + sum(trial.elapsed_seconds for trial in trials)
    ours = Searched("batchtune", len(trials), ooms_of(trials), searching)
    return ours, result, whole - searching


def peer(name, lengths, points, settings):
    """Another's search, measured by the same supervisor in a process of its own."""
    tolerance = TOLERANCE
    if settings is TAIL:
        tolerance = OOMPTIMIZER_THRESHOLD
    started = time.monotonic()
    with Supervisor(settings) as supervisor:
        supervisor.start()
        asked = Asked(supervisor, single=settings is TAIL)
        longest_first = [point.length for point in reversed(points)]
        search = PEERS[name](
            asked, longest_first, lengths.histogram.count_up_to, tolerance
        )
        for _ in search:
            pass
    seconds = time.monotonic() - started
    return Searched(name, len(asked.trials), ooms_of(asked.trials), seconds)


def largest(fits, answer, below=BELOW, cap=math.inf):
    """The largest batch size that fits, one by one from so much below the answer upwards, until three in a row fail."""
    lowest = max(1, int(answer * (1 - below)))
    best = 0
    failed = 0
    size = lowest
    while size <= cap and failed < FAILED_IN_A_ROW:
        failed += 1
        if fits(size):
            best = size
            failed = 0
        size += 1
    size = lowest - 1
    while not best and size:
        if fits(size):
            best = size
        size -= 1
    return best


def compare(lengths, settings):
    """Run and print all searches."""
    ours, result, confirming = probe(lengths, settings)
    if settings is TAIL:
        ours = replace(ours, seconds=ours.seconds + confirming)
    count = len(result.frontier)
    limit = format_size(result.device.limit_bytes)
    print(f"{lengths.count:,} lengths, {count} measured, limit {limit}")
    print(
        f"  {'search':<22}{'trials':>8}{'a length':>10}{'OOMs':>6}{'seconds':>9}{'× trials':>10}{'× seconds':>11}"
    )
    ours.print(ours, count)
    confirmation = result.confirmation
    print(
        f"  {'':<22}then confirmed: {confirmation.steps} steps of {confirmation.shapes} shapes in "
        f"{confirmation.workers} workers, {confirmation.given_up} given up, {confirming:.1f} s",
        flush=True,
    )
    peers = []
    for name in PEERS:
        peers.append(peer(name, lengths, result.frontier, settings))
        peers[-1].print(ours, count)
    return ours, peers, result


def compare_with_the_truth(name):
    """Run and print all for one workload; whether the targets hold."""
    print(name)
    lengths = speech_like()
    settings = CASES[name]
    ours, peers, result = compare(lengths, settings)
    print(f"  {'length':>8}{'batchtune':>11}{'truth':>8}{'below':>8}  closed by")
    # On a GPU some of the cache's pages are only used in part.
    within = 0.03 if settings.device == "cuda" else TOLERANCE
    exact = True
    with Supervisor(settings) as supervisor:
        supervisor.start()
        asked = Asked(supervisor)
        for point in result.frontier:
            cap = lengths.histogram.count_up_to(point.length)
            fits = partial(asked, length=point.length)
            true = largest(fits, point.batch_size, cap=cap)
            below = true - point.batch_size
            exact &= 0 <= below <= max(1, int(point.batch_size * within))
            print(
                f"  {point.length:>8g}{point.batch_size:>11}{true:>8}{below / true:>8.2%}  {point.closed_by}",
                flush=True,
            )
    fewer = all(other.trials >= TARGET_RATIO * ours.trials for other in peers)
    held(f"at least {TARGET_RATIO} times fewer trials", fewer)
    held(f"never above the truth, at most {within:.0%} or one example below", exact)
    return fewer and exact


def compare_on_a_long_tail(busy):
    """Run and print the comparison on a long tail, next to so many busy processes; whether the targets hold."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(busy)]
    try:
        ours, _, _ = compare(long_tailed(), TAIL)
    finally:
        for process in others:
            process.kill()
            process.wait()
    more = MORE_IF_BUSY if busy else 1.0
    few = ours.trials <= more * MOST_TRIALS and ours.ooms <= more * MOST_OOMS
    held(f"at most {more * MOST_TRIALS:.0f} trials and {more * MOST_OOMS:g} OOMs", few)
    return few


def ooms_of(trials):
    """How many trials ran out of memory."""
    return sum(trial.outcome == "oom" for trial in trials)


def held(target, holds):
    """Print whether a target holds."""
    print(f"  {target}: {'yes' if holds else 'NO'}", flush=True)


def main():
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[*CASES, "tail"])
    parser.add_argument(
        "--busy", type=int, default=0, help="with tail: next to so many busy processes"
    )
    options = parser.parse_args()
    good = True
    for name in options.workloads or ["known"]:
        if name == "tail":
            good &= compare_on_a_long_tail(options.busy)
        else:
            good &= compare_with_the_truth(name)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
