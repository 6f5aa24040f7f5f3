"""A device made by a law: its memory and step times are computed, so it needs neither torch nor a process.

It takes the place of worker processes where the commands themselves are tested, as hyperfine's mock executor does:
`--device law:linear=2MB,limit=8GB`. `--device auto` never chooses it, and its name says in every result what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
from msgspec.structs import replace

from batchtune.errors import UsageError, did_you_mean, shortened
from batchtune.probe.requests import Measurer, Ran, RunTrial, setup_exceeds_limit
from batchtune.results import BatchShape, Device, Outcome, ProbedWith, Trial
from batchtune.units import format_size, parse_size

WORKLOAD = "law"
"""The workload that is recorded for a law, unless the user names one; it is not loaded."""
NAME = "made by a law, nothing was run"
_PREFIX = "law:"


def is_law(device: str) -> bool:
    """Return whether a `--device` value asks for a device made by a law."""
    return device.startswith(_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The coefficients of a law, for tokens Σ L (batch size × length if padded) and Σ L².

    Attributes:
        constant: Bytes in use between steps.
        linear, quadratic: Bytes for one unit of Σ L, and of Σ L².
        target: Bytes for one unit of batch size × target length.
        limit: Memory of the device, in bytes.
        noise: Peaks of equal batches differ by up to this fraction.
        leak: Bytes that each step adds to those in use.
        seconds: Of a step, whatever its batch.
        seconds_linear, seconds_quadratic: For one unit of Σ L, and of Σ L².
        packed: 1 for a workload that packs.
    """

    constant: float = 1e9
    linear: float = 2e6
    quadratic: float = 0.0
    target: float = 0.0
    limit: float = 8e9
    noise: float = 0.0
    leak: float = 0.0
    seconds: float = 1e-3
    seconds_linear: float = 1e-4
    seconds_quadratic: float = 0.0
    packed: float = 0.0

    @classmethod
    def parse(cls, device: str) -> Coefficients:
        """Read `law:linear=2MB,limit=8GB`; coefficients left out keep their defaults. Raises UsageError."""
        values: dict[str, float] = {}
        known = [coefficient.name for coefficient in fields(cls)]
        for pair in device.removeprefix(_PREFIX).split(","):
            if not pair:
                continue
            name, _, text = pair.partition("=")
            if name not in known:
                raise UsageError(
                    f"--device law: unknown coefficient {shortened(name)}",
                    f"{did_you_mean(name, known)}Known are {', '.join(known)}.",
                )
            if name in values:
                raise UsageError(f"--device law: the coefficient {name} is given twice")
            values[name] = _number(name, text, known)
        return cls(**values)

    def bytes_of(self, shape: BatchShape) -> float:
        """Return the peak of a step, in bytes."""
        total, squares = _sums(shape)
        targets = shape.batch_size * (shape.target_length or 0.0)
        return (
            self.constant
            + self.linear * total
            + self.quadratic * squares
            + self.target * targets
        )

    def seconds_of(self, shape: BatchShape) -> float:
        """Return the time of a step."""
        total, squares = _sums(shape)
        return (
            self.seconds
            + self.seconds_linear * total
            + self.seconds_quadratic * squares
        )


def _number(name: str, text: str, known: list[str]) -> float:
    """Return a coefficient's value: a number, or a size such as 2MB."""
    try:
        try:
            value = float(text)
        except ValueError:
            value = parse_size(text)
    except UsageError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(
            f"--device law: the coefficient {name} is {shortened(text)}",
            f"Give a number of at least 0, or a size such as 2MB. Known are {', '.join(known)}.",
        )
    return value


def _sums(shape: BatchShape) -> tuple[float, float]:
    """Return Σ L and Σ L² of a batch's examples, padded or packed."""
    if shape.sequences is not None:
        return shape.tokens, shape.squared_tokens
    return shape.padded_length, shape.padded_length * shape.length


def failed(shape: BatchShape, outcome: Outcome, error: str) -> Ran:
    """Return the reply to a trial or a step that failed; one that ended the worker costs it."""
    trial = Trial.of(shape, outcome, error=error)
    return Ran(trial=trial, stage="step", renew=outcome in ("crash", "timeout"))


@dataclass(kw_only=True)
class MadeDevice(Measurer):
    """Runs trials and steps by a law.

    Attributes:
        bytes_of: A batch's peak in bytes, those in use between steps included.
        seconds_of: The time of its step.
        limit_bytes: The memory limit.
        base_bytes: In use between steps.
        noise: Peaks of equal batches differ by up to this fraction.
        trial_steps: Of each trial. With few of them, step times are not reliable.
        leak_bytes: Bytes that each step adds to those in use.
        fault: A planned failure in place of the law, or None: told the shape, and how many runs came before.
        runs: Trials and steps so far.
    """

    bytes_of: Callable[[BatchShape], float]
    seconds_of: Callable[[BatchShape], float]
    limit_bytes: int
    base_bytes: int
    noise: float = 0.0
    trial_steps: int = 50
    leak_bytes: float = 0.0
    packed: bool = False
    seed: int = 0
    worker: int = 0
    fault: Callable[[BatchShape, int], Ran | None] = lambda shape, run: None
    runs: int = field(init=False, default=0)
    device: Device = field(init=False)
    _steps: int = field(init=False, default=0)  # of this worker
    _is_lost: bool = field(init=False, default=False)  # the worker

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.device = Device(
            kind="law",
            name=NAME,
            total_bytes=self.limit_bytes,
            limit_bytes=self.limit_bytes,
            driver=None,
            torch="none",
            allocator=None,
            other_processes=0,
        )

    @classmethod
    def of(
        cls, settings: ProbedWith, limit_bytes: int | None, worker: int
    ) -> MadeDevice:
        """Return the device of a `--device law:…` value, with the limit of a continued run or else the settings'.

        `worker` is the number of the last one so far.
        """
        law = Coefficients.parse(settings.device)
        total = int(law.limit)
        reserve = settings.reserve_bytes
        cap = min(settings.memory_bytes or total, total)
        made = cls(
            bytes_of=law.bytes_of,
            seconds_of=law.seconds_of,
            limit_bytes=limit_bytes or int(cap * settings.memory_fraction) - reserve,
            base_bytes=int(law.constant),
            noise=law.noise,
            leak_bytes=law.leak,
            packed=law.packed > 0,
            seed=settings.seed,
            worker=worker,
        )
        made.device = replace(made.device, total_bytes=total, reserve_bytes=reserve)
        return made

    def start(self) -> Device:
        """Begin with a new worker, which holds `base_bytes`."""
        self._renew()
        if self.base_bytes >= self.limit_bytes:
            held = format_size(self.base_bytes)
            raise setup_exceeds_limit("the workload", f"it holds {held}")
        return self.device

    def reply_to(self, request: RunTrial, *, fresh: bool = False) -> Ran:
        """Compute a trial, or a step of several batches one by one; no cache is kept, so none is released."""
        if fresh and self._steps > 0:
            self._renew()
        steps = self.trial_steps
        if request.single:
            steps = 1
        for shape in (request.shape, *request.others):
            ran = self.run(shape, steps)
            if ran.trial.outcome != "ok":
                break
        return ran

    def run(self, shape: BatchShape, steps: int) -> Ran:
        """Compute this many steps with one batch."""
        if self._is_lost:
            self._renew()
        ran = self.fault(shape, self.runs) or self._computed(shape, steps)
        self.runs += 1
        if ran.renew:
            self.lose_worker()
        return ran.with_trial(worker=self.worker)

    def lose_worker(self) -> None:
        """Have the next run begin with a new worker."""
        self._is_lost = True

    def _renew(self) -> None:
        self.worker += 1
        self._steps = 0
        self._is_lost = False

    def _computed(self, shape: BatchShape, steps: int) -> Ran:
        self._steps += steps
        peaks = self.peaks(shape, steps)
        if max(peaks) > self.limit_bytes:
            return failed(shape, "oom", "out of memory")
        later = [int(peak) for peak in peaks[1:]]
        seconds = self.seconds_of(shape)
        trial = Trial.of(
            shape,
            "ok",
            steps=steps,
            step_seconds=seconds,
            peak_bytes=int(max(peaks)),
            rest_bytes=int(self.base_bytes + self._leaked),
        )
        if later:
            trial = replace(
                trial,
                alloc_retries=0,
                step_seconds_spread=0.0,
                mean_step_seconds=seconds,
                steady_peak_bytes=max(later),
                peak_spread_bytes=max(later) - min(later),
            )
        return Ran(trial=trial)

    def peaks(self, shape: BatchShape, steps: int) -> list[float]:
        """Return the peak of each step, in bytes."""
        peak = self.bytes_of(shape) + self._leaked
        return [
            peak * (1 + self.noise * (self._random.random() - 0.5))
            for _ in range(steps)
        ]

    @property
    def _leaked(self) -> float:
        return self.leak_bytes * self._steps
