"""The audio formats that are left to libsndfile: Ogg (Vorbis, Opus), AIFF, AU, CAF, W64, NIST SPHERE and others."""

from __future__ import annotations

import importlib
from types import ModuleType

from batchtune.errors import ManifestError
from batchtune.manifests.headers.payload import AudioLength, HeaderError, Payload
from batchtune.manifests.headers.stream import PayloadStream

# libsndfile's way to say that a length is unknown is the largest that there is.
_UNKNOWN = 1 << 62
_MOST_READS = 4
_SPARE_BYTES = 16 * 1024 * 1024


def sndfile_length(payload: Payload) -> AudioLength:
    """The length of an audio file, by libsndfile.

    A truncated file passes as a shorter one wherever libsndfile reads it as such.

    Raises:
        HeaderError: libsndfile does not read it.
        ManifestError: The package soundfile is missing.
    """
    soundfile = _soundfile()
    stream = PayloadStream(payload, _MOST_READS * payload.size + _SPARE_BYTES)
    try:
        with soundfile.SoundFile(stream) as file:
            num_samples, sample_rate = int(file.frames), int(file.samplerate)
    except soundfile.SoundFileError as error:
        stream.check()
        said = getattr(error, "error_string", "") or str(error)
        raise HeaderError("not read by libsndfile", said.strip().rstrip(".")) from None
    stream.check()
    if not 0 <= num_samples < _UNKNOWN or sample_rate <= 0:
        raise HeaderError("an audio header without a length")
    return AudioLength(num_samples, sample_rate)


def _soundfile() -> ModuleType:
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as error:  # the latter where libsndfile itself is missing
        raise ManifestError(
            f"audio files other than WAV, FLAC and MP3 are read by soundfile, which can't be imported ({error})",
            "Install it: pip install 'batchtune[audio]'.",
        ) from None
