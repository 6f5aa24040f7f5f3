"""A user's current batching settings, for a sweep to compare with its own tables or ways to batch a stream.

To add a kind: a module with a `TableKind`, and a line in `TABLES` of `reading.py`.
"""

from batchtune.tuning.current.base import Current, CurrentTable
from batchtune.tuning.current.reading import read_current
from batchtune.tuning.current.stream import CurrentStream, stream_current

__all__ = ["Current", "CurrentStream", "CurrentTable", "read_current", "stream_current"]
