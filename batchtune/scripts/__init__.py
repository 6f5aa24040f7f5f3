"""Runs a training script unchanged: hands its loop batches to measure, records it, gives it the recommended batches."""
