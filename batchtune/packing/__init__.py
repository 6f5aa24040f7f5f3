"""Token budgets: sequences packed into micro-batches of at most `max_tokens`, and dealt to ranks by their time."""

from __future__ import annotations

from batchtune.packing.packing import TimeLaw, pack

__all__ = ["TimeLaw", "pack"]
