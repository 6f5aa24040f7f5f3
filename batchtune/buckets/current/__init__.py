"""A user's current batching settings, for a sweep to compare with its own tables.

To add a kind: a module with a `TableKind`, and a line in `TABLES` of `reading.py`.
"""

from batchtune.buckets.current.base import Current, CurrentTable
from batchtune.buckets.current.reading import read_current

__all__ = ["Current", "CurrentTable", "read_current"]
