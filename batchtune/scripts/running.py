"""The mode `run` of an unchanged script: its training loader gives the batches of `sampler.yaml`.

The training loader is the one whose data set has as many examples as the run. A loader like it, with batchtune's
sampler, takes its place at the innermost iteration, so that nothing around the script's own sampler (accelerate,
Lightning) deals the batches once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from batchtune.lengths import StreamLengths
from batchtune.results import SAMPLER_FILE
from batchtune.scripts.interposing import Begin
from batchtune.scripts.script_loaders import (
    RANKS,
    SAMPLER_LINES,
    Unlike,
    choosing_sampler,
    follow_lengths,
    like,
    own_iterator,
    samplers_of,
    stated,
    unlike,
)

_LENGTHS_FILE = "lengths.npz"
# Says which loader was given which batches, once that is so.
GIVEN_FILE = "given.txt"


def options_of(
    run: Path, stored: StreamLengths, scratch: Path, *, force: bool
) -> dict[str, Any]:
    """Return the options of this mode.

    Args:
        run: The run folder.
        stored: The lengths of the script's data set, in its order.
        scratch: A folder for this one start of the script, whose processes read the lengths there.
        force: Whether to train though the script's sampler chooses examples, or they don't follow the lengths.
    """
    arrays: dict[str, Any] = {"values": stored.values}
    if stored.targets is not None:
        arrays["targets"] = stored.targets
    np.savez(scratch / _LENGTHS_FILE, **arrays)
    return {
        "mode": "run",
        "run": str(run.absolute()),
        "scratch": str(scratch.absolute()),
        "force": force,
    }


def wrap(loader: Any, begin: Begin, options: Mapping[str, Any]) -> Iterator[Any]:
    """Return the iterator of a loader: over the recommended batches, if it is the training loader."""
    return _of_this_process(options).iterator(loader, begin)


def length(loader: Any, own: Callable[[Any], int], options: Mapping[str, Any]) -> int:
    """Return the number of batches of a loader: of those recommended, if it is the training loader."""
    batches = _of_this_process(options).batches(loader)
    return own(loader) if batches is None else batches


class Given:
    """The batches that the training loader of this process is given."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from batchtune.sampler import sampler_from_config

        self._options = options
        self._scratch = Path(options["scratch"])
        with np.load(self._scratch / _LENGTHS_FILE, allow_pickle=False) as arrays:
            self._lengths = arrays["values"]
            self._sampler = sampler_from_config(
                Path(options["run"]) / SAMPLER_FILE,
                self._lengths,
                targets=arrays.get("targets"),
            )
        # Loader of the script → what takes its place; a script may make one for each epoch.
        self._places: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._own_epoch: int | None = None

    def iterator(self, loader: Any, begin: Begin) -> Iterator[Any]:
        """Return what iterating over a loader gives."""
        difference = unlike(loader, self._lengths.size)
        if difference is not None:
            self._watch_steps(difference)
            return begin()
        if loader not in self._places:
            self._check(loader)
            self._places[loader] = like(loader, batch_sampler=self._sampler)
        self._set_place(loader)
        return own_iterator(self._places[loader])

    def batches(self, loader: Any) -> int | None:
        """Return the number of batches of a loader; None if it is not the training loader.

        Before anything deals them to the ranks, these are the batches of all: accelerate deals them later.
        """
        if unlike(loader, self._lengths.size) is not None:
            return None
        batches = len(self._sampler)
        if stated(loader, *RANKS) is None and loader not in self._places:
            batches *= self._sampler.world_size
        return batches

    def _check(self, loader: Any) -> None:
        """Say which loader is given which batches; end the script if that is not safe."""
        sampler = self._sampler
        ranks = stated(loader, *RANKS)
        if ranks not in (None, sampler.world_size):
            self._refuse(
                f"its sampler deals examples to {ranks} ranks, torch.distributed has {sampler.world_size}"
            )
        forced = "--force trains nonetheless"
        chooses = choosing_sampler(loader, self._lengths.size)
        if chooses is not None and not self._options["force"]:
            self._refuse(
                f"its {chooses} chooses examples, but recommended batches have each of them once an epoch ({forced})"
            )
        follows = follow_lengths(loader, self._lengths)
        if follows is False and not self._options["force"]:
            self._refuse(
                "the sizes of its examples don't follow the lengths, so the rows of the manifest and the examples of "
                f"the data set are in different orders ({forced})"
            )
        if sampler.rank:
            return
        *_, innermost = samplers_of(loader)
        line = (
            f"batchtune: the DataLoader of {type(loader.dataset).__name__} gives the batches of "
            f"{self._options['run']}/{SAMPLER_FILE} instead of {type(innermost).__name__}'s: {len(sampler):,} an epoch"
        )
        if sampler.world_size > 1:
            line += f" on each of {sampler.world_size} ranks"
        line += "."
        if follows is None:
            line += " The order of its examples was not checked, as no size of theirs differs with the lengths."
        print(line, file=sys.stderr, flush=True)
        (self._scratch / GIVEN_FILE).write_text(line, encoding="utf-8")

    def _set_place(self, loader: Any) -> None:
        """Begin the epoch that the script has set, else the next, after the batches that accelerate skips."""
        epoch = stated(loader, "epoch")
        if epoch not in (None, self._own_epoch):
            self._sampler.set_epoch(epoch)
        self._own_epoch = epoch
        skipped = stated(loader, "skip_batches")
        if skipped:
            state = self._sampler.state_dict()
            self._sampler.load_state_dict({**state, "position": skipped})

    def _watch_steps(self, difference: Unlike) -> None:
        """End the script if an optimizer steps, and no loader was the training loader of the run.

        Others may be iterated over before: for statistics, or to validate.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def on_step(*_: Any) -> None:
            hook.remove()
            if not self._places:
                self._refuse(*difference)

        hook = register_optimizer_step_pre_hook(on_step)

    def _refuse(self, reason: str, lines: str = SAMPLER_LINES) -> NoReturn:
        print(
            f"Error: this script can't be given the recommended batches: {reason}.\n"
            f"{lines.format(run=self._options['run'])}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1)


_given: Given | None = None


def _of_this_process(options: Mapping[str, Any]) -> Given:
    global _given
    if _given is None:
        _given = Given(options)
    return _given
