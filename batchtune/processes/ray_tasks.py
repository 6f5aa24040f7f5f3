"""Independent tasks on a Ray cluster, with the contract of the process pool in `processes.pool`."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from batchtune.errors import BatchtuneError, UsageError, shortened
from batchtune.processes.pool import ResultT, TaskT

# How often a task is done again whose worker, or machine, died.
_RETRIES = 3
_LONGEST_WAIT_SECONDS = 0.5
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
