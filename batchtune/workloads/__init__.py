"""Training steps to measure: the protocol, the built-in workloads, and the loading of a user's own.

Importing this package does not import torch: a workload's module is imported where the workload is built,
which is the worker process.
"""

from __future__ import annotations

from batchtune.workloads.loading import load_workload
from batchtune.workloads.registry import (
    BUILTINS,
    Workload,
    default_workload,
    is_builtin,
    parse_options,
    with_unit,
)

__all__ = [
    "BUILTINS",
    "Workload",
    "default_workload",
    "is_builtin",
    "load_workload",
    "parse_options",
    "with_unit",
]
