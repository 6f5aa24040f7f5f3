"""The files in tar archives, found as Python's own tarfile finds them."""

import gzip
import io
import os
import random
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import shard

from batchtune.errors import ManifestError
from batchtune.manifests.headers import BLOCK, File, is_header, open_tar
from batchtune.manifests.source import Source

FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


COMPRESSED = pytest.mark.parametrize(
    "compress", [bytes, gzip.compress], ids=["plain", "gzip"]
)
NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    min_size=1,
    max_size=300,
)


def entry(name, size, pax_headers=None):
    member = tarfile.TarInfo(name)
    member.size = size
    member.pax_headers = pax_headers or {}
    return member


def files(contents, form=tarfile.PAX_FORMAT):
    return shard(list(contents.items()), form)


def header(
    name,
    size=b"0" * 11 + b"\0",
    kind=b"0",
    *,
    rest=None,
):
    """A header made by hand, with a right checksum."""
    block = bytearray(BLOCK)
    for offset, field in {0: name, 124: size, 156: kind, **(rest or {})}.items():
        block[offset : offset + len(field)] = field
    return checksummed(block)


def checksummed(block):
    """The header with its right checksum."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content):
    return content + bytes(-len(content) % BLOCK)


def octal(number):
    return b"%011o\0" % number


def indexed(path):
    with open_tar(Source(path)) as tar:
        return list(tar.members()), tar


def until_error(path):
    found = []
    try:
        with open_tar(Source(path)) as tar:
            found.extend(tar.members())
    except ManifestError as error:
        assert error.hint
        return found, error
    return found, None


def by_tarfile(data):
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as tar:
        return [File(one.name, one.offset_data, one.size) for one in tar if one.isreg()]


@pytest.fixture
def write(tmp_path):
    def run(data):
        (tmp_path / "shard.tar").write_bytes(data)
        return tmp_path / "shard.tar"

    return run


@COMPRESSED
@given(
    contents=st.dictionaries(NAMES, st.integers(0, 1500), max_size=12),
    form=st.sampled_from(list(FORMATS)),
)
def test_names_offsets_and_sizes_are_those_of_tarfile(
    contents, form, compress, tmp_path_factory
):
    path = tmp_path_factory.getbasetemp() / f"any-{compress.__name__}.tar"
    try:
        data = files(
            {name: b"x" * size for name, size in contents.items()}, FORMATS[form]
        )
    except ValueError:  # a name that is too long for ustar
        return
    path.write_bytes(compress(data))
    assert indexed(path)[0] == by_tarfile(data)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_member_beyond_8_gib_is_passed_over(tmp_path, form):
    size = 9 * 2**30 + 5
    start = entry("large.wav", size).tobuf(FORMATS[form])
    path = tmp_path / "large.tar"
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size + -size % BLOCK)
        stream.seek(0, io.SEEK_END)
        stream.write(files({"small.wav": b"12"}))
    found, _ = indexed(path)
    assert [(name, size) for name, _, size, _ in found] == [
        ("large.wav", size),
        ("small.wav", 2),
    ]


def test_any_byte_of_a_header_that_is_wrong_is_noticed(write):
    data = files({"a.wav": b"1", "b.wav": b"2"})
    for offset in (offset for offset in range(1024, 1536) if offset != 1024 + 155):
        damaged = bytearray(data)
        damaged[offset] ^= 0xFF
        found, error = until_error(write(bytes(damaged)))
        assert [one[0] for one in found] == ["a.wav"]
        assert "is damaged at byte 1,024" in error.message


def test_links_are_counted_and_not_followed(write):
    links = header(b"s.wav", kind=b"2", rest={157: b"/etc/passwd"})
    # The size of the file that it is a link to.
    links += header(b"h.wav", octal(5000), b"1")
    found, tar = indexed(write(links + files({"a.wav": b"1"})))
    assert [one[0] for one in found] == ["a.wav"]
    assert tar.left_out == {"a link, a device or a member of unknown type": 2}


def test_a_pax_sparse_member_is_told_and_has_its_real_name(write):
    said = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s.wav",
        "GNU.sparse.realsize": "9999",
    }
    parts = b"1\n0\n3\n".ljust(512, b"\0") + b"abc"
    sparse = entry("GNUSparseFile.0/s.wav", len(parts), pax_headers=said)
    start = sparse.tobuf(tarfile.PAX_FORMAT)
    data = start + padded(parts) + files({"a.wav": b"1"})
    found, _ = indexed(write(data))
    assert [(name, size, sparse) for name, _, size, sparse in found] == [
        ("s.wav", 9999, True),
        ("a.wav", 1, False),
    ]
    assert found[1][1] == by_tarfile(data)[1][1]


def test_a_member_that_is_cut_is_named_with_its_bytes(write):
    data = files({"a.wav": b"1" * 600, "b.wav": b"2" * 5000})
    error = until_error(write(data[:3000]))[1]
    assert (
        "breaks off in the middle: its last member goes on up to byte 7,048"
        in error.message
    )


@pytest.mark.parametrize("size", [b"7" * 11 + b"\0", b"\x80" + b"\xff" * 11])
@COMPRESSED
def test_a_size_that_lies_is_an_error_and_takes_no_memory(write, size, compress):
    for kind in (b"0", b"\0", b"7", b"V", b"S"):
        path = write(compress(header(b"a.wav", size, kind) + bytes(4000)))
        tracemalloc.start()
        error = until_error(path)[1]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "breaks off" in error.message or "is damaged at byte 0" in error.message
        assert peak < 8 * 2**20


@pytest.mark.parametrize("end", [b"", bytes(1024)])
def test_an_extended_header_without_its_member_is_an_error(write, end):
    record = b"14 path=a.wav\n"
    error = until_error(
        write(header(b"x", octal(len(record)), b"x") + padded(record) + end)
    )[1]
    assert "is damaged at byte 0" in error.message


def test_a_hole_behind_the_end_is_not_read(write, monkeypatch):
    path = write(files({"a.wav": b"1"}))
    os.truncate(path, 30 << 30)
    pread = os.pread
    read = []
    monkeypatch.setattr(
        os, "pread", lambda *where: read.append(where[1]) or pread(*where)
    )
    assert until_error(path)[1] is None
    assert sum(read) < 4 << 20


@COMPRESSED
def test_payloads_are_read_at_any_place(write, compress):
    chance = random.Random(5)
    sizes = (0, 10, 70_000, 9_000_000, 7)
    contents = {f"{size}.wav": chance.randbytes(size) for size in sizes}
    with open_tar(Source(write(compress(files(contents))))) as tar:
        for file in tar.members():
            payload = tar.payload(file)
            content = contents[file.name]
            for start in (0, file.size // 2, 3, file.size, file.size + 9):
                assert payload.read(start, 70_000) == content[start : start + 70_000]


def test_random_damage_gives_members_or_an_error(write):
    """Bytes of headers are changed, and their checksums made right again."""
    chance = random.Random(11)
    contents = {
        f"{'d/' * 60 * (i % 2)}{i}.wav": chance.randbytes(90 * i) for i in range(5)
    }
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        original = files(contents, form)
        starts = [
            start
            for start in range(0, len(original), BLOCK)
            if is_header(original[start : start + BLOCK])
        ]
        for _ in range(200):
            data = bytearray(original)
            for start in chance.choices(starts, k=chance.randint(1, 4)):
                data[start + chance.randrange(BLOCK)] = chance.choice(
                    (0, 0x20, 0x37, 0x53, 0x78, chance.randrange(256))
                )
                end = start + BLOCK
                data[start:end] = checksummed(data[start:end])
            last = 0
            for _, offset, size, _ in until_error(write(bytes(data)))[0]:
                assert last < offset
                assert offset + size <= len(data)
                last = offset
