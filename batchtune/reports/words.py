"""Small matters of language."""

from __future__ import annotations


def with_full_stop(text: str) -> str:
    """A sentence from a result file, where sentences have none."""
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
