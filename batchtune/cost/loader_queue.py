"""The queue of a torch DataLoader, fitted to measured settings, and the waits that it predicts for any setting.

The fit gives the cost of one batch; `loader_simulation` says how long a step waits for it.
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

# The most batches of an epoch to simulate: its start no longer matters then.
SIMULATED_BATCHES = 20_000
# The batches that a setting is simulated for while the queue is fitted.
_FITTED_BATCHES = 100
# The fewest that are simulated for a prediction, besides 10 times those that are under way at once.
_LEAST_BATCHES = 1000
# The relative change of a parameter that shows its effect.
_DIFFERENCE = np.array([1e-3])
_CONVERGED = 1e-4
# The relative error of a usual measurement.
_USUAL_ERROR = 0.03
# Weights, relative to a rate with workers: of a rate without, of processors kept busy, and of what parameters tend to.
_WITHOUT_WORKERS = 0.3
_OF_COMPUTING = 0.3
_DRAWN = np.array([1e-3, 1e-2, 1e-2, 1e-2])
# The first of these if no setting says how much it computed.
_DRAWN_UNKNOWN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueObservation:
    """A measured setting.

    Attributes:
        batches: Delivered in each of its trials.
        batches_per_second: Without the wait for the first: (batches - 1) / the time between the first and the last.
        processors: Kept busy on average by all its processes; None if not known.
        step_seconds: How long the consumer was busy with each batch; 0: it took them as fast as they came.
    """

    setting: QueueSetting
    batches: int
    batches_per_second: float
    processors: float | None = None
    step_seconds: float = 0.0

    @property
    def computed(self) -> float | None:
        """The processor seconds of a batch; None if not known, or if steps computed too."""
        return None if self.processors is None or self.step_seconds else self.processors / self.batches_per_second


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuePrediction:
    """The waits of a setting.

    Attributes:
        waits: Seconds before each of the simulated batches but the first: shape (simulated - 1,).
        idle: The share of training that the steps wait: waits / (waits + steps), without the first batch.
    """

    waits: FloatArray
    idle: float


def predict_waits(
    queue: LoaderQueue,
    setting: QueueSetting,
    relative_costs: npt.ArrayLike,
    step_seconds: npt.ArrayLike,
    *,
    measured: QueueObservation | None = None,
) -> QueuePrediction:
    """Predict the waits of a setting, measured or not, by simulating up to `SIMULATED_BATCHES`.

    The steps are assumed to leave the processors to the loader. If they do not, replace `queue.processors`.

    Args:
        queue: As fitted.
        setting: The loader's arguments.
        relative_costs: The loader's cost of each batch, in the order of an epoch; only ratios count. One value stands
            for all.
        step_seconds: Of each batch, or one for all.
        measured: An observation of this setting, without steps; all times of the queue are then scaled alike so that
            the simulation agrees with it.
    """
    relative, steps = np.broadcast_arrays(*map(np.atleast_1d, (relative_costs, step_seconds)))
    count = min(SIMULATED_BATCHES, max(len(relative), _LEAST_BATCHES + 10 * _in_flight(setting)))
    relative, steps = (np.resize(values[:count].astype(np.float64), count) for values in (relative, steps))
    relative /= relative.mean()
    if measured is not None:
        slower = _rate(queue, setting, relative, measured.batches) / measured.batches_per_second
        names = ("batch_seconds", "receive_seconds", "latency_seconds")
        queue = msgspec.structs.replace(queue, **{name: getattr(queue, name) * slower for name in names})
    waits = simulate_waits(setting, _costs(queue, relative), steps, processors=queue.processors or math.inf)
    waited, stepped = float(waits.seconds[1:].sum()), float(steps[waits.batches[1:]].sum())
    return QueuePrediction(waits=waits.seconds[1:], idle=waited / (waited + stepped))


def fit_queue(
    observations: Sequence[QueueObservation], processors: float, relative_costs: npt.ArrayLike = 1.0
) -> LoaderQueue | None:
    """Fit the queue to measured settings; return None for fewer than two, or none with workers.

    Its times bring the simulated rates closest to the measured ones, by least squares of the logarithms of their
    ratios, with a soft L1 loss (Huber 1964) that lets no single setting decide. The processors that a setting kept busy
    show how much of a batch's time computes. Settings without workers count less: there, no process hands a batch to
    another. Few settings say little of a small term: receiving and latency tend to 0, and the processors to those of
    the machine, but weakly. A setting with one worker and steps longer than a batch takes shows receiving by itself;
    one with more workers than processors shows how many processors there really are.

    Args:
        observations: Those that worked.
        processors: That the loader might use.
        relative_costs: As for `predict_waits`.
    """
    from scipy.optimize import least_squares

    with_workers = [one for one in observations if one.setting.workers]
    if len(observations) < 2 or not with_workers:
        return None
    relative = np.atleast_1d(np.asarray(relative_costs, dtype=np.float64))
    relative = relative / relative.mean()
    scale = max(max(1, one.setting.workers) / one.batches_per_second for one in observations)
    fastest = 1 / max(one.batches_per_second for one in with_workers) / scale

    # Other arguments of a loader do not change a simulated rate.
    alike = [replace(one, batches_per_second=0.0, processors=None) for one in observations]
    computing = [(one, one.computed) for one in observations if one.computed is not None]
    weights = [1.0 if one.setting.workers else _WITHOUT_WORKERS for one in observations]

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
        rates = {one: _simulated(queue, one, relative) for one in set(alike)}
        measured = [one.batches_per_second for one in observations]
        return np.log([rates[one] / rate for one, rate in zip(alike, measured, strict=True)])

    def residuals(values: FloatArray) -> FloatArray:
        queue = queue_of(values)
        computed_more = [
            queue.busy + ((queue.receive_seconds if one.setting.workers else 0.0) - computed) / queue.batch_seconds
            for one, computed in computing
        ]
        batch, busy, receive, latency, share = map(float, values)
        unsure = 1.0 if computing else _DRAWN_UNKNOWN / _DRAWN[0]
        drawn = [(1.0 - busy) * unsure, receive / batch, latency / batch, math.log(share)]
        parts = (log_ratios(queue) * weights, np.multiply(computed_more, _OF_COMPUTING), np.multiply(drawn, _DRAWN))
        return np.concatenate(parts)

    shares = [min(1.0, computed / scale) for one, computed in computing if one.setting.workers]
    busy = float(np.median(shares)) if shares else 1.0
    bounds = ([1e-6, 0.0, 0.0, 0.0, 0.01], [10.0, 1.0, 10.0, 10.0, 1.0])
    # Receiving shows in a rate only where it is the bottleneck: from below, least squares may not find that.
    starts = [[1.0, busy, receive, 1e-3, 1.0] for receive in (1e-3, fastest)] + [[1.0, busy, 1e-3, 1e-3, 0.5]]
    fit = partial(least_squares, residuals, bounds=bounds, loss="soft_l1", f_scale=_USUAL_ERROR)
    fits = [fit(start, diff_step=_DIFFERENCE, ftol=_CONVERGED, xtol=_CONVERGED) for start in starts]
    best = queue_of(min(fits, key=lambda one: float(one.cost)).x)
    error = float(np.mean(np.abs(np.expm1(log_ratios(best)))))
    return msgspec.structs.replace(best, relative_error=error)


def _simulated(queue: LoaderQueue, one: QueueObservation, relative: FloatArray) -> float:
    """Return the simulated rate of an observation; of a long one, from its beginning."""
    costs, batches = np.resize(relative, one.batches), one.batches
    if batches > 2 * _FITTED_BATCHES:
        # Equal batches come in rounds, one of each worker: a number of whole rounds tells the rate exactly.
        workers = max(1, one.setting.workers)
        batches = 1 + workers * math.ceil(_FITTED_BATCHES / workers)
        costs = np.resize(costs, batches) * costs.mean() / np.resize(costs, batches).mean()
    return _rate(queue, one.setting, costs, batches, one.step_seconds)


def _in_flight(setting: QueueSetting) -> int:
    return setting.workers * setting.prefetch_factor


def _costs(queue: LoaderQueue, relative: FloatArray) -> BatchCosts:
    return BatchCosts(
        seconds=queue.batch_seconds * relative,
        busy=queue.busy,
        receive_seconds=queue.receive_seconds * relative,
        latency_seconds=queue.latency_seconds,
    )


def _rate(queue: LoaderQueue, setting: QueueSetting, relative: FloatArray, batches: int, step: float = 0.0) -> float:
    """Return batches per second between the first and the last of `batches`, with the same step after each."""
    costs = _costs(queue, np.resize(relative, batches + _in_flight(setting)))  # as many as are requested
    delivered = simulate_waits(setting, costs, step, processors=queue.processors or math.inf).delivered
    return float((batches - 1) / (delivered[batches - 1] - delivered[0]))
