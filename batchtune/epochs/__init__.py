"""The batches of an epoch and what they cost: tables, their layout, models of memory and step time, rows of a sweep."""
