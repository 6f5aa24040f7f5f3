"""The manifest formats: a new one needs its class and one line here."""

from __future__ import annotations

from batchtune.manifests.base import Format
from batchtune.manifests.formats import columnar, json, lines, members

# A file without a given format is tried in this order: the particular before the general.
_ALL: tuple[type[Format], ...] = (
    members.AudioFolder,
    columnar.Parquet,
    columnar.Arrow,
    members.IndexFile,
    members.WebDataset,
    json.SpeechBrainJson,
    json.JsonList,
    json.Nemo,
    lines.SpeechBrainCsv,
    lines.NumberLines,
    lines.Wav2vec,
    lines.Kaldi,
    lines.TableLines,
    lines.Text,
)

FORMATS: dict[str, type[Format]] = {member.name: member for member in _ALL}
