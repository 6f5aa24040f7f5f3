"""Batches of a stream: the ways to make them, their simulation, the sweep."""
