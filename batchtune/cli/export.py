"""`batchtune export`."""

from __future__ import annotations

EXAMPLE = "Example:  batchtune export --to speechbrain"


def export() -> None:
    """Write the recommendation in another framework's words."""
