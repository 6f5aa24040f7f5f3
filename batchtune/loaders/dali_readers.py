"""Counts the examples that readers of DALI's dynamic mode repeat, while a loader runs."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

# The place of `capture` among the arguments of `next_epoch`.
_CAPTURE = 2


class _OfThread(threading.local):
    """Reader → the examples read in this thread since the last batch, and how many of them do not count."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[int, int]] = {}
        self.captured = False


class ReaderWatch:
    """Counts the examples of readers' batches that belong to no epoch, or to the next one.

    `next_epoch(batch_size=B)` yields ceil(size of the shard / B) batches, all of B examples. Only the reader knows the
    size (`get_metadata`), and only the user's function holds the reader; so this wraps `next_epoch` until `close`.
    """

    def __init__(self, ndd: Any) -> None:
        self._local = _OfThread()
        # Each reader's metadata, which a captured one gives in its first epoch only, and the epochs it ended.
        self._metadata: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._class = _class_with(ndd, "next_epoch")
        if self._class is None:
            return
        original = self._original = self._class.next_epoch

        @functools.wraps(original)
        def next_epoch(reader: Any, *args: Any, **kwargs: Any) -> Any:
            batches = original(reader, *args, **kwargs)
            if kwargs.get("capture") or len(args) > _CAPTURE:
                self._local.captured = True
            return self._watched(reader, batches)

        self._class.next_epoch = self._wrapper = next_epoch

    def close(self) -> None:
        """Leave DALI as it was."""
        if self._class is not None and self._class.next_epoch is self._wrapper:
            self._class.next_epoch = self._original

    @property
    def captured(self) -> bool:
        """Whether a reader in this thread captures a pipeline: it is lost when an epoch is broken off."""
        return self._local.captured

    def forget(self) -> None:
        """Forget what was read in this thread."""
        self._local.read.clear()

    def surplus(self, examples: int | None) -> int:
        """Return how many examples of a batch, just made in this thread, do not count, and forget what was read.

        It is known if a reader's batches since the last one hold as many examples; else 0.
        """
        surplus = max((extra for number, extra in self._local.read.values() if number == examples), default=0)
        self.forget()
        return surplus

    def _watched(self, reader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        left: int | None = None
        with contextlib.closing(batches):  # type: ignore[type-var]
            for outputs in batches:
                size = _batch_size(outputs)
                if size is not None:
                    left = (self._epoch_size(reader, size) if left is None else left) - size
                    number, surplus = self._local.read.get(id(reader), (0, 0))
                    self._local.read[id(reader)] = (number + size, surplus + min(size, max(0, -left)))
                yield outputs
        self._epochs[reader] = self._epochs.get(reader, 0) + 1

    def _epoch_size(self, reader: Any, batch_size: int) -> int:
        """Return the number of examples in the shard that this epoch reads, without those that pad it."""
        if reader not in self._metadata:
            self._metadata[reader] = reader.get_metadata(batch_size)
        metadata = self._metadata[reader]
        size = metadata["epoch_size"]
        shards = metadata["number_of_shards"]
        shard = metadata["shard_id"]
        if not metadata["stick_to_shard"]:
            shard = (shard + self._epochs.get(reader, 0)) % shards
        return int((shard + 1) * size // shards - shard * size // shards)


def _class_with(ndd: Any, method: str) -> Any:
    """Return the most basic of the classes that readers inherit a method from; None: it is of none."""
    return next((base for base in reversed(ndd.readers.File.__mro__) if method in vars(base)), None)


def _batch_size(outputs: Any) -> int | None:
    """Return how many examples a reader yielded; None for a single one."""
    first = next(iter(outputs.values() if isinstance(outputs, dict) else outputs), None)
    size = getattr(first, "batch_size", None)
    return size if isinstance(size, int) else None
