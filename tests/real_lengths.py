"""The lengths of real data sets that are part of the tests: see data/README.md."""

from pathlib import Path

import numpy as np

LIBRISPEECH = Path(__file__).parent / "data" / "librispeech-train-clean-100.tsv.gz"
COMMON_VOICE = Path(__file__).parent / "data" / "common-voice-id.tsv.gz"
RATE = 16_000


def librispeech_samples():
    """The lengths of LibriSpeech in samples, in the order of its manifest."""
    return np.loadtxt(
        LIBRISPEECH, skiprows=1, delimiter="\t", usecols=1, dtype=np.int64
    )


def librispeech_seconds():
    """The same in seconds."""
    return librispeech_samples() / RATE
