"""Files under manifests: compression, bombs, line ends."""

import bz2
import gzip
import lzma

import pyarrow
import pytest
from samples import SAMPLES, pipe

from batchtune.manifests import load_lengths, source
from batchtune.manifests.source import Source

LINES = b"".join(
    b'{"id": "utt%d", "duration": %d.25}\n' % (i, i * 7919 % 9973 + 1)
    for i in range(3000)
)


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


compressions = pytest.mark.parametrize(
    "compress",
    [gzip.compress, zstd, bz2.compress, lzma.compress],
    ids=["gzip", "zstd", "bzip2", "xz"],
)


@compressions
def test_several_compressed_streams_in_one_file_are_one_text(read, compress):
    assert read(compress(LINES) + compress(LINES)).count == 6000


@compressions
@pytest.mark.parametrize("tenths", (1, 5, 9))
def test_what_is_cut_off_is_said_to_break_off(refusal, compress, tenths):
    data = compress(LINES)
    assert "breaks off" in refusal(data[: len(data) * tenths // 10]).message


def test_a_wrong_checksum_of_gzip_is_damage(refusal):
    data = bytearray(gzip.compress(LINES))
    data[-6] ^= 0xFF
    assert "is damaged" in refusal(bytes(data)).message


@compressions
def test_a_bomb_does_no_harm(refusal, compress, monkeypatch):
    monkeypatch.setattr(source, "_TRUSTED_BYTES", 1_000_000)
    assert (
        "expands more than 500-fold"
        in refusal(compress(b'{"duration": 1}\n' + b" " * 20_000_000)).message
    )


@pytest.mark.parametrize(
    "name", [name for name, one in SAMPLES.items() if one.text and "json" not in name]
)
def test_a_line_that_no_example_has_is_one_error(refusal, name, monkeypatch):
    monkeypatch.setattr(source, "_LARGEST_LINE_BYTES", 2 * source.BLOCK_BYTES)
    content = SAMPLES[name].content(["1", "2"])
    error = refusal(content + b"x" * 4 * source.BLOCK_BYTES, format=name)
    assert "is longer than 2 MiB" in error.message
    assert f"line {content.count(bytes([10])) + 1} " in error.message


@pytest.mark.parametrize("name", ["speechbrain-json", "json-list"])
def test_a_json_text_that_the_machine_cant_hold_is_one_error(
    refusal, name, monkeypatch
):
    monkeypatch.setattr(source, "total_memory", lambda: 1000)
    content = b" " * 1000 + SAMPLES[name].content(["1", "2", "-1"])
    assert (
        "half of this machine's memory"
        in refusal(content, format=name, skip_invalid=False).message
    )


def test_a_process_that_gets_no_memory_is_one_error(refusal, monkeypatch):
    def no_memory(self):
        raise MemoryError

    monkeypatch.setattr(Source, "content", no_memory)
    error = refusal(SAMPLES["json-list"].content(["1"]))
    assert "needs more memory than this process may take" in error.message


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_pipe_of_many_lines_is_read_whole(compress):
    assert load_lengths(pipe(compress(LINES))).count == 3000


def test_a_target_file_may_be_a_pipe(read):
    found = read("duration\n" + "1\n" * 3000, target_file=str(pipe(b"7\n" * 3000)))
    assert found.targets.sum() == 21_000
