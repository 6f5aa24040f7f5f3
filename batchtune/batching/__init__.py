"""Lengths → batches: the bucket table, the strategies that choose it, and what an epoch with it costs."""
