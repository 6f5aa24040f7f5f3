"""Other processes that read along: for many sources at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_any_order(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[tuple[int, R]]:
    """Does each task, by other processes where there are several jobs, and hands out index and result as they come.

    The processes end with this one, however it ends. They are new interpreters, not forks: a fork of a process
    with threads can hang.

    Args:
        work: Of a module's top level.
        tasks: Picklable, as are the results.
        jobs: How many processes; 1 for none but this one.
    """
    if jobs <= 1 or len(tasks) <= 1:
        yield from ((index, work(task)) for index, task in enumerate(tasks))
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    try:
        with _without_interrupts():
            futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Puts Ctrl-C off, also for the processes that are started in the meantime: they have nothing to say to it.

    They inherit the mask. In this process another thread, of a numerical library, may take the signal all the same, and
    Python then handles it in the main thread.
    """
    arrived: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number)) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if arrived:
        raise KeyboardInterrupt


def _begin() -> None:
    """What a process does first: it leaves Ctrl-C to its parent, and dies with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # where there is no such call
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
