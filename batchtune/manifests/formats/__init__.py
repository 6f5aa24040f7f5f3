"""The manifest formats, one module for each: the line here is all that a new one needs beside its module."""

from __future__ import annotations

from batchtune.manifests.base import Format
from batchtune.manifests.formats import (
    audio,
    columnar,
    computed_json,
    json,
    kaldi,
    numbers_list,
    rttm,
    segments,
    shape,
    speechbrain_csv,
    table,
    text,
    wav2vec,
    webdataset,
)

# In the order in which they are tried on a file whose format is not given: the particular before the general.
_ALL: tuple[Format, ...] = (
    audio.FORMAT,
    columnar.PARQUET,
    columnar.ARROW,
    webdataset.FORMAT,
    json.SPEECHBRAIN_JSON,
    computed_json.LHOTSE,
    computed_json.LIBRISPEECHMIX,
    json.JSON_LIST,
    json.NEMO,
    speechbrain_csv.FORMAT,
    rttm.FORMAT,
    segments.FORMAT,
    shape.FORMAT,
    numbers_list.FORMAT,
    wav2vec.FORMAT,
    kaldi.FORMAT,
    table.FORMAT,
    text.FORMAT,
)

FORMATS: dict[str, Format] = {member.name: member for member in _ALL}
