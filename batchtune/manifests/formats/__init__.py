"""The manifest formats: the line here is all that a new one needs besides its class."""

from __future__ import annotations

from batchtune.manifests.base import Format
from batchtune.manifests.formats import audio, columnar, delimited, json, lists, webdataset

# In the order in which they are tried on a file whose format is not given: the particular before the general.
_ALL: tuple[Format, ...] = (
    audio.FORMAT,
    columnar.PARQUET,
    columnar.ARROW,
    webdataset.FORMAT,
    json.SPEECHBRAIN_JSON,
    json.LHOTSE,
    json.LIBRISPEECHMIX,
    json.JSON_LIST,
    json.NEMO,
    delimited.SPEECHBRAIN_CSV,
    lists.RTTM,
    lists.SEGMENTS,
    lists.SHAPE,
    lists.NUMBERS,
    lists.WAV2VEC,
    lists.KALDI,
    delimited.TABLE,
    lists.TEXT,
)

FORMATS: dict[str, Format] = {member.name: member for member in _ALL}
