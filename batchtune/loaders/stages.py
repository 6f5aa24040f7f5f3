"""Measures the stages of making a batch apart, in one process: reading, decoding, the user's functions, collating."""

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

# Stages of WebDataset: up to the last of these, a pipeline reads shards.
_READS = {"tar_file_expander", "tarfile_samples", "group_by_keys", "check_empty", "StreamingOpen", "FileCache"}
_SHUFFLES = {"shuffle", "detshuffle"}
_MAPS = {"map", "map_dict", "map_tuple", "select", "associate"}
# Too cheap for a line of their own.
_PLUMBING = {"to_tuple", "rename", "rename_keys", "extract_keys", "slice", "islice", "log_keys", "info", "rsample"}
_WARM_UP = 0.2  # of the time
_READING = "reading"


@dataclass(slots=True, kw_only=True)
class _Stage:
    """One stage, and what it took so far.

    Attributes:
        name: As in LoaderStage; empty: its time is not that of a worker.
        run: Takes the iterator of the stage before; returns its own.
        steady: Whether in the long run it yields as many items as it takes, though not while its buffer fills.
        seconds: Inside its iterator, the stages before included.
        items: How many it yielded.
        warm_up: `seconds` and `items` at the end of the warm-up.
    """

    name: str
    run: Callable[[Iterator[Any]], Iterable[Any]]
    steady: bool = False
    seconds: float = 0.0
    items: int = 0
    warm_up: tuple[float, int] = (0.0, 0)

    def measured(self, *, with_warm_up: bool) -> tuple[float, int]:
        """Return its seconds and items, those of the warm-up included or not."""
        if with_warm_up:
            return self.seconds, self.items
        return self.seconds - self.warm_up[0], self.items - self.warm_up[1]


def measure_stages(loader: Any, seconds: float) -> list[LoaderStage]:
    """Measure each stage's own time, in this process, as a worker of torch's DataLoader runs it: with one thread.

    `loader` is a DataLoader, a WebDataset pipeline or any iterable of batches; it stays as it is. Whole epochs are
    measured after a first one; of an epoch that takes longer than `seconds`, the part after a warm-up of a fifth of
    that. It takes up to twice as long where that ends an epoch.

    Returns:
        The stages in their order; the shares sum to 1.

    Raises:
        LoaderError: A stage raised an error, and the message names it; or no batch came.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stages = _stages_of(loader)
        examples = _run(stages, seconds)
    finally:
        torch.set_num_threads(threads)
    return _own_times(stages, examples)


# Finding the stages


def _stages_of(loader: Any) -> list[_Stage]:
    """Return the stages of a DataLoader or of an iterable."""
    from torch.utils.data import DataLoader

    if isinstance(loader, DataLoader):
        return _loader_stages(loader)
    return _iterable_stages(loader)


def _loader_stages(loader: Any) -> list[_Stage]:
    """Return the stages of a DataLoader: those of its dataset, then collating."""
    from torch.utils.data import IterableDataset, default_convert

    dataset = loader.dataset
    collate = loader.collate_fn
    indices = loader.batch_sampler
    each: Callable[..., Iterable[Any]] = map
    if isinstance(dataset, IterableDataset):
        stages = _iterable_stages(dataset)
        if loader.batch_size is not None:
            each = functools.partial(_collated, size=loader.batch_size, whole=loader.drop_last)
    else:
        fetch = functools.partial(_fetched, dataset)
        if indices is None:
            fetch = dataset.__getitem__
            indices = loader.sampler
        name = f"{type(_innermost(dataset)).__name__}.__getitem__"
        stages = [
            _Stage(name="", run=lambda _: indices),
            _Stage(name=name, run=functools.partial(map, fetch)),
        ]
    if collate is not default_convert:
        stages.append(_Stage(name=_collating(collate), run=functools.partial(each, collate)))
    return stages


def _fetched(dataset: Any, indices: list[int]) -> Any:
    """As torch's DataLoader does."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _collated(collate: Callable[[Any], Any], examples: Iterator[Any], *, size: int, whole: bool) -> Iterator[Any]:
    """Batch the examples of an iterable dataset as torch's DataLoader does."""
    while batch := list(itertools.islice(examples, size)):
        if whole and len(batch) < size:
            return
        yield collate(batch)


def _innermost(dataset: Any) -> Any:
    """Return the user's dataset under torch's wrappers, such as Subset."""
    while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def _iterable_stages(dataset: Any) -> list[_Stage]:
    """Return the stages of a WebDataset pipeline; of any other iterable, the one that it is."""
    from torch.utils.data import DataLoader

    pipeline = getattr(sys.modules.get("webdataset"), "DataPipeline", None)
    if pipeline is None or not isinstance(dataset, pipeline) or type(dataset).__iter__ is not pipeline.__iter__:
        return [_Stage(name=f"{type(dataset).__name__}.__iter__", run=lambda _: dataset)]
    first, *others = dataset.pipeline
    if isinstance(first, (pipeline, DataLoader)):
        stages = _stages_of(first)
    else:
        stages = [_Stage(name=_READING, run=lambda _: dataset.invoke(copy.copy(first)))]
    names = [_stage_name(stage) for stage in others]
    reads = max((number for number, name in enumerate(names) if name in _READS), default=-1)
    for number, (stage, name) in enumerate(zip(others, names, strict=True)):
        if number <= reads:
            name = _READING
        elif name in _PLUMBING:
            name = stages[-1].name
        # A copy: some count the epochs that they ran.
        run = functools.partial(dataset.invoke, copy.copy(stage))
        stages.append(_Stage(name=name, run=run, steady=name in _SHUFFLES))
    return stages


# Naming them


def _stage_name(stage: Any) -> str:
    """Name a stage of a WebDataset pipeline: by what it does, or by the user's function."""
    function = getattr(stage, "f", None)
    if function is None or not hasattr(stage, "kw"):  # not one of WebDataset's filters
        return _function_name(stage)
    kind = _function_name(function).lstrip("_")
    given = [*stage.args, *(value for name, value in stage.kw.items() if name != "handler")]
    functions = [value for value in given if callable(value)]
    if kind in ("decode", "xdecode") or any(type(value).__name__ == "Decoder" for value in functions):
        return "decode"
    if kind == "batched":
        if functions:
            return _collating(functions[0])
        return "batched" if None in given else "collate"
    if kind in _MAPS and functions:
        return ", ".join(dict.fromkeys(map(_function_name, functions)))
    return kind


def _collating(function: Any) -> str:
    name = _function_name(function)
    return "collate" if name.startswith("default_") else f"collate ({name})"


def _function_name(function: Any) -> str:
    """`log_mel`; `lambda at train.py:12`; for an object that can be called, its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return type(function).__name__
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name


# Measuring them


def _run(stages: list[_Stage], seconds: float) -> int:
    """Take batches through the stages, and return how many examples came after the warm-up."""
    started = time.perf_counter()
    warm = False
    examples = 0
    for epoch in itertools.count():
        chain: Iterator[Any] = iter(())
        for stage in stages:
            chain = _timed(stage, chain)
        batch = None
        for batch in chain:
            examples += facts_of(batch).examples or 1
            elapsed = time.perf_counter() - started
            if not epoch and not warm and elapsed >= _WARM_UP * seconds:
                warm = True
                examples = 0
                _end_warm_up(stages)
            elif not epoch and warm and elapsed >= seconds:
                return examples
        if batch is None:
            raise LoaderError("the loader delivered no batch, so its stages can't be measured")
        if not epoch:
            examples = 0
            _end_warm_up(stages)
        elif time.perf_counter() - started >= seconds:
            return examples
    raise AssertionError("unreachable")


def _end_warm_up(stages: list[_Stage]) -> None:
    for stage in stages:
        stage.warm_up = (stage.seconds, stage.items)


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
        stage.items += 1
        yield item


def _own_times(stages: list[_Stage], examples: int) -> list[LoaderStage]:
    """Return each stage's own time per example, neighbours of one name joined."""
    totals: list[tuple[str, float]] = []
    passes = float(stages[-1].items - stages[-1].warm_up[1])
    before_first = _Stage(name="", run=iter)
    for before, stage in reversed(list(itertools.pairwise([before_first, *stages]))):
        # While a large buffer is emptied, the stages that filled it rest: the warm-up is all there is of them.
        rested = stage.items == stage.warm_up[1]
        seconds, items = stage.measured(with_warm_up=rested)
        seconds_before, items_before = before.measured(with_warm_up=rested)
        stage_seconds = max(0.0, seconds - seconds_before) / max(items, 1) * passes
        if not stage.steady:
            passes *= items_before / max(items, 1)
        if totals and totals[-1][0] == stage.name:
            stage_seconds += totals.pop()[1]
        totals.append((stage.name, stage_seconds))
    named = [(name, seconds) for name, seconds in reversed(totals) if name]
    whole = sum(seconds for _, seconds in named)
    return [
        LoaderStage(name=name, seconds_per_example=seconds / examples, share=seconds / whole) for name, seconds in named
    ]
