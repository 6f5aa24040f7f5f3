"""The limits of the worker's process that the workload must leave alone, because they look like a lack of memory."""

from __future__ import annotations

import resource

from batchtune.units import format_size

_NAMES = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_CPU")


def process_limits() -> dict[str, int]:
    """Return the soft limits by name, those that are not set left out."""
    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name in _NAMES}
    return {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}


def lowered_limit(before: dict[str, int]) -> str | None:
    """Return a message that names a limit lower than `before`; None if there is none.

    The limit is lifted again as far as possible: below it, the worker might lack the memory to answer.
    """
    for name, limit in process_limits().items():
        if name not in before or limit < before[name]:
            _lift(name)
            value = format_size(limit) if name in ("RLIMIT_AS", "RLIMIT_DATA") else f"{limit:,}"
            return (
                f"the workload lowers the limit {name} of its process to {value}: the probe would measure that instead "
                "of memory. Take resource.setrlimit out of it, and give the limit with --memory"
            )
    return None


def _lift(name: str) -> None:
    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (hard, hard))
