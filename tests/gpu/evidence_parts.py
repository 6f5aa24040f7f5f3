"""The parts of the evidence harness: what each measures, by batchtune's public commands and functions."""

from __future__ import annotations

import math
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from benchmarks.epochs import shapes_of, with_batchtune, with_lhotse
from benchmarks.frontier import PEERS, OutOfTime, Searched, peer, probe, supervise
from gpu.evidence_bench import QUICK_FRACTION, QUICK_LENGTHS, ROOT, Bench
from gpu.evidence_record import Missing
from reproduced import speechbrain_batches
from torch.utils.data import BatchSampler

from batchtune.exports.run_configs import read_sampler_yaml
from batchtune.lengths import FloatArray, Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    SWEEP_FILE,
    VERIFY_FILE,
    CostModel,
    Probe,
    Row,
    Sweep,
    Verification,
    read_result,
)
from batchtune.shapes import BatchShape
from batchtune.tuning.costs import costs_of
from batchtune.tuning.sweep import sweep
from batchtune.tuning.sweep_settings import SweepSettings
from batchtune.units import format_size

SPEECH_UNITS = ("s", "ms", "samples", "frames")
SPEECHBRAIN_BUCKETS = (10, 20, 200)
# An epoch's time is known well enough at this standard error; fewer batches than these say nothing of it.
STANDARD_ERROR, FEWEST_BATCHES = 0.01, 30
QUICK_STANDARD_ERROR, QUICK_FEWEST_BATCHES = 0.2, 3
SOAK_STEPS, SOAK_FRACTIONS = 500, (0.95, 0.9)
QUICK_SOAK_STEPS, QUICK_SOAK_FRACTIONS = 10, (0.46,)
# Of the time that a soak has left for its steps, to end inside it.
SOAK_SHARE = 0.8
EXPANDABLE = "expandable_segments:True"


def tests(bench: Bench) -> None:
    """Runs tests/gpu; tells failures that batchtune raised from those of a test's own assertions."""
    path = bench.out / "tests.xml"
    path.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q", "--durations=0"]
    pytest += [f"--junitxml={path.absolute()}", f"--rootdir={ROOT}", f"-c={ROOT / 'pyproject.toml'}"]
    try:
        bench.run(
            [*pytest, f"--junitxml={path.absolute()}", f"--rootdir={ROOT}", f"-c={ROOT / 'pyproject.toml'}"], {0, 1}
        )
    except Missing as missing:  # interrupted, pytest still writes what it ran
        if not path.exists():
            raise
        bench.record.miss(str(missing))
    cases = list(ElementTree.parse(path).iter("testcase"))
    outcomes = [_outcome(case) for case in cases]
    failed = [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "raised_in": _raised_in(problem.text or ""),
            "message": (problem.get("message") or "")[:500],
        }
        for case in cases
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    bench.record.data["failures"] = failed
    bench.record.data["seconds"] = {case.get("name"): float(case.get("time") or 0) for case in cases}
    counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    bench.record.figure(
        "tests that need a GPU (tests/gpu)", ", ".join(f"{count} {name}" for name, count in counts.items()), **counts
    )
    for one in failed:
        bench.record.miss(f"{one['test']} failed in {one['raised_in']}: {one['message'][:200]}")
    if not counts["passed"]:
        bench.record.miss("no test ran")


def _outcome(case: ElementTree.Element) -> str:
    found = {child.tag for child in case}
    return "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"


def _raised_in(traceback: str) -> str:
    """Where the last frame of a failure is: `batchtune` (the product's own) or the test; `elsewhere` for a library."""
    frames = re.findall(r"^(\S+\.py):\d+: ", traceback, re.MULTILINE)
    last = frames[-1] if frames else ""
    return next((f"{folder}/ ({last})" for folder in ("batchtune", "tests") if f"{folder}/" in last), "elsewhere")


def speech_settings(bench: Bench, lengths: Lengths) -> ProbeSettings:
    """The built-in conformer on the whole device; a tiny one with --quick."""
    settings = ProbeSettings(
        workload="builtin:conformer-ctc",
        options=speech_options(bench, lengths),
        device=bench.device,
        memory_bytes=bench.memory_bytes,
    )
    few = {"num_lengths": QUICK_LENGTHS, "max_lengths": QUICK_LENGTHS, "memory_fraction": QUICK_FRACTION}
    return msgspec.structs.replace(settings, **few) if bench.quick else settings


def speech_options(bench: Bench, lengths: Lengths, size: str = "large") -> dict[str, Any]:
    """Of the built-in conformer, in the lengths' unit."""
    if lengths.unit not in SPEECH_UNITS:
        raise Missing(f"lengths of utterances are needed, in {', '.join(SPEECH_UNITS)}; these are in {lengths.unit}")
    chosen = {"size": "tiny", "dtype": "fp32"} if bench.quick else {"size": size, "dtype": "bf16"}
    return {**chosen, "unit": lengths.unit}


def speech(bench: Bench) -> None:
    """Finds the frontier of a conformer, and the same frontier by the searches of others."""
    lengths = bench.lengths()
    settings = speech_settings(bench, lengths)
    try:
        ours, found, confirming = probe(lengths, settings, bench.out / "speech-run", bench.deadline)
    except OutOfTime:
        raise Missing(f"the probe ran out of time; its trials are in {bench.out / 'speech-run'}") from None
    limit = format_size(found.device.limit_bytes)
    told, seen = _searched(ours)
    bench.record.figure(f"a frontier of {len(ours.found)} lengths under {limit}: {_SEARCHED}", told, **seen)
    confirmation = found.confirmation
    assert confirmation is not None
    bench.record.figure(
        "confirming that frontier in turns: steps, given up, wall time",
        f"{confirmation.steps}, {confirmation.given_up}, {confirming:.0f} s",
        steps=confirmation.steps,
        given_up=confirmation.given_up,
        wall_seconds=confirming,
        time_ratio=confirmation.time_ratio,
    )
    for what, model in (("memory", found.models.peak_bytes), ("step times", found.models.step_seconds)):
        _model_figure(bench, what, model)
    for index, (name, search) in enumerate(PEERS.items()):
        share = bench.seconds_left / (len(PEERS) - index)
        other = peer(name, search, lengths, found.frontier, settings, time.monotonic() + share)
        _peer_figure(bench, other, ours)


_SEARCHED = "trials, of them out of memory, wall time"


def _searched(one: Searched) -> tuple[str, dict[str, Any]]:
    shown = f"{one.trials}, {one.ooms}, {one.seconds:.0f} s"
    return shown, {"trials": one.trials, "ooms": one.ooms, "wall_seconds": one.seconds, "lengths": len(one.found)}


def _peer_figure(bench: Bench, other: Searched, ours: Searched) -> None:
    if len(other.found) < len(ours.found):
        bench.record.miss(f"“{other.name}” came to {len(other.found)} of {len(ours.found)} lengths")
    if not other.found:
        return
    # In proportion where it did not come to all lengths.
    each = len(other.found) / len(ours.found)
    trials, seconds = other.trials / ours.trials / each, other.seconds / ours.seconds / each
    sizes = [other.found[length] / ours.found[length] for length in other.found]
    told, seen = _searched(other)
    bench.record.figure(
        f"{len(other.found)} of its lengths by “{other.name}”: {_SEARCHED}; batch sizes against batchtune's",
        f"{told}: {trials:.1f} times the trials, {seconds:.1f} times the time, a length; "
        f"{min(sizes):.3f} to {max(sizes):.3f} times",
        **seen,
        times_the_trials=trials,
        times_the_time=seconds,
        batch_sizes=other.found,
        batchtune_batch_sizes=ours.found,
    )


def _model_figure(bench: Bench, what: str, model: CostModel | None) -> None:
    if model is None:
        bench.record.miss(f"no model of {what}: too few trials passed")
        return
    largest = "" if model.largest_error is None else f", {model.largest_error:.1%}"
    bench.record.figure(
        f"error of its model of {what} over all trials: root mean square{', largest' if largest else ''}",
        f"{model.relative_error:.1%}{largest}",
        relative_error=model.relative_error,
        largest_error=model.largest_error,
    )


@dataclass
class Sampled:
    """One sampler's epoch, of which a random sample is run.

    Attributes:
        shapes: Of its batches, in random order: those run so far come first.
        padding_ratio: Padded cells over all cells.
        predicted: Seconds of each batch, in that order; all 1 where no step times are known.
        measured: Seconds of those run so far.
    """

    shapes: list[BatchShape]
    padding_ratio: float
    predicted: FloatArray
    measured: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The epoch's time: what its batches are predicted to take, times measured over predicted of the sample."""
        return float(self.predicted.sum() * np.sum(self.measured) / self.predicted[: len(self.measured)].sum())

    @property
    def error(self) -> float:
        """Its standard error, as a share (ratio estimator, drawn without replacement; Cochran 1977, 6.4)."""
        count, all_of_them = len(self.measured), len(self.shapes)
        if count == all_of_them:
            return 0.0
        if count < min(2, all_of_them):
            return math.inf
        missed = np.array(self.measured) - self.predicted[:count] * (self.seconds / self.predicted.sum())
        deviation = math.sqrt(float(np.sum(missed**2)) / (count - 1))
        return all_of_them * math.sqrt((1 - count / all_of_them) / count) * deviation / self.seconds

    def known(self, *, quick: bool = False) -> bool:
        """Whether enough of it was run."""
        fewest = QUICK_FEWEST_BATCHES if quick else FEWEST_BATCHES
        error = QUICK_STANDARD_ERROR if quick else STANDARD_ERROR
        return len(self.measured) >= min(fewest, len(self.shapes)) and self.error <= error


def epoch(bench: Bench) -> None:
    """Times epochs of several samplers on random samples of their batches, interleaved."""
    lengths = bench.lengths()
    settings = speech_settings(bench, lengths)
    found = _probed(bench, lengths, settings)
    swept = sweep(lengths, found.max_batch_length, SweepSettings(), costs_of(found))
    samplers = {
        name: _sampled(lengths, batches, values, found)
        for name, (values, batches) in _epochs(lengths, found, swept).items()
    }
    with supervise(settings) as supervisor:
        supervisor.start()
        for shape in [max(one.shapes, key=lambda shape: shape.padded_length) for one in samplers.values()] * 2:
            supervisor.step(shape)  # the warm-up
        while bench.seconds_left:
            unknown = {name: one for name, one in samplers.items() if not one.known(quick=bench.quick)}
            if not unknown:
                break
            for name, one in unknown.items():
                stepped = supervisor.step(one.shapes[len(one.measured)]).trial
                if stepped.outcome != "ok" or stepped.step_seconds is None:
                    raise Missing(
                        f"{name}: {one.shapes[len(one.measured)]} ended with {stepped.outcome}: {stepped.error}"
                    )
                one.measured.append(stepped.step_seconds)
    for name, one in samplers.items():
        _epoch_figure(bench, name, one, samplers["the best table"])


def _probed(bench: Bench, lengths: Lengths, settings: ProbeSettings) -> Probe:
    """The probe of the part `speech`, where it is there and of the same; else one that is made now."""
    folder = bench.out / "speech-run"
    if (folder / PROBE_FILE).exists():
        earlier = read_result(folder / PROBE_FILE, Probe)
        same = earlier.lengths == lengths.summary() and earlier.workload.options == settings.options
        if same and earlier.settings == settings.recorded():
            return earlier
    try:
        return probe(lengths, settings, folder, bench.deadline)[1]
    except OutOfTime:
        raise Missing(f"the probe ran out of time; its trials are in {folder}") from None


def _epochs(lengths: Lengths, found: Probe, swept: Sweep) -> dict[str, tuple[FloatArray, list[list[int]]]]:
    """The lengths in the order of a data set, shuffled, and each sampler's batches of them."""
    if swept.recommended_table is None:
        raise Missing(f"no table is recommended: {swept.reason}")
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]
    size = swept.baselines[0].batch_size
    epochs = {"the best table": with_batchtune(values, lengths, found, swept)}
    for count in SPEECHBRAIN_BUCKETS:
        batches = speechbrain_batches(values, found.max_batch_length, count)
        epochs[f"SpeechBrain's DynamicBatchSampler, {count} buckets"] = batches
    epochs["Lhotse's 20 bins with the measured sizes"] = with_lhotse(values, lengths, found, swept)
    epochs[f"fixed batches of {size}, sorted"] = _cut(np.argsort(values, kind="stable"), size)
    shuffled = torch.randperm(values.size, generator=torch.Generator().manual_seed(0)).numpy()
    epochs[f"fixed batches of {size}, shuffled"] = _cut(shuffled, size)
    return {name: (values, batches) for name, batches in epochs.items()}


def _cut(order: np.ndarray[Any, Any], size: int) -> list[list[int]]:
    return list(BatchSampler(order.tolist(), size, drop_last=False))


def _sampled(lengths: Lengths, batches: list[list[int]], values: FloatArray, found: Probe) -> Sampled:
    ordered = shapes_of(values, batches)
    shapes = [ordered[index] for index in np.random.default_rng(1).permutation(len(ordered))]
    step_seconds = costs_of(found).step_seconds
    predicted = np.ones(len(shapes))
    if step_seconds is not None:
        sizes = np.array([shape.batch_size for shape in shapes], dtype=np.float64)
        predicted = np.asarray(step_seconds(sizes, np.array([shape.length for shape in shapes])), dtype=np.float64)
    padded = sum(shape.padded_length for shape in shapes)
    return Sampled(shapes, 1 - float(lengths.values.sum()) / padded, predicted)


def _epoch_figure(bench: Bench, name: str, one: Sampled, recommended: Sampled) -> None:
    if not one.known(quick=bench.quick):
        at = f" at a standard error of {one.error:.1%}" if len(one.measured) > 1 else ""
        bench.record.miss(f"{name}: {len(one.measured)} of {len(one.shapes)} batches ran{at}")
    if not one.measured:
        return
    predicted = float(one.predicted.sum())
    slower = one.seconds / recommended.seconds if recommended.measured else math.nan
    bench.record.figure(
        f"an epoch with {name}: batches, padding; time, against the best table; measured against predicted",
        f"{len(one.shapes)}, {one.padding_ratio:.1%}; {one.seconds:.1f} s ± {one.error:.1%}, {slower:.2f} times; "
        f"{one.seconds / predicted:.2f} times",
        batches=len(one.shapes),
        batches_run=len(one.measured),
        padding_ratio=one.padding_ratio,
        measured_epoch_seconds=one.seconds,
        standard_error=one.error,
        predicted_epoch_seconds=predicted,
    )


def soak(bench: Bench) -> None:
    """Runs shuffled steps of tables close to the limit, with each setting of the allocator."""
    lengths = bench.lengths()
    manifest = bench.manifest_of(lengths)
    workload = bench.probe_flags("conformer-ctc", **speech_options(bench, lengths, size="base"))
    allocators = [""] if bench.device.startswith("cpu") else ["", EXPANDABLE]
    wanted = QUICK_SOAK_STEPS if bench.quick else SOAK_STEPS
    fractions = QUICK_SOAK_FRACTIONS if bench.quick else SOAK_FRACTIONS
    for index, fraction in enumerate(fractions):
        end = time.monotonic() + bench.seconds_left / (len(fractions) - index)
        run = bench.out / f"soak-{fraction:g}"
        few = [] if bench.quick else ["--num-lengths", "8", "--max-lengths", "16"]
        flags = [*workload, *few, "--memory-fraction", f"{fraction:g}", "--run", str(run), "--json"]
        try:
            bench.batchtune("tune", *manifest, *flags, seconds=end - time.monotonic())
        except Missing as missing:
            bench.record.miss(f"--memory-fraction {fraction:g}: {missing}")
            continue
        for number, allocator in enumerate(allocators):
            seconds = (end - time.monotonic()) / (len(allocators) - number)
            _soak(bench, manifest, run, fraction, allocator, wanted, seconds)


def _soak(
    bench: Bench, manifest: list[str], run: Path, fraction: float, allocator: str, wanted: int, seconds: float
) -> None:
    """Verifies one table for as many of the wanted steps as there is time for."""
    what = f"--memory-fraction {fraction:g}" + (f", {allocator}" if allocator else "")
    row = read_result(run / SWEEP_FILE, Sweep).recommended_row
    if row is None or row.estimated_epoch_seconds is None:
        bench.record.miss(f"{what}: no table is recommended, or its steps' time is not known")
        return
    steps = min(wanted, int(SOAK_SHARE * seconds * row.batches / row.estimated_epoch_seconds))
    if steps < wanted:
        bench.record.miss(f"{what}: time for {max(0, steps)} of {wanted} steps")
    if steps < 1:
        return
    environment = {"PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    try:
        bench.batchtune("verify", *manifest, "--run", str(run), "--steps", str(steps), seconds=seconds, **environment)
    except Missing as missing:
        bench.record.miss(f"{what}: {missing}")
        return
    done = read_result(run / VERIFY_FILE, Verification)
    held, limit = done.reserved_bytes or done.peak_bytes or 0, done.device.limit_bytes
    ooms = sum(failure.outcome == "oom" for failure in done.failures)
    bench.record.figure(
        f"{done.steps} shuffled steps with {what}: out of memory; allocator retries; most memory held, of the limit",
        f"{ooms}; {done.alloc_retries if done.alloc_retries is not None else 'not known'}; {held / limit:.1%}",
        steps=done.steps,
        ooms=ooms,
        failures=len(done.failures),
        alloc_retries=done.alloc_retries,
        peak_bytes=done.peak_bytes,
        reserved_bytes=done.reserved_bytes,
        limit_bytes=limit,
        holds=done.holds,
        time_ratio=done.time_ratio,
    )


def language(bench: Bench) -> None:
    """Tunes a transformer on two lengths, and runs the table over both, bucket by bucket."""
    lengths = bench.lengths(targets=True)
    manifest = bench.manifest_of(lengths)
    size = {"size": "tiny", "dtype": "fp32"} if bench.quick else {"size": "large", "dtype": "bf16"}
    choices = (True,) if bench.quick else (False, True)
    for index, checkpoint in enumerate(choices):
        what = f"a transformer {'with' if checkpoint else 'without'} checkpointing"
        run = bench.out / f"language-{'checkpointing' if checkpoint else 'plain'}"
        end = time.monotonic() + bench.seconds_left / (len(choices) - index)
        few = [] if bench.quick else ["--num-lengths", "6", "--max-lengths", "12"]
        flags = bench.probe_flags("transformer-lm", **size, checkpoint=str(checkpoint).lower())
        try:
            bench.batchtune("tune", *manifest, *flags, *few, "--run", str(run), seconds=end - time.monotonic())
        except Missing as missing:
            bench.record.miss(f"{what}: {missing}")
            continue
        found, swept = read_result(run / PROBE_FILE, Probe), read_result(run / SWEEP_FILE, Sweep)
        points, pairs = len(found.frontier), len(found.joint_frontier)
        trials = [trial for trial in found.trials if not trial.confirmation]
        ooms = sum(trial.outcome == "oom" for trial in trials)
        seconds = sum(trial.elapsed_seconds for trial in trials)
        bench.record.figure(
            f"{what}: lengths, and pairs with shorter targets, of its frontier; {_SEARCHED}",
            f"{points}, {pairs}; {len(trials)}, {ooms}, {seconds:.0f} s",
            lengths=points,
            pairs=pairs,
            trials=len(trials),
            ooms=ooms,
            wall_seconds=seconds,
        )
        _two_dimensional(bench, what, found, swept, end)


def _two_dimensional(bench: Bench, what: str, found: Probe, swept: Sweep, end: float) -> None:
    """Runs the largest batch of every bucket of the best table over both lengths, there and back."""
    if not swept.two_dimensional:
        bench.record.miss(f"{what}: no table over both lengths")
        return
    best = min(swept.two_dimensional, key=lambda row: row.estimated_epoch_seconds or row.batches)
    shapes = [BatchShape(size, *pair) for size, pair in zip(best.batch_sizes, best.buckets, strict=True)]
    settings = ProbeSettings(
        workload=found.workload.spec,
        options=found.workload.options,
        device=bench.device,
        memory_bytes=bench.memory_bytes,
    )
    outcomes: list[str] = []
    with supervise(settings, found.device.limit_bytes) as supervisor:
        supervisor.start()
        for shape in [*shapes, *reversed(shapes)]:
            if time.monotonic() > end:
                break
            outcomes.append(supervisor.step(shape).trial.outcome)
    passed = outcomes.count("ok")
    if len(outcomes) < 2 * len(shapes):
        bench.record.miss(f"{what}: {len(outcomes)} of {2 * len(shapes)} batches of the table over both lengths ran")
    bench.record.figure(
        f"{what}: batches of its table over both lengths, of a table over one; largest batches run, passed",
        f"{best.batches}, {best.one_dimensional_batches}; {len(outcomes)}, {passed}",
        batches=best.batches,
        one_dimensional_batches=best.one_dimensional_batches,
        estimated_epoch_seconds=best.estimated_epoch_seconds,
        one_dimensional_epoch_seconds=best.one_dimensional_epoch_seconds,
        run=len(outcomes),
        passed=passed,
        outcomes=outcomes,
    )


def verify(bench: Bench) -> None:
    """Runs `tune --verify` and `report` as a user does; the run folder is kept as an example."""
    lengths = bench.lengths()
    run = bench.out / "verify-run"
    flags = bench.probe_flags("conformer-ctc", **speech_options(bench, lengths))
    steps = ["--verify-steps", "10"] if bench.quick else []
    started = time.monotonic()
    bench.batchtune("tune", *bench.manifest_of(lengths), *flags, "--run", str(run), "--verify", *steps)
    seconds = time.monotonic() - started
    done, row = read_result(run / VERIFY_FILE, Verification), read_result(run / SWEEP_FILE, Sweep).recommended_row
    assert row is not None  # else there is nothing to verify
    bench.record.figure(
        "`tune --verify`: the recommended table; wall time",
        f"{_named(row)}; {seconds:.0f} s",
        wall_seconds=seconds,
        table=msgspec.to_builtins(read_sampler_yaml(run / SAMPLER_FILE)),
    )
    ratio = "not known" if done.time_ratio is None else f"{done.time_ratio:.2f} times"
    bench.record.figure(
        f"{done.steps} shuffled steps of that table: failures; an epoch measured against estimated; whether it holds",
        f"{len(done.failures)}; {ratio}; {'yes' if done.holds else 'no: ' + '; '.join(done.reasons)}",
        steps=done.steps,
        failures=len(done.failures),
        time_ratio=done.time_ratio,
        holds=done.holds,
        reasons=done.reasons,
        warnings=done.warnings,
    )
    for output in ("html", "markdown"):
        bench.batchtune("report", str(run), "-o", str(bench.out / f"verify.{'md' if output == 'markdown' else output}"))


def _named(row: Row) -> str:
    return f"{row.strategy}, {row.num_buckets} buckets, {row.batches} batches, {row.padding_ratio:.1%} padding"


PARTS: dict[str, Callable[[Bench], None]] = {
    "tests": tests,
    "speech": speech,
    "epoch": epoch,
    "soak": soak,
    "language": language,
    "verify": verify,
}
