"""A user's current batching settings, for a sweep to show beside its own tables."""

from batchtune.tuning.current.reading import current_table, read_current
from batchtune.tuning.current.records import Current, CurrentTable, Kind

__all__ = ["Current", "CurrentTable", "Kind", "current_table", "read_current"]
