"""The batches of an epoch and what they cost: bucket tables, their layout, models of memory and step time."""
