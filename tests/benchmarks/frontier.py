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
no other does: that is counted by itself. Two workloads: one whose memory is a known formula, and a small conformer.
Exits with 1 where a target does not hold.

`frontier.py tail` compares the time to the answer on 66,816 lengths with a long tail, up to 82.5 s, and a small
transformer under 400 MiB: the whole probe, the confirmation included, with what the others take for the same lengths.
They run a single step for each try and stop at 5%, as OOMptimizer does unless told otherwise. `--busy N` runs it next
to N processes that compute all the time. At most 35 trials and 2 OOMs, 1.3 times as many next to others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from probe.peer_searches import each_length_anew, from_the_last_answer

from batchtune.lengths import Lengths
from batchtune.probe.messages import ProbeHooks, ProbeProgress
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, FrontierPoint, Probe, Trial
from batchtune.units import format_size, parse_size

TAGGER = f"{Path(__file__).parents[1] / 'speech_workload.py'}:SpeechTagger"
MOST_TRIALS = 35
MOST_OOMS = 2
_MORE_IF_BUSY = 1.3
_OOMPTIMIZER_THRESHOLD = 0.05
KNOWN = f"{Path(__file__).parents[1] / 'probe' / 'known_workload.py'}:Known"
TOLERANCE = 0.01
TARGET_RATIO = 3
_FAILED_IN_A_ROW = 3
_BELOW = 0.02
_KIB = 1024
_HEADER = f"  {'search':<22}{'trials':>8}{'a length':>10}{'OOMs':>6}{'seconds':>9}{'× trials':>10}{'× seconds':>11}"


@dataclass(frozen=True)
class Case:
    """A workload and the memory it is given."""

    workload: str
    options: dict[str, object]
    memory: str
    device: str = "cpu"


CASES = {
    "known": Case(KNOWN, {"a": 200.0 * _KIB, "b": 10.0 * _KIB}, "750MiB"),
    "conformer": Case("builtin:conformer-ctc", {"size": "tiny", "unit": "s"}, "480MiB"),
    "gpu": Case(
        "builtin:conformer-ctc",
        {"size": "large", "dtype": "bf16", "unit": "s"},
        "16GiB",
        "cuda",
    ),
}

PeerSearch = Callable[..., Iterator[tuple[float, int]]]
PEERS: dict[str, PeerSearch] = {
    "each length anew": each_length_anew,
    "from the last answer": from_the_last_answer,
}


@dataclass(frozen=True)
class Searched:
    """What one search took and found."""

    name: str
    trials: int
    ooms: int
    seconds: float
    found: dict[float, int]


class Asked:
    """A supervisor as the peers ask it, with what it was asked."""

    def __init__(self, supervisor: Supervisor, *, single: bool = False) -> None:
        self.supervisor = supervisor
        self.single = single
        self.trials: list[Trial] = []

    def __call__(self, batch_size: int, length: float) -> bool:
        shape = BatchShape(batch_size, length)
        ran = (
            self.supervisor.step(shape)
            if self.single
            else self.supervisor.measure(shape, len(self.trials))
        )
        trial = ran.trial
        if trial.outcome == "error":
            raise SystemExit(
                f"{batch_size} x {length:g}: {trial.outcome}: {trial.error}"
            )
        self.trials.append(trial)
        return trial.outcome == "ok"


def speech_like(count: int = 20_000) -> Lengths:
    """Durations of 1 to 30 s, many short and few long."""
    return Lengths.of(
        np.random.default_rng(7).gamma(3.0, 3.5, count).clip(1, 30).round(2), unit="s"
    )


def probe(
    lengths: Lengths, settings: ProbeSettings, folder: Path
) -> tuple[Searched, Probe, float]:
    """batchtune's own, in an empty run folder; also the seconds that it took after its search, to confirm."""
    begun: list[float] = []

    def on_progress(_: ProbeProgress) -> None:
        begun.append(time.monotonic())

    started = time.monotonic()
    result = run_probe(
        lengths, settings, folder, hooks=ProbeHooks(on_progress=on_progress)
    )
    whole = time.monotonic() - started
    trials = [
        trial for trial in result.trials if not getattr(trial, "confirmation", False)
    ]
    searching = begun[0] - started + sum(trial.elapsed_seconds for trial in trials)
    found = {point.length: point.batch_size for point in result.frontier}
    return (
        Searched("batchtune", len(trials), _ooms(trials), searching, found),
        result,
        whole - searching,
    )


def peer(
    name: str,
    search: PeerSearch,
    lengths: Lengths,
    points: list[FrontierPoint],
    settings: ProbeSettings,
    *,
    tolerance: float = TOLERANCE,
    single: bool = False,
) -> Searched:
    """Another's search, measured by the same supervisor in a process of its own."""
    started = time.monotonic()
    with supervise(settings) as supervisor:
        supervisor.start()
        asked = Asked(supervisor, single=single)
        longest_first = [point.length for point in reversed(points)]
        found = dict(
            search(asked, longest_first, lengths.histogram.count_up_to, tolerance)
        )
    return Searched(
        name, len(asked.trials), _ooms(asked.trials), time.monotonic() - started, found
    )


def truth(
    lengths: Lengths, points: list[FrontierPoint], settings: ProbeSettings
) -> dict[float, int]:
    """The largest batch size that fits at each length, one by one around the answer."""
    with supervise(settings) as supervisor:
        supervisor.start()
        asked = Asked(supervisor)
        caps = {
            point.length: lengths.histogram.count_up_to(point.length)
            for point in points
        }
        return {
            point.length: _largest(
                asked, point.batch_size, point.length, caps[point.length]
            )
            for point in points
        }


def _largest(fits: Asked, answer: int, length: float, cap: int) -> int:
    lowest = max(1, int(answer * (1 - _BELOW)))
    best, failed, size = 0, 0, lowest
    while size <= cap and failed < _FAILED_IN_A_ROW:
        if fits(size, length):
            best, failed = size, 0
        else:
            failed += 1
        size += 1
    size = lowest - 1
    while not best and size:
        best, size = (size, size) if fits(size, length) else (0, size - 1)
    return best


def supervise(settings: ProbeSettings, limit_bytes: int | None = None) -> Supervisor:
    """Measures under the limit that was worked out before, or works it out."""
    return Supervisor(settings, limit_bytes)


def compare(name: str, case: Case, num_lengths: int, memory: str | None) -> bool:
    """Runs and prints all for one workload; whether the targets hold."""
    lengths = speech_like()
    settings = ProbeSettings(
        workload=case.workload,
        options=case.options,
        device=case.device,
        memory_bytes=parse_size(memory or case.memory),
        memory_fraction=1.0,
        num_lengths=num_lengths,
        tolerance=TOLERANCE,
    )
    with tempfile.TemporaryDirectory() as folder:
        ours, result, confirming = probe(lengths, settings, Path(folder))
    print(
        f"{name}: {len(ours.found)} lengths, limit {format_size(result.device.limit_bytes)}"
    )
    print(_HEADER)
    _print_search(ours, ours)
    _print_confirmation(result, confirming)
    peers = []
    for other, search in PEERS.items():
        peers.append(peer(other, search, lengths, result.frontier, settings))
        _print_search(peers[-1], ours)
    true = truth(lengths, result.frontier, settings)
    exact = _print_answers(result.frontier, true, peers)
    fewer = all(other.trials >= TARGET_RATIO * ours.trials for other in peers)
    print(f"  at least {TARGET_RATIO} times fewer trials: {_yes(fewer)}")
    print(
        f"  never above the truth, at most {TOLERANCE:.0%} or one example below: {_yes(exact)}\n",
        flush=True,
    )
    return fewer and exact


def long_tailed(count: int = 66_816) -> Lengths:
    """Lengths as those of meetings: most of a few seconds, the longest 48 times the median."""
    values = (
        np.exp(np.random.default_rng(11).normal(0.55, 1.0, count))
        .clip(0.1, 80)
        .round(2)
    )
    values[0] = 82.5
    return Lengths.of(values, unit="s")


def compare_on_a_long_tail(busy: int) -> bool:
    """Runs and prints the comparison on a long tail, next to so many busy processes; whether the targets hold."""
    lengths = long_tailed()
    settings = ProbeSettings(
        workload=TAGGER,
        options={"layers": 3, "dropout": 0.0},
        device="cpu",
        memory_bytes=parse_size("400MiB"),
        memory_fraction=1.0,
    )
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(busy)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ours, result, confirming = probe(lengths, settings, Path(folder))
        whole = replace(ours, seconds=ours.seconds + confirming)
        print(
            f"{lengths.count:,} lengths up to {lengths.longest:g} s; {len(ours.found)} measured; {busy} busy processes"
        )
        print(
            f"  {'search':<22}{'trials':>8}{'a length':>10}{'OOMs':>6}{'seconds':>9}{'× trials':>10}{'× seconds':>11}"
        )
        _print_search(whole, whole)
        _print_confirmation(result, confirming)
        for name, search in PEERS.items():
            limits = {"tolerance": _OOMPTIMIZER_THRESHOLD, "single": True}
            _print_search(
                peer(name, search, lengths, result.frontier, settings, **limits), whole
            )
    finally:
        for process in others:
            process.kill()
            process.wait()
    more = _MORE_IF_BUSY if busy else 1.0
    held = ours.trials <= more * MOST_TRIALS and ours.ooms <= more * MOST_OOMS
    print(
        f"  at most {more * MOST_TRIALS:.0f} trials and {more * MOST_OOMS:g} OOMs: {_yes(held)}\n",
        flush=True,
    )
    return held


def _print_search(one: Searched, ours: Searched) -> None:
    print(
        f"  {one.name:<22}{one.trials:>8}{one.trials / len(ours.found):>10.2f}{one.ooms:>6}{one.seconds:>9.1f}"
        f"{one.trials / ours.trials:>10.2f}{one.seconds / ours.seconds:>11.2f}",
        flush=True,
    )


def _print_confirmation(result: Probe, seconds: float) -> None:
    confirmation = result.confirmation
    assert confirmation is not None
    print(
        f"  {'':<22}then confirmed: {confirmation.steps} steps of {confirmation.shapes} shapes in "
        f"{confirmation.workers} workers, {confirmation.given_up} given up, {seconds:.1f} s",
        flush=True,
    )


def _print_answers(
    points: list[FrontierPoint], true: dict[float, int], peers: list[Searched]
) -> bool:
    print(
        f"  {'length':>8}{'batchtune':>11}{'truth':>8}{'below':>8}  {'closed by':<10}"
        + "  ".join(p.name for p in peers)
    )
    exact = True
    for point in points:
        below = true[point.length] - point.batch_size
        held = 0 <= below <= max(1, int(point.batch_size * TOLERANCE))
        exact &= held
        others = "  ".join(
            f"{other.found[point.length]:>{len(other.name)}}" for other in peers
        )
        print(
            f"  {point.length:>8g}{point.batch_size:>11}{true[point.length]:>8}{below / true[point.length]:>8.2%}"
            f"  {point.closed_by:<10}{others}{'' if held else '  does not hold'}",
            flush=True,
        )
    return exact


def _ooms(trials: list[Trial]) -> int:
    return sum(trial.outcome == "oom" for trial in trials)


def _yes(held: bool) -> str:
    return "yes" if held else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "workloads",
        nargs="*",
        help=f"{', '.join(CASES)}, those of the CPU unless given; or tail",
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="with tail: next to so many busy processes"
    )
    parser.add_argument(
        "--memory", help="limit, such as 2GiB; each workload's own unless given"
    )
    parser.add_argument("--lengths", type=int, default=15, help="how many lengths")
    options = parser.parse_args()
    started = time.monotonic()
    if options.workloads == ["tail"]:
        raise SystemExit(not compare_on_a_long_tail(options.busy))
    chosen = options.workloads or ["known", "conformer"]
    if unknown := [name for name in chosen if name not in CASES]:
        parser.error(
            f"there is no workload {unknown[0]!r}; known ones: {', '.join(CASES)}"
        )
    held = [
        compare(name, CASES[name], options.lengths, options.memory) for name in chosen
    ]
    print(f"{time.monotonic() - started:.0f} s in all")
    raise SystemExit(not all(held))


if __name__ == "__main__":
    main()
