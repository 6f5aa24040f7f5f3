"""The manifest formats, one module for each: the line here is all that a new one needs beside its module."""

from __future__ import annotations

from batchtune.manifests.formats import (
    arrow,
    audio,
    json_list,
    kaldi,
    lhotse,
    librispeechmix,
    nemo,
    numbers_list,
    parquet,
    rttm,
    segments,
    shape,
    speechbrain_csv,
    speechbrain_json,
    table,
    text,
    wav2vec,
    webdataset,
)
from batchtune.manifests.rows import Format

# In the order in which they are tried on a file whose format is not given: the particular before the general.
_ALL: tuple[Format, ...] = (
    audio.FORMAT,
    parquet.FORMAT,
    arrow.FORMAT,
    webdataset.FORMAT,
    speechbrain_json.FORMAT,
    lhotse.FORMAT,
    librispeechmix.FORMAT,
    json_list.FORMAT,
    nemo.FORMAT,
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
