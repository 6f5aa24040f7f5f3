"""Manifests: a source of lengths → `Lengths`.

A format is one class in a module of `batchtune.manifests.inputs` and one line in its registry. It
passes on raw values and their places; finding the column, converting, checking, scaling, filtering
and counting are done here, once.
"""

from __future__ import annotations

from batchtune.lengths import StreamLengths
from batchtune.manifests.inputs import FORMATS, ReadOptions, parse_scale
from batchtune.manifests.reading import load_lengths, load_stream, scan

__all__ = [
    "FORMATS",
    "ReadOptions",
    "StreamLengths",
    "load_lengths",
    "load_stream",
    "parse_scale",
    "scan",
]
