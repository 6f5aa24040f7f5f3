"""A user's current batching settings, for a sweep to show beside its own tables.

To add a kind: a module with a `SettingsKind`, and a line in `KINDS` of `reading.py`.
"""

from batchtune.tuning.current.base import Current, CurrentTable
from batchtune.tuning.current.reading import read_current

__all__ = ["Current", "CurrentTable", "read_current"]
