"""Results with other numbers than the made ones, and pages of what a run holds."""

from msgspec.structs import replace

from batchtune.reports import RunResults
from batchtune.reports.page import build_page


def with_row(result, place=None, **changes):
    """The result of a sweep or a tuning with other numbers in a row: the recommended one, or the one in this place."""
    place = result.recommended if place is None else place
    rows = list(result.rows)
    rows[place] = replace(rows[place], **changes)
    return replace(result, rows=rows)


def with_rows(result, **changes):
    """The same with other numbers in all rows."""
    return replace(result, rows=[replace(row, **changes) for row in result.rows])


def run_of(**records):
    """A run with these records."""
    return RunResults(name="run", **records)


def page_of(**records):
    """The page of a run with these records."""
    return build_page(run_of(**records))
