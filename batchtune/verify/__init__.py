"""Runs the recommended batches for real."""
