"""The part of the evidence harness that times epochs of several samplers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.epochs import shapes_of, with_batchtune, with_lhotse
from benchmarks.frontier import supervise
from gpu.evidence_bench import Bench
from gpu.evidence_record import Missing, read_evidence
from gpu.evidence_speech import in_time, speech_settings
from reproduced import speechbrain_batches
from torch.utils.data import BatchSampler

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import costs_of
from batchtune.lengths import FloatArray, Lengths
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    BatchShape,
    Probe,
    Sweep,
    SweepSettings,
    read_result,
)

SPEECHBRAIN_BUCKETS = (10, 20, 200)
# An epoch's time is known well enough at this standard error; fewer batches than these say nothing of it.
STANDARD_ERROR, FEWEST_BATCHES = 0.01, 30
QUICK_STANDARD_ERROR, QUICK_FEWEST_BATCHES = 0.2, 3
SAVED_EVERY_SECONDS = 2.0


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
        return float(
            self.predicted.sum()
            * np.sum(self.measured)
            / self.predicted[: len(self.measured)].sum()
        )

    @property
    def error(self) -> float:
        """Its standard error, as a share (ratio estimator, drawn without replacement; Cochran 1977, 6.4)."""
        count, all_of_them = len(self.measured), len(self.shapes)
        if count == all_of_them:
            return 0.0
        if count < min(2, all_of_them):
            return math.inf
        missed = np.array(self.measured) - self.predicted[:count] * (
            self.seconds / self.predicted.sum()
        )
        deviation = math.sqrt(float(np.sum(missed**2)) / (count - 1))
        return (
            all_of_them
            * math.sqrt((1 - count / all_of_them) / count)
            * deviation
            / self.seconds
        )

    def known(self, *, quick: bool = False) -> bool:
        """Whether enough of it was run."""
        fewest = QUICK_FEWEST_BATCHES if quick else FEWEST_BATCHES
        error = QUICK_STANDARD_ERROR if quick else STANDARD_ERROR
        return (
            len(self.measured) >= min(fewest, len(self.shapes)) and self.error <= error
        )


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
    _continue_samples(bench, found, samplers)
    if not all(one.known(quick=bench.quick) for one in samplers.values()):
        _measure(bench, settings, samplers)
    for name, one in samplers.items():
        _epoch_figure(bench, name, one, samplers["the best table"])


def _measure(
    bench: Bench, settings: ProbeSettings, samplers: dict[str, Sampled]
) -> None:
    """Runs batches of all samplers in turns, until the time of each epoch is known or time is up."""
    saved = time.monotonic()
    with supervise(settings) as supervisor:
        supervisor.start()
        for shape in [
            max(one.shapes, key=lambda shape: shape.padded_length)
            for one in samplers.values()
        ] * 2:
            supervisor.step(shape)  # the warm-up
        while bench.seconds_left:
            unknown = {
                name: one
                for name, one in samplers.items()
                if not one.known(quick=bench.quick)
            }
            if not unknown:
                break
            for name, one in unknown.items():
                shape = one.shapes[len(one.measured)]
                stepped = supervisor.step(shape).trial
                if stepped.outcome != "ok" or stepped.step_seconds is None:
                    raise Missing(
                        f"{name}: {shape} ended with {stepped.outcome}: {stepped.error}"
                    )
                one.measured.append(stepped.step_seconds)
            if time.monotonic() > saved + SAVED_EVERY_SECONDS:
                bench.record.save()
                saved = time.monotonic()


def _continue_samples(bench: Bench, found: Probe, samplers: dict[str, Sampled]) -> None:
    """Goes on with the times that earlier calls measured of the same batches, and keeps those of this call."""
    proven = [[point.length, point.batch_size] for point in found.frontier]
    if bench.record.data.get("proven") != proven:
        bench.record.data["proven"] = proven
        bench.record.data["measured"] = {}
    for name, one in samplers.items():
        one.measured = bench.record.data["measured"].setdefault(name, [])


def _probed(bench: Bench, lengths: Lengths, settings: ProbeSettings) -> Probe:
    """The probe of the part `speech`, where it is there and of the same; else one that is made now."""
    folder = bench.out / "speech-run"
    speech = bench.out / "speech.json"
    if speech.exists() and "probe" in read_evidence(speech).data["done"]:
        earlier = read_result(folder / PROBE_FILE, Probe)
        same = (
            earlier.lengths == lengths.summary()
            and earlier.workload.options == settings.options
        )
        if same and earlier.settings == settings.recorded():
            return earlier
    return in_time(lengths, settings, folder, bench)[1]


def _epochs(
    lengths: Lengths, found: Probe, swept: Sweep
) -> dict[str, tuple[FloatArray, list[list[int]]]]:
    """The lengths in the order of a data set, shuffled, and each sampler's batches of them."""
    if swept.recommended_table is None:
        raise Missing(f"no table is recommended: {swept.reason}")
    values = lengths.values[np.random.default_rng(0).permutation(lengths.count)]
    size = swept.baselines[0].batch_size
    epochs = {"the best table": with_batchtune(values, lengths, found, swept)}
    for count in SPEECHBRAIN_BUCKETS:
        batches = speechbrain_batches(values, found.max_batch_length, count)
        epochs[f"SpeechBrain's DynamicBatchSampler, {count} buckets"] = batches
    epochs["Lhotse's 20 bins with the measured sizes"] = with_lhotse(
        values, lengths, found, swept
    )
    epochs[f"fixed batches of {size}, sorted"] = _cut(
        np.argsort(values, kind="stable"), size
    )
    shuffled = torch.randperm(
        values.size, generator=torch.Generator().manual_seed(0)
    ).numpy()
    epochs[f"fixed batches of {size}, shuffled"] = _cut(shuffled, size)
    return {name: (values, batches) for name, batches in epochs.items()}


def _cut(order: np.ndarray[Any, Any], size: int) -> list[list[int]]:
    return list(BatchSampler(order.tolist(), size, drop_last=False))


def _sampled(
    lengths: Lengths, batches: list[list[int]], values: FloatArray, found: Probe
) -> Sampled:
    ordered = shapes_of(values, batches)
    shapes = [
        ordered[index] for index in np.random.default_rng(1).permutation(len(ordered))
    ]
    step_seconds = costs_of(found).step_seconds
    predicted = np.ones(len(shapes))
    if step_seconds is not None:
        sizes = np.array([shape.batch_size for shape in shapes], dtype=np.float64)
        predicted = np.asarray(
            step_seconds(sizes, np.array([shape.length for shape in shapes])),
            dtype=np.float64,
        )
    padded = sum(shape.padded_length for shape in shapes)
    return Sampled(shapes, 1 - float(lengths.values.sum()) / padded, predicted)


def _epoch_figure(bench: Bench, name: str, one: Sampled, recommended: Sampled) -> None:
    if not one.known(quick=bench.quick):
        at = f" at a standard error of {one.error:.1%}" if len(one.measured) > 1 else ""
        bench.record.miss(
            f"{name}: {len(one.measured)} of {len(one.shapes)} batches ran{at}"
        )
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
