"""The queue of a torch DataLoader, fitted to settings that were measured, and the waits that it predicts for any.

What one batch costs is fitted: `loader_simulation` says how long a step waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from batchtune.cost.loader_simulation import BatchCosts, QueueSetting, simulate_waits
from batchtune.lengths import FloatArray
from batchtune.results import LoaderQueue

# An epoch's waits are those of its first batches: so many are simulated at most, far more than any start has part in.
SIMULATED_BATCHES = 20_000
# Settings are compared by so many batches while the queue is fitted.
_FITTED_BATCHES = 100
# At least so many are simulated for a prediction, those that are under way at once 10 times apart.
_LEAST_BATCHES = 1000
# By how much parameters are changed to see what that changes, as a share.
_DIFFERENCE = np.array([1e-3])
_CONVERGED = 1e-4
# The relative error of a usual measurement.
_USUAL_ERROR = 0.03
# What counts less than a rate with workers: a rate without, the processors kept busy, and where parameters are drawn.
_WITHOUT_WORKERS = 0.3
_OF_COMPUTING = 0.3
_DRAWN = np.array([1e-3, 1e-2, 1e-2, 1e-2])
# The first of these where no setting says how much it computed.
_DRAWN_UNKNOWN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueObservation:
    """A setting that was measured.

    Attributes:
        setting: It.
        batches: How many were delivered, in each of its trials.
        batches_per_second: Without the wait for the first: (batches - 1) / the time between the first and the last.
        processors: How many all its processes kept busy on average; None if that is not known.
        step_seconds: How long the consumer was busy with each batch; 0: it took them as fast as they came.
    """

    setting: QueueSetting
    batches: int
    batches_per_second: float
    processors: float | None = None
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuePrediction:
    """How a setting would fare.

    Attributes:
        waits: Seconds before each of the simulated batches but the first: shape (simulated - 1,).
        idle: The share of training that the steps wait: waits / (waits + steps), the first batch apart.
        batches_per_second: Of a consumer that takes batches as fast as they come.
    """

    waits: FloatArray
    idle: float
    batches_per_second: float


def predict_waits(
    queue: LoaderQueue,
    setting: QueueSetting,
    relative_costs: npt.ArrayLike,
    step_seconds: npt.ArrayLike,
    *,
    measured: QueueObservation | None = None,
) -> QueuePrediction:
    """Predict the waits of a setting, by simulating up to `SIMULATED_BATCHES`.

    The steps are taken to leave the processors to the loader. If they do not, replace `queue.processors`.

    Args:
        queue: As fitted.
        setting: Any, measured or not.
        relative_costs: How much more than the average each batch costs the loader, in the order of an epoch; only
            ratios count. One value stands for all.
        step_seconds: Of each batch, or one for all.
        measured: An observation of this setting, without steps; all times of the queue are then scaled alike such that
            the simulation agrees with it.
    """
    relative, steps = _epoch(setting, relative_costs, step_seconds)
    free = _rate(queue, setting, relative, len(relative))
    if measured is not None:
        slower = _rate(queue, setting, relative, measured.batches) / measured.batches_per_second
        queue, free = _scaled(queue, slower), free / slower
    waits = simulate_waits(setting, _costs(queue, relative), steps, processors=queue.processors or math.inf)
    waited, stepped = float(waits.seconds[1:].sum()), float(steps[waits.batches[1:]].sum())
    return QueuePrediction(waits=waits.seconds[1:], idle=waited / (waited + stepped), batches_per_second=free)


def fit_queue(
    observations: Sequence[QueueObservation], processors: float, relative_costs: npt.ArrayLike = 1.0
) -> LoaderQueue | None:
    """Fit the queue to settings that were measured; None if fewer than two were, or none with workers.

    Its times are those at which the simulated rates come closest to the measured ones, by least squares of the
    logarithms of their ratios, with a soft L1 loss (Huber 1964) that lets no single setting decide. The processors that
    a setting kept busy say how much of a batch's time computes. Settings without workers count less: there, nothing
    is handed from process to process. Few settings say nothing of a small term: receiving and latency are drawn to 0,
    and the processors to those that there are, but weakly. A setting with one worker and steps longer than a batch
    takes shows receiving by itself; one with more workers than processors shows how many those really are.

    Args:
        observations: Those that failed left out.
        processors: That the loader might use.
        relative_costs: As for `predict_waits`.
    """
    from scipy.optimize import least_squares

    with_workers = [one for one in observations if one.setting.workers]
    if len(observations) < 2 or not with_workers:
        return None
    relative = np.atleast_1d(np.asarray(relative_costs, dtype=np.float64))
    relative = relative / relative.mean()
    scale = float(max(_period(one) * max(1, one.setting.workers) for one in observations))
    fastest = min(map(_period, with_workers)) / scale

    different = {_alike(one) for one in observations}

    def queue_of(values: FloatArray) -> LoaderQueue:
        batch, busy, receive, latency, share = map(float, values)
        return LoaderQueue(
            batch_seconds=batch * scale,
            busy=busy,
            receive_seconds=receive * scale,
            latency_seconds=latency * scale,
            processors=share * processors,
            relative_error=0.0,
        )

    def log_ratios(queue: LoaderQueue) -> FloatArray:
        rates = {one: _simulated(queue, one, relative) for one in different}
        return np.log([rates[_alike(one)] / one.batches_per_second for one in observations])

    def residuals(values: FloatArray) -> FloatArray:
        queue = queue_of(values)
        weights = [1.0 if one.setting.workers else _WITHOUT_WORKERS for one in observations]
        computing = [_computing_error(queue, one) for one in observations if _says_computing(one)]
        batch, busy, receive, latency, share = map(float, values)
        drawn = [(1.0 - busy) * unsure, receive / batch, latency / batch, math.log(share)]
        return np.concatenate(
            (log_ratios(queue) * weights, np.multiply(computing, _OF_COMPUTING), np.multiply(drawn, _DRAWN))
        )

    unsure = 1.0 if any(map(_says_computing, observations)) else _DRAWN_UNKNOWN / _DRAWN[0]
    computing = [min(1.0, _computed(one) / scale) for one in with_workers if _says_computing(one)]
    busy = float(np.median(computing)) if computing else 1.0
    bounds = ([1e-6, 0.0, 0.0, 0.0, 0.01], [10.0, 1.0, 10.0, 10.0, 1.0])
    # Receiving shows in a rate only where it is the narrowest place: from below, least squares may not find that.
    starts = [[1.0, busy, receive, 1e-3, 1.0] for receive in (1e-3, fastest)] + [[1.0, busy, 1e-3, 1e-3, 0.5]]
    fit = partial(least_squares, residuals, bounds=bounds, loss="soft_l1", f_scale=_USUAL_ERROR)
    fits = [fit(start, diff_step=_DIFFERENCE, ftol=_CONVERGED, xtol=_CONVERGED) for start in starts]
    best = queue_of(min(fits, key=lambda one: float(one.cost)).x)
    error = float(np.mean(np.abs(np.expm1(log_ratios(best)))))
    return msgspec.structs.replace(best, relative_error=error)


def _alike(one: QueueObservation) -> QueueObservation:
    """Return what an observation's simulated rate depends on; other arguments of a loader do not change it."""
    return replace(one, batches_per_second=0.0, processors=None)


def _says_computing(one: QueueObservation) -> bool:
    """Return whether an observation says how much the loader computes: without steps, which compute too."""
    return one.processors is not None and not one.step_seconds


def _computing_error(queue: LoaderQueue, one: QueueObservation) -> float:
    measured = _computed(one)
    received = queue.receive_seconds if one.setting.workers else 0.0
    return (queue.busy * queue.batch_seconds + received - measured) / queue.batch_seconds


def _computed(one: QueueObservation) -> float:
    """Return the processor seconds of a batch."""
    return (one.processors or 0.0) * _period(one)


def _period(one: QueueObservation) -> float:
    return 1 / one.batches_per_second


def _simulated(queue: LoaderQueue, one: QueueObservation, relative: FloatArray) -> float:
    """Return the rate that the queue says of an observation; of a long one, from its beginning."""
    costs, batches = np.resize(relative, one.batches), one.batches
    if batches > 2 * _FITTED_BATCHES:
        # Equal batches come in rounds, one of each worker: a number of whole rounds tells the rate exactly.
        workers = max(1, one.setting.workers)
        batches = 1 + workers * math.ceil(_FITTED_BATCHES / workers)
        costs = np.resize(costs, batches) * costs.mean() / np.resize(costs, batches).mean()
    return _rate(queue, one.setting, costs, batches, one.step_seconds)


def _epoch(
    setting: QueueSetting, relative_costs: npt.ArrayLike, step_seconds: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Return the costs, with mean 1, and steps of the batches to simulate, repeated if they are few."""
    relative, steps = np.broadcast_arrays(*map(np.atleast_1d, (relative_costs, step_seconds)))
    count = min(SIMULATED_BATCHES, max(len(relative), _LEAST_BATCHES + 10 * _in_flight(setting)))
    relative = np.resize(relative[:count].astype(np.float64), count)
    return relative / relative.mean(), np.resize(steps[:count].astype(np.float64), count)


def _in_flight(setting: QueueSetting) -> int:
    return setting.workers * setting.prefetch_factor


def _costs(queue: LoaderQueue, relative: FloatArray) -> BatchCosts:
    return BatchCosts(
        seconds=queue.batch_seconds * relative,
        busy=queue.busy,
        receive_seconds=queue.receive_seconds * relative,
        latency_seconds=queue.latency_seconds,
    )


def _scaled(queue: LoaderQueue, factor: float) -> LoaderQueue:
    names = ("batch_seconds", "receive_seconds", "latency_seconds")
    return msgspec.structs.replace(queue, **{name: getattr(queue, name) * factor for name in names})


def _rate(queue: LoaderQueue, setting: QueueSetting, relative: FloatArray, batches: int, step: float = 0.0) -> float:
    """Return batches per second between the first and the last of so many, with the same step after each."""
    costs = _costs(queue, np.resize(relative, batches + _in_flight(setting)))  # as many as are asked for
    delivered = simulate_waits(setting, costs, step, processors=queue.processors or math.inf).delivered
    return float((batches - 1) / (delivered[batches - 1] - delivered[0]))
