"""Puts the measured costs and the bucket tables together: sweep, recommend, verify."""
