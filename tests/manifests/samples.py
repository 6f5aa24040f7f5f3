"""Of every manifest format a writer of a small file, for the tests that all of them run."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import threading
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

SAMPLE_RATE = 16_000


def shard(members, form=tarfile.PAX_FORMAT):
    """A tar archive of files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def wav(num_samples):
    """A WAV file of silence."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as writer:
        writer.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        writer.writeframes(bytes(2 * num_samples))
    return stream.getvalue()


def audio_shard(*sizes):
    """A shard of WAV files of so many samples: utt0.wav, utt1.wav, …"""
    return shard([(f"utt{i}.wav", wav(size)) for i, size in enumerate(sizes)])


def parquet(rows):
    """A Parquet file of rows."""
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def pipe(data):
    """A pipe that hands out the data, as a shell's `<(…)` does."""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb") as stream:
            stream.write(data)

    threading.Thread(target=write, daemon=True).start()
    return Path(f"/dev/fd/{reading}")


# Longer than any gap that is read through, however slow this machine is.
_LONG_SAMPLES = 140_000


def long_shard(number, examples):
    """A shard of texts and long audio: the first two as old tar has them, others with pax headers."""
    members = []
    for example in range(examples):
        key = f"utt{number}-{example:03d}"
        members.append((f"{key}.txt", b"ab" * (1 + example % 70)))
        members.append((f"{key}.wav", wav(_LONG_SAMPLES + 16 * example)))
    form = tarfile.USTAR_FORMAT if number < 2 else tarfile.PAX_FORMAT
    return shard(members, form)


@dataclass(frozen=True)
class Sample:
    """How to write a small manifest of a format.

    Attributes:
        write: Lengths as text (`["3.5", "abc", …]`), which name the examples utt0, utt1, … → the file.
        first_line: The line on which the first of them stands; None where the format has no lines.
        detected: Whether the format is told from the content; else tests name it.
        text: Whether the file is text, so that a byte order mark, line ends and UTF-8 matter.
        ids: Whether the rows have ids.
        column: The column of the lengths.
        whole: Whether only whole numbers above 0 can be written.
    """

    write: Callable[[Sequence[str]], str | bytes]
    first_line: int | None = 1
    detected: bool = True
    text: bool = True
    ids: bool = True
    column: str = "duration"
    whole: bool = False

    def content(self, values):
        """The file as bytes."""
        written = self.write(values)
        return written.encode() if isinstance(written, str) else written


def _lines(head, line):
    """Write a line for each length, which stands at `{v}`, with the number of the example at `{i}`."""

    def write(values):
        return head + "".join(line.format(i=i, v=v) for i, v in enumerate(values))

    return write


def _listed(head, entry, end):
    """Write a JSON text with an entry on each line."""

    def write(values):
        entries = [entry.format(i=i, v=v) for i, v in enumerate(values)]
        return "\n".join([head, ",\n".join(entries), end, ""])

    return write


def _text(values):
    return "".join("x" * int(value) + "\n" for value in values)


def _arrow_table(values):
    ids = pyarrow.array([f"utt{i}" for i in range(len(values))], pyarrow.string())
    return pyarrow.table(
        {"id": ids, "duration": pyarrow.array(values, pyarrow.string())}
    )


def _parquet(values):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(_arrow_table(values), stream)
    return stream.getvalue()


def _arrow(values):
    table = _arrow_table(values)
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return stream.getvalue()


def _webdataset(values):
    members = []
    for index, value in enumerate(values):
        members.append((f"utt{index}.json", f'{{"duration": "{value}"}}'.encode()))
        members.append((f"utt{index}.txt", b"A"))
    return shard(members)


def _mds(values):
    sizes = np.array(values, int)
    offsets = 4 * (sizes.size + 2) + 2 + np.cumsum([0, *sizes])
    head = struct.pack("<I", sizes.size) + offsets.astype("<u4").tobytes()
    return head + b"{}" + bytes(sizes.sum())


SAMPLES = {
    "sizes": Sample(_mds, None, text=False, ids=False, column="num_bytes", whole=True),
    "speechbrain-json": Sample(
        _listed("{", '"utt{i}": {{"duration": "{v}", "wrd": "A"}}', "}"),
        first_line=None,
    ),
    "json-list": Sample(
        _listed("[", '{{"id": "utt{i}", "duration": "{v}"}}', "]"), first_line=None
    ),
    "nemo": Sample(_lines("", '{{"audio_filepath": "utt{i}", "duration": "{v}"}}\n')),
    "speechbrain-csv": Sample(
        _lines("ID, duration, wrd\n", "utt{i}, {v}, A\n"), first_line=2
    ),
    "table": Sample(_lines("clip\tduration\n", "utt{i}\t{v}\n"), first_line=2),
    "wav2vec": Sample(
        _lines("/data/train\n", "utt{i}\t{v}\n"), first_line=2, column="samples"
    ),
    "kaldi": Sample(_lines("", "utt{i} {v} \n"), column="length"),
    "text": Sample(_text, detected=False, ids=False, column="text", whole=True),
    "parquet": Sample(_parquet, first_line=None, text=False),
    "arrow": Sample(_arrow, first_line=None, text=False),
    "webdataset": Sample(
        _webdataset, first_line=None, text=False, column="json.duration"
    ),
    "numbers": Sample(_lines("", "{v}\n"), ids=False, column="length"),
}


def damaged(content, draw, words):
    """Some bytes replaced by random ones, by a word or by nothing; or all from there on cut off."""
    start = draw.randrange(len(content))
    end = draw.choice((start, start + draw.randrange(1, 9), start + 200, len(content)))
    put = draw.choice((b"", draw.choice(words), draw.randbytes(4)))
    return content[:start] + put + content[end:]
