"""Token budgets: sequences packed into micro-batches of at most `max_tokens`, and dealt to ranks by their time."""

from __future__ import annotations

from batchtune.packing.packing import pack
from batchtune.packing.time_law import TimeLaw

__all__ = ["TimeLaw", "pack"]
