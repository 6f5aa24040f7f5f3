"""The mode `run` of an unchanged script: its training loader gives the batches of `sampler.yaml`.

The training loader is the one whose data set has as many examples as the run. batchtune's sampler takes the place of
its batch sampler when it is iterated over, which is within what accelerate or Lightning make of it: so nothing deals
the batches once more, and the loader's own workers, resuming and `len()` stay as they are.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.results import SAMPLER_FILE, PackedConfig
from batchtune.scripts import recording
from batchtune.scripts.interposing import Begin
from batchtune.scripts.script_loaders import (
    SAME_STEP_LINES,
    SAME_STEP_SAMPLER_LINES,
    SAMPLER_LINES,
    STREAM_LINES,
    random_batch_size,
    restored_randomness,
    stated,
    unlike,
    unsafe,
)
from batchtune.units import counted

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
    batches = recording.wrap(loader, begin, options)
    if given.accumulate is None or loader.batch_sampler is not given.sampler:
        return batches
    return recording.Recorded(batches, given)


def length(loader: Any, own: Callable[[Any], int], options: Mapping[str, Any]) -> int:
    """Return the number of batches of a loader: of those recommended, if it is the training loader.

    Before anything deals them to the ranks, these are the batches of all: accelerate deals them later.
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
        from batchtune.sampler_files import read_any_sampler_yaml

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
        from batchtune.sampler.packed import sampler_from_config
        from batchtune.sampler.same_step import SameStepBatchSampler

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
                    recording.recorder_of(**self._options["recorder"]).refuse()
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
