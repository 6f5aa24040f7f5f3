"""What torch.compile has done in this process, by the counters of `torch._dynamo`; nothing is imported for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

# "Dynamo recompile limit exceeded"; before torch 2.7 "recompile_limit reached" and "cache_size_limit reached".
_LIMIT = re.compile(r"(recompile|cache_size)[ _]limit")


def compilations() -> int:
    """Return how many times torch.compile has compiled a function in this process, or tried to."""
    return int(_counters().get("frames", {}).get("total", 0))


def at_recompile_limit() -> bool:
    """Return whether some function reached torch's limit of compiled versions: other shapes run it uncompiled."""
    return any(_LIMIT.search(reason) for reason in _counters().get("unimplemented", {}))


def _counters() -> Mapping[str, Mapping[str, Any]]:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "counters", {})
