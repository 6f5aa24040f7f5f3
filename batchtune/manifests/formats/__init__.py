"""The manifest formats: a new one needs its class and one line here."""

from __future__ import annotations

from batchtune.manifests.base import Format
from batchtune.manifests.formats import audio_folder, columnar, cuts, delimited, json, lists, webdataset

# In the order in which they are tried on a file whose format is not given: the particular before the general.
_ALL: tuple[type[Format], ...] = (
    audio_folder.AudioFolder,
    columnar.Parquet,
    columnar.Arrow,
    webdataset.WebDataset,
    json.SpeechBrainJson,
    cuts.Lhotse,
    cuts.LibriSpeechMix,
    json.JsonList,
    json.Nemo,
    delimited.SpeechBrainCsv,
    lists.Rttm,
    lists.Segments,
    lists.Shape,
    lists.Numbers,
    lists.Wav2vec,
    lists.Kaldi,
    delimited.Table,
    lists.Text,
)

FORMATS: dict[str, type[Format]] = {member.name: member for member in _ALL}
