"""Chooses buckets: strategies, optimal tables, the sweep, the recommendation, drift."""
