"""Lengths of audio and array files, from their headers alone: nothing is decoded, unpickled or evaluated."""

from __future__ import annotations

from batchtune.manifests.headers.arrays import ARRAY_SUFFIXES, array_shape
from batchtune.manifests.headers.audio import AUDIO_SUFFIXES, audio_length
from batchtune.manifests.headers.payload import AudioLength, BytesPayload, FilePayload, HeaderError, Payload

__all__ = [
    "ARRAY_SUFFIXES",
    "AUDIO_SUFFIXES",
    "AudioLength",
    "BytesPayload",
    "FilePayload",
    "HeaderError",
    "Payload",
    "array_shape",
    "audio_length",
]
