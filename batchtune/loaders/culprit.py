"""Finds what in a DataLoader is to blame for an error: an example, a batch, or what can't be pickled."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from batchtune.errors import listed
from batchtune.loaders.failures import WorkerDied

_SECONDS = 10.0


def culprit(loader: Any, error: BaseException, batches: Sequence[Any], *, apart: bool) -> str | None:
    """Return which example of the batches raises the error or ends its process, or else which together.

    They are tried one by one; if `apart`, in a process of their own, which they may end or block.
    """
    tried: deque[str | None] = deque([None], maxlen=1)
    deadline = time.monotonic() + _SECONDS
    if not apart:
        _try(loader, error, batches, deadline, tried.append)
        return tried[0]
    receiving, sending = multiprocessing.Pipe(duplex=False)
    asked = (loader, error, batches, deadline, sending.send)
    trial = multiprocessing.get_context("fork").Process(target=_try, args=asked, daemon=True)
    trial.start()
    sending.close()
    with contextlib.suppress(EOFError):
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            tried.append(receiving.recv())
        tried.append(None)
    trial.kill()
    return tried[0]


def _try(
    loader: Any, error: BaseException, batches: Sequence[Any], deadline: float, tell: Callable[[str | None], None]
) -> None:
    """Try each example, then each batch, up to the one to blame; before each, tell what to say if it is the one."""
    dataset, died = loader.dataset, isinstance(error, WorkerDied)
    does = "ends it" if died else "raises it"

    def raises(function: Callable[[Any], Any], value: Any, made: list[Any]) -> bool:
        try:
            made.append(function(value))
        except (Exception, SystemExit) as found:
            return isinstance(found, SystemExit) if died else type(found).__name__ in f"{type(error).__name__} {error}"
        return False

    def fetch(index: Any) -> Any:
        return dataset.__getitems__([index])[0] if hasattr(dataset, "__getitems__") else dataset[index]

    for indices in batches:
        examples: list[Any] = []
        for index in indices:
            if time.monotonic() > deadline:
                return tell(None)
            tell(f"item {index} of the data set {does}")
            if raises(fetch, index, examples):
                return None
        if len(examples) == len(indices):
            tell(f"collate_fn {does} for the items {listed(indices, 5)}")
            if raises(loader.collate_fn, examples, []):
                return None
    return tell(None)


def unpicklable(loader: Any) -> str | None:
    """Return what workers that are not forked can't be sent."""
    from multiprocessing.reduction import ForkingPickler

    def fails(value: Any) -> bool:
        try:
            ForkingPickler.dumps(value)
        except Exception:
            return True
        return False

    for name in ("dataset", "collate_fn", "worker_init_fn"):
        value = getattr(loader, name)
        if fails(value):
            inner = [key for key, one in getattr(value, "__dict__", {}).items() if fails(one)]
            return f"`{'.'.join([name, *inner[:1]])}` can't be pickled"
    return None
