"""The manifest formats, one module for each: the line here is all that a new one needs beside its module."""

from __future__ import annotations

from batchtune.manifests.formats import kaldi, nemo, speechbrain_csv, speechbrain_json, table, wav2vec
from batchtune.manifests.rows import Format

# In the order in which they are tried on a file whose format is not given: the particular before the general.
_ALL: tuple[Format, ...] = (
    speechbrain_json.FORMAT,
    nemo.FORMAT,
    speechbrain_csv.FORMAT,
    wav2vec.FORMAT,
    kaldi.FORMAT,
    table.FORMAT,
)

FORMATS: dict[str, Format] = {member.name: member for member in _ALL}
