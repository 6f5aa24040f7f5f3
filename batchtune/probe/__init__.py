"""Measures batch shapes on a device, in a worker process, and finds the frontier."""
