"""Measures the stages of making a batch apart, in one process: reading, the user's functions, collating."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.errors import LoaderError
from batchtune.loaders.batches import facts_of
from batchtune.results import LoaderStage
from batchtune.workloads.loading import first_line, user_traceback

_Run = Callable[[Iterator[Any]], Iterable[Any]]


@dataclass(slots=True)
class _Stage:
    """One stage: `run` takes the iterator of the stage before and returns its own, in which it spent `seconds`.

    The stages before are included; without a name, its time is not that of a worker.
    """

    name: str
    run: _Run
    seconds: float = 0.0


def measure_stages(loader: Any, seconds: float) -> list[LoaderStage]:
    """Measure each stage's own time, in this process, which has one thread from now on, as a DataLoader's worker has.

    `loader` is a DataLoader, a WebDataset pipeline or any iterable of batches; it stays as it is. Epochs are run for at
    least `seconds`, the last one in part.

    Returns:
        The stages in their order, neighbours of one name joined; the shares sum to 1.

    Raises:
        LoaderError: A stage raised an error, and the message names it; or no batch came.
    """
    import torch

    torch.set_num_threads(1)
    stages = _stages_of(loader)
    examples = _run(stages, seconds)
    own_seconds: dict[str, float] = {}
    seconds_before = 0.0
    for stage in stages:
        own_seconds[stage.name] = own_seconds.get(stage.name, 0.0) + max(
            0.0, stage.seconds - seconds_before
        )
        seconds_before = stage.seconds
    own_seconds.pop("", None)
    total = sum(own_seconds.values())
    return [
        LoaderStage(
            name=name, seconds_per_example=spent / examples, share=spent / total
        )
        for name, spent in own_seconds.items()
    ]


def _stages_of(loader: Any) -> list[_Stage]:
    """Return the stages of a DataLoader (its data set's, then collating), a WebDataset pipeline or an iterable."""
    from torch.utils.data import DataLoader, IterableDataset, default_convert

    if not isinstance(loader, DataLoader):
        return _iterable_stages(loader)
    dataset = loader.dataset
    indices = loader.batch_sampler
    collate: _Run = functools.partial(map, loader.collate_fn)
    if isinstance(dataset, IterableDataset):
        stages = _iterable_stages(dataset)
        if loader.batch_size is not None:
            collate = functools.partial(_collated, loader)
    else:
        fetch: Callable[..., Any] = functools.partial(_fetched, dataset)
        if indices is None:
            fetch = dataset.__getitem__
            indices = loader.sampler
        stages = [
            _Stage("", lambda _: indices),
            _Stage(
                f"{type(dataset).__name__}.__getitem__", functools.partial(map, fetch)
            ),
        ]
    if loader.collate_fn is not default_convert:
        stages.append(_Stage(f"collate ({_function_name(loader.collate_fn)})", collate))
    return stages


def _fetched(dataset: Any, indices: list[int]) -> Any:
    """Fetch examples as torch's DataLoader does."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _collated(loader: Any, examples: Iterator[Any]) -> Iterator[Any]:
    """Batch the examples of an iterable data set as torch's DataLoader does."""
    while batch := list(itertools.islice(examples, loader.batch_size)):
        if loader.drop_last and len(batch) < loader.batch_size:
            return
        yield loader.collate_fn(batch)


def _iterable_stages(dataset: Any) -> list[_Stage]:
    """Return the stages of a WebDataset pipeline, each by its function's name; of any other iterable, itself."""
    pipeline = getattr(sys.modules.get("webdataset"), "DataPipeline", None)
    if pipeline is None or not isinstance(dataset, pipeline):
        return [_Stage(f"{type(dataset).__name__}.__iter__", lambda _: dataset)]
    first, *others = dataset.pipeline
    # Copies: some count the epochs that they ran.
    stages = [_Stage(_stage_name(first), lambda _: dataset.invoke(copy.copy(first)))]
    stages += [
        _Stage(_stage_name(stage), functools.partial(dataset.invoke, copy.copy(stage)))
        for stage in others
    ]
    return stages


def _stage_name(stage: Any) -> str:
    """Name a stage of a WebDataset pipeline by the user's functions, or else by what it does."""
    options = [
        value for name, value in getattr(stage, "kw", {}).items() if name != "handler"
    ]
    functions = filter(callable, [*getattr(stage, "args", ()), *options])
    users = ", ".join(map(_function_name, functions))
    return users or _function_name(getattr(stage, "f", stage)).lstrip("_")


def _function_name(function: Any) -> str:
    """Return `log_mel`; `lambda at train.py:12`; for an object that can be called, its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return str(name)


def _run(stages: list[_Stage], seconds: float) -> int:
    """Take batches through the stages for this long, and return how many examples came."""
    ending = time.perf_counter() + seconds
    examples = 0
    while time.perf_counter() < ending:
        before = examples
        batches: Iterator[Any] = iter(())
        for stage in stages:
            batches = _timed(stage, batches)
        for batch in batches:
            examples += facts_of(batch).examples or 1
            if time.perf_counter() >= ending:
                break
        if examples == before:
            raise LoaderError(
                "the loader delivered no batch, so its stages can't be measured"
            )
    return examples


def _timed(stage: _Stage, before: Iterator[Any]) -> Iterator[Any]:
    """Yield what a stage makes of what the stage before yields."""
    source: Iterator[Any] | None = None
    while True:
        start = time.perf_counter()
        try:
            if source is None:
                source = iter(stage.run(before))
            item = next(source)
        except StopIteration:
            return
        except LoaderError:  # of a stage before
            raise
        except Exception as error:
            message = f"stage {stage.name or 'batch_sampler'}: {first_line(error)}"
            raise LoaderError(message, traceback=user_traceback(error)) from error
        finally:
            stage.seconds += time.perf_counter() - start
        yield item
