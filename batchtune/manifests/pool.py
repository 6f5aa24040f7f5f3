"""Other processes that read along: for many sources at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import TypeVar

_LONGEST_WAIT_SECONDS = 1.0

T = TypeVar("T")
R = TypeVar("R")


class WorkerLost(Exception):
    """A process that worked alone was killed.

    Args:
        index: Of the task that it had.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def in_any_order(
    work: Callable[[T], R],
    tasks: Sequence[T],
    jobs: int,
    on_lost: Callable[[int], None] = lambda jobs: None,
    on_wait: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, R], None, None]:
    """Does each task, by other processes where there are several jobs, and hands out index and result as they come.

    The processes end with this one, however it ends, and at once where this is closed or interrupted. They are new
    interpreters, not forks: a fork of a process with threads can hang.

    Args:
        work: Of a module's top level.
        tasks: Picklable, as are the results.
        jobs: How many processes; 1 for none but this one.
        on_lost: Called where a process was killed from outside, with the number of processes that go on: half as
            many, as the kernel kills what takes too much memory.
        on_wait: Called every second while none is done.

    Raises:
        WorkerLost: A process was killed although it was the only one.
    """
    if jobs <= 1 or len(tasks) <= 1:
        yield from ((index, work(task)) for index, task in enumerate(tasks))
        return
    left = dict(enumerate(tasks))
    jobs = min(jobs, len(tasks))
    while left:
        try:
            yield from _by_others(work, left, jobs, on_wait)
        except BrokenProcessPool:
            if jobs == 1:
                raise WorkerLost(min(left)) from None  # one process takes them in this order
            jobs //= 2
            on_lost(jobs)


def _by_others(
    work: Callable[[T], R], left: dict[int, T], jobs: int, on_wait: Callable[[], None]
) -> Iterator[tuple[int, R]]:
    """Does tasks by other processes, and takes those that are done out of `left`. Raises BrokenProcessPool."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    others = set(multiprocessing.active_children())
    workers: set[BaseProcess] = set()
    try:
        with _without_interrupts():
            futures = {pool.submit(work, task): index for index, task in left.items()}
            workers = set(multiprocessing.active_children()) - others
        while futures:
            done, _ = wait(futures, _LONGEST_WAIT_SECONDS, FIRST_COMPLETED)
            if not done:
                on_wait()
            for future in done:
                index, result = futures.pop(future), future.result()
                del left[index]
                yield index, result
    except BaseException:
        for worker in workers:  # nobody waits for what they are doing
            worker.kill()
        raise
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
