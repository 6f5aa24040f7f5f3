"""New interpreters that share the work on independent tasks, and the memory of the machine that processes share."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from batchtune.errors import BatchtuneError, UsageError, shortened
from batchtune.processes import keep_out_the_working_folder

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_LONGEST_WAIT_SECONDS = 0.5


def run_in_processes(
    work: Callable[[TaskT], ResultT],
    tasks: Mapping[int, TaskT],
    jobs: int,
    take: Callable[[int, ResultT], None],
    on_wait: Callable[[], None],
) -> None:
    """Do the tasks in several new interpreters (a fork of a process with threads can hang).

    `take` gets key and result as they come; `on_wait` is called twice a second. Raises BrokenProcessPool if a process
    is killed from outside, as the kernel kills what takes too much memory.
    """
    keep_out_the_working_folder()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
    )
    try:
        with _without_interrupts():
            futures = {pool.submit(work, task): key for key, task in tasks.items()}
        while futures:
            # An interrupt in the midst of these would leave a lock of the pool taken: its end would never come.
            with _without_interrupts():
                done, _ = wait(futures, _LONGEST_WAIT_SECONDS, FIRST_COMPLETED)
                results = [(futures.pop(future), future.result()) for future in done]
            if not done:
                on_wait()
            for key, result in results:
                take(key, result)
    except BaseException:
        # Nobody waits for them.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put Ctrl-C off; processes that are started in the meantime inherit the mask, and leave it to this one.

    In this process another thread, of a numerical library, may still take the signal.
    """
    arrived: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = (
        signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
        if main
        else None
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
    if arrived:
        raise KeyboardInterrupt


def die_with_parent() -> None:
    """Let the kernel kill this process as soon as the thread that started it has ended (Linux)."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # not every platform has the call
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def available_memory() -> int:
    """Return how much more memory processes can take without swapping, in bytes."""
    import psutil

    return min(total_memory(), int(psutil.virtual_memory().available))


def allowed_memory() -> int:
    """Return how much memory a process that is started now may take, by the machine and by its own limits, in bytes."""
    import resource  # not on Windows

    allowed = available_memory()
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            allowed = min(allowed, limit)
    return allowed


def total_memory() -> int:
    """Return the memory of the machine, or of the container if that is less, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(limit).read_text()))
    return total


# Independent tasks on a Ray cluster, with the contract of the process pool in `processes.pool`.

# How often a task is done again whose worker, or machine, died.
_RETRIES = 3
_PATIENCE_SECONDS = 10.0


def run_on_ray(
    work: Callable[[TaskT], ResultT],
    tasks: Mapping[int, TaskT],
    take: Callable[[int, ResultT], None],
    on_wait: Callable[[], None],
    *,
    address: str | None,
) -> None:
    """Do the tasks on the Ray cluster at `address`, else on the one that Ray itself finds or starts on this machine.

    `take` gets key and result as they come; `on_wait` is called twice a second. A task whose worker dies is done again.

    Raises:
        BatchtuneError: Ray is not installed, or a task's worker died four times.
        UsageError: No cluster answers at the address.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise BatchtuneError(
            "--engine ray needs the package ray, which is missing",
            "Install it: pip install ray.",
        ) from None
    began = not ray.is_initialized()
    if began:
        _connect(ray, address)
    try:
        on_worker = ray.remote(num_cpus=1, max_retries=_RETRIES)(work)
        most_in_flight = 2 * int(ray.cluster_resources().get("CPU", 1)) + 2
        waiting = collections.deque(tasks)
        keys: dict[Any, int] = {}
        while waiting or keys:
            while waiting and len(keys) < most_in_flight:
                key = waiting.popleft()
                keys[on_worker.remote(tasks[key])] = key
            done, _ = ray.wait(list(keys), timeout=_LONGEST_WAIT_SECONDS)
            if not done:
                on_wait()
            for result in done:
                take(keys.pop(result), _result(ray, result))
    finally:
        if began:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster. Raises UsageError."""
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():
            # Ray itself goes on trying for minutes.
            socket.create_connection((host, int(port)), _PATIENCE_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = ""
        if address is not None:
            where = f" at {shortened(address)}"
        raise UsageError(
            f"no Ray cluster can be used{where}: {shortened(str(error), 200)}",
            "Check --ray-address; without it, the cluster that Ray finds is used, or one is started on this machine.",
        ) from None


def _result(ray: Any, result: Any) -> Any:
    """Return what a task returned; raise what it raised."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise BatchtuneError(
            f"a task failed on Ray {1 + _RETRIES} times: {shortened(str(error), 300)}",
            "Its worker most likely had too little memory. Then run the same command again: what was read is kept.",
        ) from None
