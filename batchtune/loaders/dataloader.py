"""torch's DataLoader over the user's data set, or with the user's arguments, those that are swept replaced."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from batchtune.errors import LoaderError
from batchtune.loaders.base import BatchFacts, Machine, OpenLoader, Target
from batchtune.loaders.batches import facts_of
from batchtune.loaders.iterable import DEFAULTS, IterableKind, IterableLoader, call, torch_axes
from batchtune.results import TORCH_TYPES, Argument, Arguments, LoaderStage
from batchtune.workloads.loading import OTHER_NAME

# The arguments that a DataLoader keeps as attributes, from which the same one is built with others.
_KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_BATCHING = ("batch_size", "batch_sampler", "shuffle", "sampler", "drop_last")
_WITHOUT_WORKERS: dict[str, Any] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
    "timeout": 0,
}


class TorchKind(IterableKind):
    """A DataLoader over a data set, with a dict of arguments, or the user's own: which, its call shows."""

    name: ClassVar[str] = "torch"
    MORE_WORKERS: ClassVar[bool] = True
    IS_DATALOADER: ClassVar[bool] = True
    DEFAULTS: ClassVar[Arguments] = DEFAULTS
    ARGUMENTS: ClassVar[Mapping[str, Any]] = TORCH_TYPES
    HIDES_RECEIVING: ClassVar[str] = "pin_memory=true receives batches in a thread of its own, and "

    def axes(self, machine: Machine, takes: frozenset[str]) -> dict[str, Sequence[Argument]]:
        """As the base class says."""
        return torch_axes(machine)

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """As the base class says; any other iterable of batches is opened as such."""
        from torch.utils.data import DataLoader, IterableDataset

        made = call(target, arguments)
        _refuse(made)
        lengths = None
        maker = DataLoader
        batches = isinstance(made, (list, tuple, str)) or _starts_workers(made)
        if isinstance(made, DataLoader):
            given = _arguments_of(made)
            maker = type(made)
        elif isinstance(made, Mapping) and "dataset" in made:
            given = dict(made)
            lengths = given.pop("lengths", None)
        elif isinstance(made, IterableDataset) and not batches:
            given = {"dataset": made, "batch_size": None}
        elif hasattr(made, "__getitem__") and hasattr(made, "__len__") and not batches:
            given = {"dataset": made}
        else:
            return IterableLoader(target, arguments, made)
        if lengths is not None:
            sampler = _recommended(target, given, lengths)
            given = {name: value for name, value in given.items() if name not in _BATCHING} | {"batch_sampler": sampler}
        if given.get("generator") is not None:
            given["generator"].manual_seed(target.seed)
        return TorchLoader(target, maker, given, arguments, lengths)


class NotingSampler:
    """A batch sampler that notes the indices of the batches that were requested.

    Attributes:
        sent: Of those that were not delivered yet, in order.
        stopped: Whether to request no more.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.sent: deque[Any] = deque()
        self.stopped = False

    def __iter__(self) -> Iterator[Any]:
        self.sent.clear()
        self.stopped = False
        for indices in self.sampler:
            if self.stopped:
                return
            self.sent.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self.sampler)

    def delivered(self, batch: Any, *, in_order: bool) -> Any:
        """Return the indices of a delivered batch: of the first that was requested, or out of order, of its size."""
        if not self.sent:
            return None
        place = 0
        if not in_order:
            examples = facts_of(batch).examples
            same_size = (place for place, indices in enumerate(self.sent) if _size(indices) == examples)
            place = next(same_size, 0)
        delivered = self.sent[place]
        del self.sent[place]
        return delivered


class TorchLoader(IterableLoader):
    """A DataLoader. Of a map-style data set it is known which examples are in each batch.

    Attributes:
        loader: As it is measured.
        plain: With the user's own arguments, but without workers.
    """

    kind: ClassVar[str] = "torch"

    def __init__(self, target: Target, maker: Any, given: dict[str, Any], arguments: Arguments, lengths: Any) -> None:
        import numpy as np
        from torch.utils.data import DataLoader, IterableDataset

        # Arguments that the target takes are not the DataLoader's, unless both have them.
        swept = {name: value for name, value in arguments.items() if name not in target.takes or name in DEFAULTS}
        given = given | {name: swept.pop(name) for name in _BATCHING if name in swept}
        self.plain = DataLoader(**{**given, **_WITHOUT_WORKERS})
        self._noting: NotingSampler | None = None
        self._indices: Any = None
        self.exact = lengths is not None
        self._lengths = None if lengths is None else np.asarray(lengths, dtype=np.float64)
        wanted = {name: value for name, value in given.items() if name not in _BATCHING}
        # With a limit of its own, torch looks for dead workers only when that is over.
        wanted = wanted | {"timeout": 0} | swept
        if not wanted.get("num_workers"):
            wanted |= _WITHOUT_WORKERS
        if isinstance(self.plain.dataset, IterableDataset):
            wanted |= {name: given[name] for name in _BATCHING if name in given}
        elif self.plain.batch_sampler is not None:
            self._noting = wanted["batch_sampler"] = NotingSampler(self.plain.batch_sampler)
        else:  # each item of the data set is a batch
            wanted |= {"sampler": self.plain.sampler, "batch_size": None}
        self.dealt = not isinstance(self.plain.dataset, IterableDataset)
        self.loader = _build(maker, wanted)
        self._in_order = self.loader.num_workers < 2 or getattr(self.loader, "in_order", True)
        _warn_of_shards(self.plain.dataset, self.loader.num_workers)
        _check_importable(self.loader)
        super().__init__(target, {**arguments, "pin_memory": self.loader.pin_memory}, self.loader)

    def epoch(self) -> Iterator[Any]:
        """As the base class says."""
        noting = self._noting
        batches = super().epoch()
        try:
            for batch in batches:
                if noting is not None:
                    self._indices = noting.delivered(batch, in_order=self._in_order)
                yield batch
        except GeneratorExit:
            if noting is not None and self.loader.persistent_workers:
                # They finish the requested batches before the next epoch, to which these must not count.
                noting.stopped = True
                with contextlib.suppress(Exception):
                    deque(batches, maxlen=0)
            raise

    def facts(self, batch: Any) -> BatchFacts:
        """As the base class says; with `lengths`, exactly."""
        expected = _size(self._indices)
        facts = facts_of(batch, expected)
        if self._lengths is None or self._indices is None:
            return facts
        if facts.examples != expected:  # `collate_fn` has left some out; the loader's own unit may be another
            return replace(facts, length=None, total_length=None)
        lengths = self._lengths[self._indices]
        return replace(facts, length=float(lengths.max()), total_length=float(lengths.sum()))

    def batches(self) -> int | None:
        """As the base class says. How many all workers of an iterable data set yield together only they know."""
        if self._noting is None and self.loader.num_workers:
            return None
        return super().batches()

    def examples(self) -> int | None:
        """As the base class says."""
        from torch.utils.data import BatchSampler

        batching: Any = self.plain.batch_sampler
        if self._noting is None:
            return None
        if self._lengths is not None:
            return len(self._lengths) - int(batching.dropped_examples)
        if type(batching) is not BatchSampler:
            return None
        try:
            count = len(batching.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        if batching.drop_last:
            count -= count % batching.batch_size
        return count

    def emptiness(self) -> str | None:
        """As the base class says."""
        if self._noting is None:
            return "the data set yields nothing"
        with contextlib.suppress(Exception):
            dataset: Any = self.plain.dataset
            count = len(dataset)
            if count == 0:
                return "the data set has no examples"
            if self.plain.drop_last:
                size = self.plain.batch_size
                return f"{count:,} examples are fewer than a batch of {size:,}, and drop_last leaves them out"
        return "the sampler yields nothing"

    def explain(self, error: BaseException) -> str | None:
        """As the base class says."""
        if self._noting is not None:
            return None
        return super().explain(error)

    def stages(self, seconds: float) -> list[LoaderStage]:
        """As the base class says."""
        from batchtune.loaders.stages import measure_stages

        return measure_stages(self.plain, seconds)

    def close(self) -> None:
        """As the base class says."""
        super().close()
        self.loader = None


def _refuse(made: Any) -> None:
    """Raise LoaderError for what is nearly a data set, or nearly the arguments of a DataLoader."""
    if isinstance(made, Mapping) and "dataset" not in made:
        raise LoaderError(
            f"the target returns a dict without `dataset`: {', '.join(map(str, made)) or 'it is empty'}",
            "Give it the arguments of torch's DataLoader, with the data set under `dataset`.",
        )
    if hasattr(made, "__getitem__") and not hasattr(made, "__iter__") and not hasattr(made, "__len__"):
        raise LoaderError(
            f"the target returns an object of type {type(made).__name__} without __len__: how many items has it?",
            "Add that method, or return a dict with the `dataset` and a `sampler`.",
        )


def _arguments_of(loader: Any) -> dict[str, Any]:
    """Return the arguments that a DataLoader was made with."""
    given = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if type(loader.sampler).__name__ == "_InfiniteConstantSampler":  # of an IterableDataset
        return given | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return given | {"batch_sampler": loader.batch_sampler}
    return given | {"sampler": loader.sampler, "batch_size": None}


def _recommended(target: Target, given: Mapping[str, Any], lengths: Any) -> Any:
    """Return the sampler of the run's recommended batches."""
    import batchtune

    if others := [name for name in _BATCHING if given.get(name)]:
        raise LoaderError(
            f"the target gives both `lengths` and `{others[0]}`",
            f"Leave out `{others[0]}`: with `lengths`, the batches are those that the run recommends.",
        )
    if target.config is None:
        raise LoaderError(
            "the target gives `lengths`, but no run folder with a sampler.yaml says how to batch them",
            "Name one with --run, or give a batch_size or a batch_sampler instead of `lengths`.",
        )
    dataset = given["dataset"]
    if hasattr(dataset, "__len__") and len(dataset) != len(lengths):
        raise LoaderError(
            f"the target gives {len(lengths):,} `lengths` for a data set of {len(dataset):,} examples",
            "Let lengths[i] be the length of dataset[i], in the unit of the run.",
        )
    try:
        return batchtune.sampler_from_config(target.config, lengths)
    except (ValueError, TypeError) as error:
        raise LoaderError(f"the target's `lengths` do not fit {target.config}: {error}") from error


def _build(maker: Any, arguments: dict[str, Any]) -> Any:
    """Make a DataLoader of the user's own class, or if that takes other arguments, torch's."""
    from torch.utils.data import DataLoader

    if maker is not DataLoader:
        try:
            return maker(**arguments)
        except TypeError:
            warnings.warn(
                f"{maker.__name__} can't be made from the arguments of a DataLoader: torch's own is measured with them",
                stacklevel=2,
            )
    return DataLoader(**arguments)


def _check_importable(loader: Any) -> None:
    """Raise LoaderError if workers that are not forked could not import the user's file by its name."""
    context = loader.multiprocessing_context
    for part in (loader.dataset, loader.collate_fn, loader.worker_init_fn):
        _, other, name = str(getattr(part, "__module__", "")).partition(OTHER_NAME)
        if other and context is not None and context.get_start_method() != "fork":
            raise LoaderError(
                f"workers that are not forked can't import {name}.py: another module has its name",
                "Rename the file, or use fork.",
            )


def _starts_workers(pipeline: Any) -> bool:
    """Return whether a pipeline begins with a DataLoader, as a WebLoader does."""
    from torch.utils.data import DataLoader

    return any(isinstance(stage, DataLoader) for stage in _stages(pipeline))


def _warn_of_shards(pipeline: Any, workers: int) -> None:
    """Warn if a WebDataset pipeline has fewer shards than workers, which share them."""
    for stage in _stages(pipeline):
        shards = getattr(stage, "urls", None)
        if isinstance(shards, list) and 0 < len(shards) < workers:
            warnings.warn(
                f"{workers} workers share {len(shards)} shards: {workers - len(shards)} of them have nothing to read",
                stacklevel=2,
            )


def _stages(pipeline: Any) -> list[Any]:
    """Return the stages of a WebDataset pipeline; of anything else, none."""
    stages = getattr(pipeline, "pipeline", None)
    return stages if isinstance(stages, list) else []


def _size(indices: Any) -> int | None:
    return len(indices) if hasattr(indices, "__len__") else None
