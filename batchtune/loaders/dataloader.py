"""torch's DataLoader over the user's data set or arguments, and any other iterable of batches as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchtune.errors import LoaderError
from batchtune.loaders import LoaderKind, OpenLoader, SweptArguments, Target
from batchtune.loaders.worker import BatchFacts, facts_of, moved
from batchtune.results import TORCH_TYPES, Argument, Arguments

_WITHOUT_WORKERS: Arguments = {
    "num_workers": 0,
    "prefetch_factor": None,
    "in_order": True,
    "persistent_workers": False,
    "multiprocessing_context": None,
}
# Defaults of torch's DataLoader; `multiprocessing_context=None` is Python's own default.
_DEFAULTS: Arguments = {**_WITHOUT_WORKERS, "pin_memory": False}
# The arguments that a DataLoader keeps as attributes, from which the same one is built with others.
_KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_BATCHING = ("batch_size", "batch_sampler", "shuffle", "sampler", "drop_last")


class IterableKind(LoaderKind):
    """Any iterable of batches: a framework's own loader, a WebLoader, a generator function.

    It is swept by those arguments of torch's DataLoader that its function takes.
    """

    GIVEN = tuple(_DEFAULTS)
    WORKERS = "num_workers"

    def axes(
        self, processors: int, *, accelerator: bool, takes: frozenset[str]
    ) -> SweptArguments:
        """Return the arguments to sweep, of those that the function takes."""
        workers = {
            0,
            processors,
            *(1 << power for power in range(processors.bit_length())),
        }
        axes: dict[str, Sequence[Argument]] = {
            "num_workers": sorted(workers),
            "prefetch_factor": [2, 4],
            "in_order": [True, False],
        }
        if accelerator:
            axes["pin_memory"] = [False, True]
        return {
            name: values
            for name, values in axes.items()
            if name in takes or self.IS_DATALOADER
        }

    def simplified(self, arguments: Arguments) -> Arguments:
        """Return the arguments that matter: a single worker keeps the order, and no worker fetches ahead."""
        fixed: dict[str, Any] = {}
        if arguments.get("num_workers") == 0:
            fixed = _WITHOUT_WORKERS
        elif arguments.get("num_workers") == 1:
            fixed = {"in_order": True}
        return {name: fixed.get(name, value) for name, value in arguments.items()}

    def recognises(self, target: Target) -> bool:
        """Return True: any iterable of batches will do."""
        return True

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """Open what the function returns."""
        return IterableLoader(target, arguments, _call(target, arguments))


class TorchKind(IterableKind):
    """A DataLoader over a data set, with a dict of arguments, or the user's own: which, its call shows."""

    IS_DATALOADER = True
    ARGUMENTS = TORCH_TYPES

    def open(self, target: Target, arguments: Arguments) -> OpenLoader:
        """Open the DataLoader; any other iterable of batches is opened as such."""
        from torch.utils.data import DataLoader, IterableDataset

        made = _call(target, arguments)
        lengths = None
        maker = DataLoader
        if isinstance(made, DataLoader):
            given = _arguments_of(made)
            maker = type(made)
        elif isinstance(made, Mapping):
            given = dict(made)
            lengths = given.pop("lengths", None)
        elif isinstance(made, (list, tuple, str)) or _starts_workers(made):
            return IterableLoader(target, arguments, made)
        elif isinstance(made, IterableDataset):
            given = {"dataset": made, "batch_size": None}
        elif hasattr(made, "__getitem__"):
            given = {"dataset": made}
        else:
            return IterableLoader(target, arguments, made)
        if "dataset" not in given:
            raise LoaderError(
                f"the target returns a dict without `dataset`: {', '.join(map(str, given)) or 'it is empty'}",
                "Give it the arguments of torch's DataLoader, with the data set under `dataset`.",
            )
        if lengths is not None:
            given = _batched_by(_recommended(target, given, lengths), given)
        return TorchLoader(target, maker, given, arguments, lengths)


class IterableLoader(OpenLoader):
    """An iterable of batches. If it is an iterator, which ends once, the target is called again for each epoch."""

    kind = "iterable"

    def __init__(self, target: Target, arguments: Arguments, made: Any) -> None:
        if not hasattr(made, "__iter__") or isinstance(made, (str, bytes)):
            raise LoaderError(
                f"the target returns an object of type {type(made).__name__}: neither a data set nor an iterable",
                "Return a data set, a dict of DataLoader arguments, a DataLoader, or any iterable of batches.",
            )
        self._target = target
        self._arguments = arguments
        self._made = made
        self._used = False

    def epoch(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, on the device."""
        if self._used and isinstance(self._made, Iterator):
            self._made = _call(self._target, self._arguments)
        self._used = True
        # A variable, so that the traceback of an error keeps it.
        iterator = iter(self._made)
        for batch in iterator:
            ready = self._on_device(batch)
            del batch
            yield ready

    def _on_device(self, batch: Any) -> Any:
        """Return the batch on the device, ready; on the CPU it is left as it is."""
        if self._target.device == "cpu":
            return batch
        import torch

        batch = moved(
            batch,
            self._target.device,
            non_blocking=bool(self._arguments.get("pin_memory")),
        )
        torch.cuda.synchronize(self._target.device)
        return batch

    def facts(self, batch: Any) -> BatchFacts:
        """Return the facts of a batch, as its tensors show them."""
        return facts_of(batch)

    def batches(self) -> int | None:
        """Return the batches of an epoch, if the loader knows them."""
        try:
            return len(self._made)
        except Exception:  # not known; a data set's own __len__ may raise anything
            return None


class TorchLoader(IterableLoader):
    """A DataLoader. Of a map-style data set it is known which examples are in each batch."""

    kind = "torch"

    def __init__(
        self,
        target: Target,
        maker: Any,
        given: dict[str, Any],
        arguments: Arguments,
        lengths: Any,
    ) -> None:
        import numpy as np
        from torch.utils.data import DataLoader, IterableDataset

        # Arguments that the target takes are not the DataLoader's, unless both have them.
        swept = {
            name: value
            for name, value in arguments.items()
            if name not in target.takes or name in _DEFAULTS
        }
        # With a limit of its own, torch looks for dead workers only when that is over.
        given = given | {"timeout": 0} | swept
        plain = DataLoader(**given | _WITHOUT_WORKERS)
        if not given.get("num_workers"):
            given |= _WITHOUT_WORKERS
        self.dealt = not isinstance(plain.dataset, IterableDataset)
        self._sampler: _NotingSampler | None = None
        if self.dealt and plain.batch_sampler is not None:
            self._sampler = _NotingSampler(plain.batch_sampler)
            given = _batched_by(self._sampler, given)
        self.exact = lengths is not None
        self._lengths = np.asarray(lengths, dtype=np.float64)  # NaN without any
        try:
            loader = maker(**given)
        except TypeError as error:
            raise LoaderError(
                f"{maker.__name__} can't be made from the arguments of a DataLoader: {error}",
                "Check their names, or return a dict of arguments for torch's own DataLoader, with `dataset`.",
            ) from error
        super().__init__(target, {**arguments, "pin_memory": loader.pin_memory}, loader)

    def facts(self, batch: Any) -> BatchFacts:
        """Return the facts of a batch; with `lengths`, exactly."""
        if self._sampler is None:
            return facts_of(batch)
        indices = self._sampler.delivered()
        facts = facts_of(batch, len(indices))
        if not self.exact:
            return facts
        lengths = self._lengths[indices]
        return replace(
            facts,
            examples=len(indices),
            total_length=float(lengths.sum()),
            length=float(lengths.max()),
        )

    def batches(self) -> int | None:
        """Return the batches of an epoch; None for workers of an iterable data set, which don't know of each other."""
        if self._made.num_workers and not self.dealt:
            return None
        return super().batches()


class _NotingSampler:
    """A batch sampler that notes the indices of the batches that were requested and not delivered yet."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._requested: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._requested.clear()
        for indices in self._sampler:
            self._requested.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def delivered(self) -> Any:
        """Return the indices of the next batch: in the order of requests, if workers keep it."""
        return self._requested.popleft()


def _call(target: Target, arguments: Arguments) -> Any:
    """Call the target with these arguments; where it needs one that is not set, with the default of torch."""
    defaults = {
        name: value for name, value in _DEFAULTS.items() if name in target.needs
    }
    return target.call({**defaults, **arguments})


def _arguments_of(loader: Any) -> dict[str, Any]:
    """Return the arguments that a DataLoader was made with."""
    given = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    # Of an IterableDataset.
    if type(loader.sampler).__name__ == "_InfiniteConstantSampler":
        return given | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return given | {"batch_sampler": loader.batch_sampler}
    return given | {"sampler": loader.sampler, "batch_size": None}


def _batched_by(sampler: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader with this sampler of batches in place of how it batches otherwise."""
    others = {name: value for name, value in given.items() if name not in _BATCHING}
    return {**others, "batch_sampler": sampler}


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
        raise LoaderError(
            f"the target's `lengths` do not fit {target.config}: {error}"
        ) from error


def _starts_workers(pipeline: Any) -> bool:
    """Return whether a pipeline of WebDataset begins with a DataLoader, as a WebLoader does."""
    from torch.utils.data import DataLoader

    stages = getattr(pipeline, "pipeline", None)
    return isinstance(stages, list) and any(
        isinstance(stage, DataLoader) for stage in stages
    )
