"""Answers a probe's requests for a training script: learns its batches, and hands its loop those that are asked for."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from batchtune.errors import OptionError, ProbeError, WorkloadError
from batchtune.files import writing_whole
from batchtune.lengths import spaced
from batchtune.probe.devices import Meter
from batchtune.probe.ranks import RankPlace, RankWorker
from batchtune.probe.requests import (
    Describe,
    Described,
    Prepare,
    Ran,
    Ready,
    RunTrial,
)
from batchtune.results import BatchShape, Script, StepGradient, Twin
from batchtune.results.shared import WRONG_TWINS
from batchtune.scripts import gradients, place_in_group
from batchtune.scripts.drawing import Drawn
from batchtune.scripts.feeding import Feed, Loop, described
from batchtune.scripts.learning import Learned
from batchtune.scripts.own_lengths import own_table, rows_in_order
from batchtune.scripts.relations import Unclear, digit_of
from batchtune.scripts.running import (
    is_stream,
    random_batch_size,
    write_own_batches,
)
from batchtune.workloads import own_part, trained_parameters, training_gpu

# To find which of the data set's numbers are lengths, one example in this many is measured.
_EVERY = 4
# At least three optimizer steps, and those of so many batches, show whether each trains on as many.
_COUNTED = 8
# Of a data set without indices, to learn from.
_EXAMPLES = 200
# Where the data set makes whole batches itself.
_WHOLE_BATCHES = 8
# Own batches whose peaks are compared with those of made ones: fewer if these seconds are over before.
_TWINS = 3
_TWIN_SECONDS = 30.0
# This many of an optimizer step's batches have the shape of a trial. The time of a whole step is worked out from
# that of the last few steps of small batches, if the three take at least `_DEAR` times as long.
_WHOLE = 3
_TIMED_FILLERS = 3
_DEAR = 3.0
# What a script's process holds for the probe: 22 MiB on the CPU, by its data in use with and without the probe.
_SPENT_BYTES = 20 << 20


class ScriptWorker(RankWorker):
    """A script whose training loop is known, as the worker of a probe: one rank of several, or the only one.

    What decides how many batches its loop gets is decided by all ranks together, or the same on all.
    """

    _is_in_order = True  # whether the manifest's rows are the examples, one by one

    def __init__(self, loop: Loop, place: RankPlace) -> None:
        super().__init__(place)
        self._loop = loop
        # Whether its state is known after it has caught an OOM: no batches are ahead, nor part of a step.
        self._goes_on = False

    def _describe(self, request: Describe) -> Described:
        """Write the lengths that the training loop's data set holds, once for all ranks."""
        import pyarrow.parquet

        self._stage = "import"
        loader = _chosen(self._loop, request.options.get("loader")).loader
        if self._place.rank > 0:
            return Described(loader=described(loader))
        keys = _keys(request.options)

        def measured() -> Drawn | None:
            if count_of(loader) is None:
                return None
            return Drawn(loader.dataset, loader.collate_fn, **keys, every=_EVERY)

        seconds = request.timeout_seconds or math.inf
        table = self._loop.call(lambda: own_table(loader.dataset, measured, seconds))
        with writing_whole(Path(request.output)) as stream:
            pyarrow.parquet.write_table(table, stream, compression="zstd")
        return Described(loader=described(loader))

    def _run(self, request: RunTrial) -> Ran:
        """Run a trial or a single step; after a failure the script starts anew, unless it goes on by itself."""
        if request.others:
            ran = self._run_others(request)
        else:
            ran = super()._run(request)
        goes_on = ran.trial.flushed or (ran.trial.caught and self._goes_on)
        if ran.trial.outcome == "ok" or goes_on:
            return ran
        return replace(ran, renew=True, unexplained=self._loop.is_unexplained)

    def _run_others(self, request: RunTrial) -> Ran:
        """Run an optimizer step of different batches; if it fails, that of its trial is the one that failed."""
        fed = self._fed
        fed.others = request.others
        ran = super()._run(request)
        fed.others = ()
        if ran.trial.outcome == "ok":
            return ran
        return replace(ran, trial=ran.trial.with_shape(fed.trained[0]))

    def _prepare(self, request: Prepare) -> Ready:
        """Learn what the script's batches are made of, and limit its memory."""
        script = request.script
        assert script is not None
        self._stage = "import"
        self._join(request)
        loop = self._loop
        feed = _chosen(loop, request.options.get("loader"))
        loop.feed = feed
        meter = self._open(request)
        own_batches = []

        def own_batch() -> Any:
            batch = loop.call(feed.own_batch)
            own_batches.append(batch)
            return batch

        if not script.force:
            loop.call(_check_finite)  # before one rank's gradients reach all others
        loop.train(own_batch)  # the rest of what was fetched ahead
        counts = [loop.train(own_batch)]
        while script.compare and (len(counts) < 3 or sum(counts) < _COUNTED):
            counts.append(loop.train(lambda: loop.call(feed.own_batch)))
        accumulation = min(counts)
        # A step that mixed precision leaves out makes the next a multiple.
        others = [count for count in counts if count != accumulation]
        differ = any(count % accumulation for count in others)
        steps_vary = script.steps_vary or differ or 3 * len(others) > len(counts)
        if steps_vary:
            accumulation = round(statistics.mean(counts))
        if not script.force:
            loop.call(_check_finite)
        source = self._source(feed, own_batches, own_batch, request)
        twins = []
        if script.compare:
            if isinstance(source, Drawn):
                pairs = source.twins(_batch_size(feed.loader))
            else:
                while len(own_batches) < _TWINS:
                    own_batch()
                pairs = source.twins(own_batches[:_TWINS])
            is_drawn = isinstance(source, Drawn) and self._is_in_order
            if is_drawn and random_batch_size(feed.loader) is None:
                # All ranks do so, as a sampler may need them all.
                path = script.own_batches if self._place.rank == 0 else None
                loop.call(lambda: write_own_batches(feed.loader, path))
        own_batches.clear()
        loop.call(feed.end_own)
        fed = Fed(loop, source, meter, accumulation, self._place.largest)
        self._fed = fed
        self._goes_on = accumulation == 1 and fed.stale == 0
        shortest = BatchShape(1, script.lengths[0])
        if not steps_vary:
            fed.fill(shortest)
        gradient = None
        if script.compare:
            twins = self._compared(fed.for_trials, pairs)
            if accumulation * self._place.world_size > 1 and not steps_vary:
                gradient = self._gradient(source, feed.loader, fed, accumulation)
        _check(twins, force=script.force)
        self._stage = "device"
        meter.hold(request.examples, _SPENT_BYTES)
        # What the loop has fetched ahead need not fit within the limit.
        fed.make_batch(shortest)
        meter.limit()
        ready = self._ready(fed, meter, request.settings)
        targets = source.target_scale
        facts = Script(
            batches=list(source.lines),
            loader=described(feed.loader),
            per_unit=source.scale.per_unit,
            target_per_unit=None if targets is None else targets.per_unit,
            offset=source.scale.offset,
            target_offset=0 if targets is None else targets.offset,
            accumulation=accumulation,
            steps_vary=steps_vary,
            streams=is_stream(feed.loader),
            look_ahead=fed.stale,
            twins=twins,
            packed=fed.packed,
            batch_size=random_batch_size(feed.loader),
            gradient=gradient,
            optimizers=sorted(loop.optimizers),
        )
        return replace(ready, device=replace(ready.device, script=facts))

    def _join(self, request: Prepare) -> None:
        """Note the process group that the script trains in, if there is one."""
        from torch import distributed

        if place_in_group() is not None:
            self._backend = distributed.get_backend()
        ranks = self._place.world_size
        if ranks > 1 and request.settings.ddp:
            raise OptionError(
                f"--ddp keeps room for gradient buckets, but the script trains on {ranks} ranks, where they are "
                "really allocated",
                "Leave out --ddp.",
            )

    def _open(self, request: Prepare) -> Meter:
        """Open the device that the script trains on. Raises ProbeError if another was asked for."""
        used = "cpu"
        # Each thread has a current device of its own.
        gpu = self._loop.call(training_gpu)
        if gpu is not None:
            used = f"cuda:{gpu}"
        asked = request.settings.device
        if asked not in ("auto", used, used.partition(":")[0]):
            raise ProbeError(
                f"the script trains on {used}, not on {asked}",
                "Leave out --device: the script chooses. Or set CUDA_VISIBLE_DEVICES.",
            )
        return self._open_device(used, request)

    def _source(
        self,
        feed: Feed,
        own_batches: list[Any],
        own_batch: Callable[[], Any],
        request: Prepare,
    ) -> Drawn | Learned:
        """Draw from the data set's examples by the manifest's rows, or else learn, from them or from whole batches."""
        script = request.script
        assert script is not None
        loader = feed.loader
        options = request.options
        keys = _keys(options)
        count = count_of(loader)

        def drawn() -> Drawn | None:
            if count != request.examples or not script.rows:
                return None
            drawn = Drawn(loader.dataset, loader.collate_fn, **keys)
            digit = digit_of(np.asarray(script.lengths))
            if drawn.follows(script.rows, digit, options):
                return drawn
            self._is_in_order = False
            own = rows_in_order(loader.dataset, script.lengths, script.targets)
            return drawn if drawn.follows(own, digit, options) else None

        def learned() -> Learned:
            if count is not None:
                examples = [loader.dataset[index] for index in spaced(count)]
            else:
                examples = list(itertools.islice(iter(loader.dataset), _EXAMPLES))
            return Learned.from_examples(examples, loader.collate_fn, **keys)

        source = self._loop.call(drawn)
        if not self.agree(source is None):  # all ranks, or none
            assert source is not None
            return source
        if loader.batch_sampler is not None:
            batches = self._loop.call(learned)
        else:
            while len(own_batches) < _WHOLE_BATCHES:
                self._loop.train(own_batch)
            batches = Learned.from_batches(
                own_batches, **keys, batch_size_key=options.get("batch_size_key")
            )
        try:
            batches.fit(script, options, self._place.largest)
        except Unclear as error:
            if count in (None, request.examples):
                raise
            raise Unclear(
                f"the data set has {count:,} examples, but the manifest {request.examples:,}, and "
                f"{error.message}",
                "Give the manifest of this data set.",
            ) from error
        return batches

    def _compared(
        self, fed: Fed, pairs: Iterator[tuple[BatchShape, Any, Any]]
    ) -> list[Twin]:
        """Compare own batches with made ones of the same shape; where steps are slow, fewer of them."""
        started = time.monotonic()
        twins: list[Twin] = []
        while len(twins) < _TWINS:
            pair = self._loop.call(lambda: next(pairs, None))
            if self.agree(pair is None):
                break
            assert pair is not None
            twins.append(fed.compared(*pair))
            del pair
            if self.agree(time.monotonic() - started > _TWIN_SECONDS):
                break
        return twins

    def _gradient(
        self, source: Drawn | Learned, loader: Any, fed: Fed, accumulation: int
    ) -> StepGradient:
        """Return how the gradient of a step depends on its cut, where its examples can be cut otherwise."""
        if not isinstance(source, Drawn):
            return StepGradient(
                unknown="its examples can't be drawn one by one",
                batch_norm=self._loop.call(gradients.batch_norms),
            )
        step = gradients.Step(source, _batch_size(loader), accumulation, self._place)
        return gradients.step_gradient(
            self._loop, step, accumulation, fed.stale, self._place
        )


def _batch_size(loader: Any) -> int:
    """Return the number of examples in a batch of the loader's own."""
    return loader.batch_size or len(next(iter(loader.batch_sampler)))


def _keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the leaves that have the length and the target, if the user gives them."""
    return {name: options.get(name) for name in ("length_key", "target_key")}


def count_of(loader: Any) -> int | None:
    """Return the number of examples, if batches of them can be chosen; torch's streams have a failing `__getitem__`."""
    if is_stream(loader):
        return None
    return len(loader.dataset)


def _chosen(loop: Loop, number: int | None) -> Feed:
    """Return the training loop's loader. Raises WorkloadError if there are several and none was chosen."""
    feeds = loop.feeds
    if len(feeds) == 1 or (number is not None and 0 <= number < len(feeds)):
        for feed in feeds:
            feed.is_endless = True
        return feeds[number or 0]
    names = "; ".join(
        f"{index}: {described(feed.loader)}" for index, feed in enumerate(feeds)
    )
    raise WorkloadError(
        f"the script trains on batches of {len(feeds)} loaders: {names}",
        "Choose the one whose batches are to be tuned with --loader N; the others deliver their own.",
    )


def _check_finite() -> None:
    """Raise WorkloadError if the script's first steps left parameters that are not finite."""
    for parameter in trained_parameters():
        if not own_part(parameter).isfinite().all():
            raise WorkloadError(
                "parameters are not finite after the script's first optimizer steps: its loss is infinite or NaN",
                "Fix that first: such training learns nothing. To measure it as it is, add --force.",
            )


def _check(twins: list[Twin], *, force: bool) -> None:
    """Raise WorkloadError if made batches take other memory than the script's own."""
    for twin in twins:
        if abs(twin.difference) > WRONG_TWINS and not force:
            raise WorkloadError(
                f"a made batch of {twin.shape} allocates {twin.made_bytes:,} bytes, the script's own "
                f"{twin.own_bytes:,}: {twin.difference:+.1%}",
                "Memory depends on more than the shape of a batch, or what was learned of it is wrong. Go on anyway "
                "with --force.",
            )


class Fed:
    """A script as a workload: its batches are made as was learned, its training step is one turn of its loop."""

    def __init__(
        self,
        loop: Loop,
        source: Drawn | Learned,
        meter: Meter,
        accumulation: int,
        largest: Callable[[int], int] = int,
    ) -> None:
        self._loop = loop
        self._source = source
        self._meter = meter
        self._accumulation = accumulation
        self.packed = source.packed
        self.for_trials = self
        # Batches that the loop holds when it gets one more: they are trained on first.
        self.stale = largest(max(0, loop.batches_before_forward - 1))
        self.others: Sequence[BatchShape] = ()  # of an optimizer step, after the first
        self.trained: deque[BatchShape] = deque(maxlen=1 + self.stale)
        """The shape that the loop trains on, and those of the batches that it holds."""

    def setup(self, device: Any) -> None:
        """Do nothing: the script has built its model."""

    def make_batch(self, shape: BatchShape) -> Any:
        """Make a batch, and let the loop train on what it fetched before; if there are others, among them."""
        batch = self._made(shape)
        return batch if self.others else self._settled(batch)

    def _made(self, shape: BatchShape) -> Any:
        self.trained.append(shape)
        return self._loop.call(lambda: self._source.make(shape))

    def step(self, batch: Any) -> None:
        """Let the loop train on this batch and the others of its step, or more like it, until an optimizer steps."""
        batches = self._of_a_step(batch)
        self._train(lambda: next(batches))

    def _of_a_step(self, batch: Any) -> Iterator[Any]:
        yield copy.copy(batch)
        for shape in self.others:
            batch = self._made(shape)
            yield copy.copy(batch)
        while True:
            yield copy.copy(batch)

    def _train(self, next_batch: Callable[[], Any]) -> None:
        # Batches are copied: a script may take parts out of a batch, or move them.
        self._loop.train(
            next_batch, self._accumulation, lambda: self._meter.retries_and_ooms()[1]
        )

    def fill(self, shape: BatchShape) -> None:
        """Let trials fill optimizer steps of many batches with small ones of this shape."""
        if not self.packed and self._accumulation > _WHOLE:
            self.for_trials = Filled(self, shape)

    def compared(self, shape: BatchShape, own: Any, made: Any) -> Twin:
        """Return the peaks of one of the script's own batches and of a made one, where they are nearest in two turns.

        Libraries that load their parts in the first steps, and the heap, may change one of them by a few MiB.
        """
        own_bytes, made_bytes = min(
            ((self._allocated(own), self._allocated(made)) for _ in range(2)),
            key=lambda peaks: abs(peaks[0] - peaks[1]),
        )
        return Twin(**asdict(shape), own_bytes=own_bytes, made_bytes=made_bytes)

    def _allocated(self, batch: Any) -> int:
        """Return how much a step with a batch allocates at its peak, beyond what the process holds."""
        self._settled(batch)
        self.step(batch)
        held = self._meter.in_use()
        self._meter.reset()
        self.step(batch)
        self._meter.synchronize()
        return max(0, (self._meter.peak() or 0) - held)

    def _settled(self, batch: Any) -> Any:
        """Return the batch, once the loop holds no others; what making it took does not count as a step's."""
        for _ in range(math.ceil(self.stale / self._accumulation)):
            self.step(batch)
        self._meter.synchronize()
        self._meter.reset()
        return batch


class Filled(Fed):
    """The same workload where only three batches of an optimizer step have the shape that is asked for.

    The others are small, so that a step of many takes little longer than these three. Wherever the loop's steps begin
    among the batches that it is given, one of the three follows another of the same step: then there are gradients, and
    what the loop keeps of the batch before. Cheap batches fill their steps themselves.
    """

    def __init__(self, fed: Fed, shape: BatchShape) -> None:
        vars(self).update(vars(fed))
        self._filler = fed.make_batch(shape)
        self._seconds: list[float] = []  # of steps of small batches alone
        self._is_filled = True
        for _ in range(_TIMED_FILLERS):
            self._time_filler()

    def _time_filler(self) -> None:
        def step() -> None:
            self._train(lambda: copy.copy(self._filler))
            self._meter.synchronize()

        for _ in range(math.ceil(self.stale / self._accumulation)):
            step()  # what the loop holds is trained on first
        started = time.perf_counter()
        step()
        self._seconds.append(time.perf_counter() - started)

    @property
    def _filler_seconds(self) -> float:
        return statistics.median(self._seconds[-_TIMED_FILLERS:])

    def make_batch(self, shape: BatchShape) -> Any:
        """Make a batch, and let the loop train on what it fetched before."""
        self._is_filled = True
        self._time_filler()
        return super().make_batch(shape)

    def step(self, batch: Any) -> None:
        """Let the loop train on small batches, and then on three like this one, until an optimizer steps."""
        given = itertools.count(_WHOLE)

        def next_batch() -> Any:
            is_small = self._is_filled and next(given) < self._accumulation
            return copy.copy(self._filler if is_small else batch)

        self._train(next_batch)

    def whole_step_seconds(self, seconds: float) -> float:
        """Return the time of a step of batches like the last one, by that of a step."""
        if not self._is_filled:
            return seconds
        self._is_filled = seconds > _DEAR * self._filler_seconds
        more_each = max(0.0, seconds - self._filler_seconds) / _WHOLE
        return self._filler_seconds + more_each * self._accumulation
