"""`batchtune schema`."""

from __future__ import annotations

EXAMPLE = "Example:  batchtune schema sweep"


def schema() -> None:
    """Print the JSON Schema of a result file."""
