"""Results with other numbers than the made ones."""

from msgspec.structs import replace


def with_row(result, place=None, **changes):
    """The result of a sweep or a tuning with other numbers in a row: the recommended one, or the one in this place."""
    place = result.recommended if place is None else place
    rows = list(result.rows)
    rows[place] = replace(rows[place], **changes)
    return replace(result, rows=rows)
