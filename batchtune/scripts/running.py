"""The mode `run` of an unchanged script: its training loader gives the batches of `sampler.yaml`.

The training loader is the one whose data set has as many examples as the run. batchtune's sampler takes the place of
its batch sampler when it is iterated over, which is within what accelerate or Lightning make of it: so nothing deals
the batches once more, and the loader's own workers, resuming and `len()` stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import random
import statistics
import sys
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.lengths import FloatArray
from batchtune.results import SAMPLER_FILE, PackedConfig
from batchtune.scripts import Begin, recorder
from batchtune.units import counted

# What a script's DataLoader is of, and in which order its examples are.

SAMPLER_LINES = """\
Change three lines of the script instead:
  from batchtune import sampler_from_config
  sampler = sampler_from_config("{run}/sampler.yaml", lengths)  # lengths[i] is that of dataset[i]
  loader = DataLoader(dataset, batch_sampler=sampler)  # and your other arguments"""
STREAM_LINES = """\
Change three lines of the script instead:
  from batchtune import BucketedStream
  stream = BucketedStream.from_config("{run}/stream.yaml", examples, length_of=..., collate_fn=...)
  loader = DataLoader(stream, batch_size=None)  # and your other arguments"""
SAME_STEP_SAMPLER_LINES = """\
Change three lines of the script instead:
  from batchtune import SameStepBatchSampler
  sampler = SameStepBatchSampler.from_config("{run}/sampler.yaml", your_batch_sampler, lengths)
  loader = DataLoader(dataset, batch_sampler=sampler)  # lengths[i] is that of dataset[i]"""
SAME_STEP_LINES = """\
Change three lines of the script instead:
  from batchtune import SameStepStream
  stream = SameStepStream("{run}/sampler.yaml", examples, length_of=..., collate_fn=...)
  loader = DataLoader(stream, batch_size=None)  # with one worker at most, and your other arguments"""

_EXAMINED = 20
# Of examples in another order, fewer than 1 in 1,000 reach it by chance; transcripts, and lengths that an augmentation
# changes by a tenth, do in the same order.
_LEAST_CORRELATION = 0.7
# Among fewer sizes no order can be seen.
_LEAST_DISTINCT = 5
# Two epochs of a million examples, batched by a sampler in Python, take about 2 seconds.
_COUNTING_SECONDS = 10.0


def is_stream(loader: Any) -> bool:
    """Return whether a loader does not choose examples: its data set is a stream, or makes whole batches."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None


def unlike(
    loader: Any, count: int, lines_of_streams: str = STREAM_LINES
) -> tuple[str, str] | None:
    """Return why a loader does not have this many examples, and lines to change in the script; None if it does."""
    name = f"the data set {type(loader.dataset).__name__}"
    if is_stream(loader):
        return f"{name} is a stream, or makes whole batches", lines_of_streams
    examples = length_hint(loader.dataset)
    if examples == count:
        return None
    reason = f"{name} has {examples:,} examples, but the manifest {count:,} (if the data have changed, tune again)"
    return reason, SAMPLER_LINES


def stated(sampler: Any, *names: str) -> Any:
    """Return the first attribute of these names that a sampler has, or one within it; None if none has one."""
    while sampler is not None:
        for name in names:
            if hasattr(sampler, name):
                return getattr(sampler, name)
        sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    return None


def random_batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader whose batches are drawn at random, all of one size; None for another.

    The order of a stream is not known, and is assumed to be random.
    """
    from torch.utils.data import (
        BatchSampler,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
    )

    if isinstance(loader.dataset, IterableDataset):
        return None if loader.batch_size is None else int(loader.batch_size)

    batches = loader.batch_sampler
    # Accelerate's, of each rank, is around the script's.
    while isinstance(getattr(batches, "batch_sampler", None), BatchSampler):
        if getattr(batches, "split_batches", False):
            return None
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    # What inherits from the other, as Lightning's does, may be around any order.
    is_dealt = type(sampler) is DistributedSampler and sampler.shuffle
    if not is_dealt and not isinstance(sampler, RandomSampler):
        return None
    return int(batches.batch_size)


@contextlib.contextmanager
def restored_randomness() -> Iterator[None]:
    """Let the script draw the same random numbers as if nothing was read here."""
    import torch

    own = random.getstate()
    numpys = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)


def write_own_batches(loader: Any, path: Path | None) -> None:
    """Write which examples the batches of two epochs hold, as `epochs.recorded` reads it; without a path nothing.

    It writes nothing if that takes long, or if the loader's batch sampler yields no indices. It
    reads no example.
    """
    from torch.utils.data import BatchSampler

    until = time.monotonic() + _COUNTING_SECONDS
    epochs = []
    # A sampler is the user's code, and may not end.
    with contextlib.suppress(Exception):
        for epoch in range(2):
            set_epoch = stated(loader.batch_sampler, "set_epoch")
            if set_epoch is not None:
                set_epoch(epoch)
            examples = array("q")
            batches = array("q")
            for number, batch in enumerate(loader.batch_sampler):
                examples.extend(map(operator.index, batch))
                batches.extend([number] * len(batch))
                if time.monotonic() > until:
                    return
            epochs.append(np.array([batches, examples]))
        if path is not None:
            drawing = loader.batch_sampler
            # Torch's own does not say in which order.
            if type(drawing) is BatchSampler:
                drawing = drawing.sampler
            np.savez(
                path, sampler=type(drawing).__name__, first=epochs[0], second=epochs[1]
            )


def pads(pair: Any) -> bool:
    """Return whether a batch of two examples has a row for each of them."""
    from batchtune.scripts.trees import leaves_of, sizes

    shapes = map(sizes, leaves_of(pair).values())
    return any(len(shape) > 1 and shape[0] == 2 for shape in shapes)


def unsafe(
    loader: Any, lengths: FloatArray, *, draws: bool = True, packed: bool = False
) -> str | None:
    """Return why a loader's examples, of these lengths, should not be given in other batches; None if they can be.

    The other batches hold each example once (`draws`), or what the loader's own sampler draws; they
    may be `packed`.

    Some examples, from the shortest to the longest, are collated one by one: some size of theirs must grow as well, or
    none may differ. Values that grow with the row, as an index or a time does, don't count: if the manifest is sorted,
    they grow with any lengths. A worker reads them if the loader has workers, since a data set may open its files
    where it is first read.
    """
    import torch

    from batchtune.scripts.trees import flatten, measured

    chooses = stated(loader.batch_sampler, "indices", "weights") is not None
    if draws and chooses:
        return "its sampler chooses among the examples, but recommended batches have each of them once an epoch"
    places = np.linspace(0, lengths.size - 1, _EXAMINED).astype(int)
    ascending = np.argsort(lengths)[places].tolist()
    indices = [[index] for index in ascending]
    if packed:
        indices.append([ascending[0], ascending[-1]])
    examples = torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=indices,
        collate_fn=loader.collate_fn,
        num_workers=min(1, loader.num_workers),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    with torch.no_grad():  # a loader that is iterated over like this does not train
        batches = list(examples)
    if packed and pads(batches.pop()):
        return "it pads its batches, but those of the run are packed: they were measured without padding"
    sizes_by_leaf = measured(flatten(batches))
    correlations = []
    for (_, measure), sizes in sizes_by_leaf.items():
        distinct, ranks = np.unique(sizes, return_inverse=True)
        if distinct.size < _LEAST_DISTINCT:
            continue
        # NumPy's would set up BLAS, which holds 32 MiB of the script's memory from then on.
        by_row = statistics.correlation(ranks.tolist(), ascending)
        if measure != "value" or abs(by_row) < _LEAST_CORRELATION:
            correlations.append(statistics.correlation(ranks.tolist(), places.tolist()))
    if max(correlations, default=1) >= _LEAST_CORRELATION:
        return None
    return (
        "the sizes of its examples don't follow the lengths, so the rows of the manifest and the examples of the data "
        "set are in different orders"
    )


# In a folder for one start of the script: the lengths of its data set, in its order, as float64.
LENGTHS_FILE = "lengths"
# There, once a loader was given the batches.
GIVEN_FILE = "given"
# The first optimizer steps show how many batches each of them has.
_FIRST_STEPS = 4
_IF_STEPS_VARY = "if it steps by time, tokens or loss, that may need a fixed number of batches a step."
# What torch's, accelerate's and batchtune's samplers that deal to ranks call their number.
_RANKS = ("num_replicas", "num_processes", "world_size")


def wrap(loader: Any, begin: Begin, options: Mapping[str, Any]) -> Iterator[Any]:
    """Return the iterator of a loader, over the recommended batches if it is the training loader; record its steps."""
    given = _of_this_process(options)
    given.give(loader)
    batches = recorder.wrap(loader, begin, options)
    if given.accumulate is None or loader.batch_sampler is not given.sampler:
        return batches
    return recorder.Recorded(batches, given)


def length(loader: Any, own: Callable[[Any], int], options: Mapping[str, Any]) -> int:
    """Return the number of batches of a loader: of those recommended, if it is the training loader.

    Before they are dealt to ranks, these are the batches of all ranks: accelerate deals them later.
    """
    given = _of_this_process(options)
    if unlike(loader, given.lengths.size):
        return own(loader)
    ranks: int = given.sampler.world_size
    if stated(loader.batch_sampler, *_RANKS) is not None:
        ranks = 1
    if given.accumulate is None or loader.batch_sampler is given.sampler:
        return len(given.sampler) * ranks
    batches: int = given.sampler.batches_for(own(loader), ranks)
    return batches


class GivenBatches:
    """The batches that the training loader of this process is given.

    Attributes:
        sampler: What gives them.
        accumulate: How many of them each optimizer step has, whose examples are those of the script's own batches; None
            if batchtune draws the examples, too.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from batchtune.configs import read_any_sampler_yaml

        self._options = options
        self._config = Path(options["run"], SAMPLER_FILE)
        self.lengths = np.fromfile(Path(options["scratch"], LENGTHS_FILE))
        self.accumulate: int | None = None
        config = read_any_sampler_yaml(self._config)
        self._is_packed = isinstance(config, PackedConfig)
        self._step_examples = config.pool_size  # on all ranks
        if config.keeps_examples:
            self.accumulate = config.accumulate
        self.sampler = self._around(())
        self._own_sampler: Any = None
        self._own_epoch: Any = None
        self._batches = 0  # that the training loader has given in this epoch
        # Those before each of its last optimizer steps, and whether the first steps may still end the script.
        self._at_steps: deque[int] = deque(maxlen=_FIRST_STEPS)
        self._may_refuse = True

    def _around(self, own: Any) -> Any:
        """Return the sampler of the run; one that keeps the examples of steps takes them from the script's `own`."""
        from batchtune.sampler.micro_batches import (
            SameStepBatchSampler,
            sampler_from_config,
        )

        with warnings.catch_warnings():
            # The command has compared them, together with the targets.
            warnings.filterwarnings("ignore", ".* was tuned on other lengths")
            try:
                if self.accumulate is not None:
                    return SameStepBatchSampler.from_config(
                        self._config, own, self.lengths
                    )
                return sampler_from_config(self._config, self.lengths)
            except ValueError as error:
                raise SystemExit(
                    f"Error: {os.path.relpath(self._config)} does not fit the manifest: {error}"
                ) from error

    def give(self, loader: Any) -> None:
        """Let a loader give the batches from now on, if it is the training loader."""
        lines = STREAM_LINES if self.accumulate is None else SAME_STEP_LINES
        difference = unlike(loader, self.lengths.size, lines)
        if difference:
            self._watch_steps(difference)
            return
        holder = loader
        if hasattr(loader.batch_sampler, "skip_batches"):
            holder = loader.batch_sampler  # accelerate's, to resume in mid-epoch
        if holder.batch_sampler is not self.sampler:
            if self.accumulate is not None:
                self.sampler = self._around(holder.batch_sampler)
            if self._own_sampler is None:
                self._check(loader)
            self._own_sampler = holder.batch_sampler
            # A DataLoader forbids to set the attribute.
            vars(holder)["batch_sampler"] = self.sampler
        if self.accumulate is not None:
            return
        epoch = stated(self._own_sampler, "epoch")
        if epoch not in (None, self._own_epoch):
            self.sampler.set_epoch(epoch)  # else it begins the next
        self._own_epoch = epoch

    def _check(self, loader: Any) -> None:
        """Say which loader is given which batches; end the script if that is not safe."""
        ranks = self.sampler.world_size
        own_ranks = stated(loader.batch_sampler, *_RANKS)
        if own_ranks not in (None, ranks):
            self._refuse(
                f"its sampler deals examples to {own_ranks} ranks, torch.distributed has {ranks}"
            )
        self._check_step(random_batch_size(loader))
        with restored_randomness():
            reason = unsafe(
                loader,
                self.lengths,
                draws=self.accumulate is None,
                packed=self._is_packed,
            )
        if reason and not self._options["force"]:
            self._refuse(f"{reason} (--force trains nonetheless)")
        if self.sampler.rank == 0:
            each = " on each rank" if ranks > 1 else ""
            print(
                f"batchtune: the DataLoader of {type(loader.dataset).__name__} gives the batches of "
                f"{os.path.relpath(self._config)}, {len(self.sampler):,} an epoch{each}.",
                file=sys.stderr,
            )
            Path(self._options["scratch"], GIVEN_FILE).touch()
        if self.accumulate is not None:
            self._watch_accumulation(self.accumulate)

    def _check_step(self, batch_size: int | None) -> None:
        """End the script if its own batches make steps of other numbers of examples than those tuned."""
        if self.accumulate is None or batch_size is None:
            return
        examples = batch_size * self.sampler.own_accumulate * self.sampler.world_size
        if examples == self._step_examples:
            return
        self._refuse(
            f"with batches of {batch_size} its steps have {counted(examples, 'example')}, and "
            f"{os.path.relpath(self._config)} keeps steps of {self._step_examples}",
            "Start it with the batch size that was tuned, or tune it as it is started now.",
        )

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch of the training loader, and count them."""
        self._batches = 0
        self._at_steps.clear()
        for batch in batches:
            self._batches += 1
            yield batch

    def _watch_accumulation(self, accumulate: int) -> None:
        """End the script if its first optimizer steps come another number of batches apart than `accumulate`.

        If a later one does, warn, once. Loops may fetch batches ahead. A few steps may be further apart: mixed
        precision leaves out those whose gradients overflow.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        has_warned = False
        each = f"{os.path.relpath(self._config)} cuts each step into {accumulate}"

        def on_step(*_: Any) -> None:
            nonlocal has_warned
            if has_warned or _given is not self:
                return
            self._at_steps.append(self._batches)
            between = [after - before for before, after in pairwise(self._at_steps)]
            if not self._may_refuse:
                # The last step of an epoch may have fewer, so each is judged at the next.
                between = between[:-1]
            wrong = [apart for apart in between if apart % accumulate]
            if self._may_refuse:
                left = len(self.sampler) - self._batches
                if len(self._at_steps) == _FIRST_STEPS or left < 2 * accumulate:
                    self._may_refuse = False
                    if min(between, default=0) > accumulate:
                        wrong = between
                if wrong:
                    recorder.recorder_of(**self._options["recorder"]).refuse()
                    self._refuse(
                        f"its optimizer steps every {counted(min(wrong), 'batch')}, and {each}. Start it with a "
                        f"gradient accumulation of {accumulate}",
                        f"Or tune it as it is started now; {_IF_STEPS_VARY}",
                    )
            elif wrong:
                has_warned = True
                print(
                    f"Warning: an optimizer stepped after {counted(wrong[0], 'batch')}, and {each}: steps no longer "
                    f"have their own examples. Tune it as it is started now; {_IF_STEPS_VARY}",
                    file=sys.stderr,
                )

        register_optimizer_step_pre_hook(on_step)

    def _watch_steps(self, difference: tuple[str, str]) -> None:
        """End the script if an optimizer steps, and no loader was the training loader of the run.

        Others may be iterated over before: for statistics, or to validate.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        steps = itertools.count()

        # It stays: removed while the hooks run, it would change what torch iterates over.
        def on_step(*_: Any) -> None:
            if next(steps) == 0 and self._own_sampler is None:
                self._refuse(*difference)

        register_optimizer_step_pre_hook(on_step)

    def _refuse(self, reason: str, lines: str = SAMPLER_LINES) -> None:
        if lines == SAMPLER_LINES and self.accumulate is not None:
            lines = SAME_STEP_SAMPLER_LINES
        raise SystemExit(
            f"Error: this script can't be given the recommended batches: {reason}.\n"
            f"{lines.format(run=self._options['run'])}"
        )


_given: GivenBatches | None = None


def _of_this_process(options: Mapping[str, Any]) -> GivenBatches:
    global _given
    if _given is None:
        _given = GivenBatches(options)
    return _given
