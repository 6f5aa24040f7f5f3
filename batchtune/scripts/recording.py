"""The mode `record` of an unchanged script: the batches of its training loaders pass through a `Recorder`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any


def wrap(
    loader: Any, begin: Callable[[], Iterator[Any]], options: Mapping[str, Any]
) -> Iterator[Any]:
    """Return a training loader's iterator, whose batches are recorded.

    `options["recorder"]` are the arguments of `Recorder`. If the file can't be written, the training goes on without.
    """
    try:
        recorder = recorder_of(**options["recorder"])
        recorder.tuned = options.get("mode") == "run"
        recorder.begin()
    except Exception as error:
        print(f"Warning: batchtune records nothing: {error}", file=sys.stderr)
        return begin()
    return Recorded(begin(), recorder)


class Recorded(Iterator[Any]):
    """A loader's iterator whose batches are recorded, with the attributes that its loader asks it for."""

    def __init__(self, own: Iterator[Any], recorder: Any) -> None:
        self._own = own
        self._batches = recorder.watched(own)

    def __next__(self) -> Any:
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@cache
def recorder_of(**options: Any) -> Any:
    """Return this process's recorder."""
    from batchtune.scripts.recorder import Recorder

    return Recorder(**options)
