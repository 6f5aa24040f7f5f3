"""Sources behind URLs: what is read equals what a file on disk gives, and little of it is fetched."""

import gzip
import os
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from manifests.range_server import serving
from manifests.samples import audio_shard, long_shard, wav

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths, load_stream, reading, scan
from batchtune.manifests.storage import _filesystem

pytestmark = pytest.mark.skipif(
    find_spec("fsspec") is None or find_spec("aiohttp") is None,
    reason="needs fsspec, s3fs and aiohttp",
)

_MOST_BYTES_A_SAMPLE = 3 * 1024


@pytest.fixture(autouse=True)
def own_connections():
    """Each test opens its own connections."""
    yield
    _filesystem.cache_clear()


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(folder) as files:
        yield files


@pytest.fixture
def alone(monkeypatch):
    """What other processes would read is read here."""

    def read_here(work, tasks, jobs, take, on_wait):
        for key, task in tasks.items():
            take(key, work(task))

    monkeypatch.setattr(reading, "run_in_processes", read_here)


def rows(path):
    return pyarrow.parquet.read_table(path).drop_columns(["source"]).to_pylist()


def refusal(manifest, **options):
    with pytest.raises(ManifestError) as caught:
        load_lengths(manifest, ReadOptions(**options))
    assert caught.value.hint
    return caught.value


@pytest.mark.process
def test_few_bytes_of_shards_are_fetched_over_http(tmp_path):
    # Two as old tar has them, two with pax headers; 22 MB.
    long_shards = tmp_path / "long"
    long_shards.mkdir()
    for number in range(4):
        (long_shards / f"train-{number}.tar").write_bytes(long_shard(number, 20))
    names = "train-{0..3}.tar"
    options = ReadOptions(target_key="txt")
    notes = []
    scan(f"{long_shards}/{names}", options, tmp_path / "local.parquet")
    with serving(long_shards) as server:
        output = tmp_path / "remote.parquet"
        scan(f"{server.url}/{names}", options, output, jobs=2, on_note=notes.append)
        assert server.sent <= 80 * _MOST_BYTES_A_SAMPLE
        assert len(server.requests) <= 2 * 80
        told = f"Read over the network: {len(server.requests):,} requests"
    assert rows(output) == rows(tmp_path / "local.parquet")
    assert notes[-1].startswith(told)


@pytest.mark.usefixtures("alone")
def test_an_interrupted_scan_goes_on_by_etags(server, tmp_path):
    for number in range(3):
        content = audio_shard(1600 * (number + 1))
        (server.folder / f"{number}.tar").write_bytes(content)
    manifest = f"{server.url}/{{0..2}}.tar"
    output = tmp_path / "lengths.parquet"
    server.status["/2.tar"] = 403
    with pytest.raises(ManifestError, match=r"1 of 3 sources.*\n.*access denied"):
        scan(manifest, ReadOptions(), output)
    del server.status["/2.tar"]
    (server.folder / "1.tar").write_bytes(audio_shard(16_000))
    server.reset()
    scan(manifest, ReadOptions(), output)
    fetched = {path for method, path in server.requests if method == "GET"}
    # The first is looked at again to see what is read.
    assert fetched == {"/0.tar", "/1.tar", "/2.tar"}
    assert [path for _, path in server.requests].count("/0.tar") == 2
    assert [row["length"] for row in rows(output)] == [1.0, 0.3, 0.1]


@pytest.mark.parametrize(
    ("with_ranges", "samples"),
    [(True, 100), (False, 16_000)],
    ids=["a small shard", "a server that ignores ranges"],
)
def test_what_is_best_read_whole_is_read_by_one_request(server, with_ranges, samples):
    server.with_ranges = with_ranges
    content = audio_shard(*range(samples, samples + 20))
    (server.folder / "a.tar").write_bytes(content)
    assert load_lengths(f"{server.url}/a.tar").count == 20
    assert [method for method, _ in server.requests] == ["HEAD", "GET"]


def test_parquet_is_read_by_its_footer(server):
    audio = [os.urandom(1000) for _ in range(4000)]
    table = pyarrow.table({"duration": np.arange(1.0, 4001), "audio": audio})
    pyarrow.parquet.write_table(table, server.folder / "long.parquet")
    lengths = load_lengths(f"{server.url}/long.parquet")
    assert lengths.count == 4000 and lengths.longest == 4000
    assert server.sent < 300_000


@pytest.mark.parametrize("compressed", [False, True])
def test_manifests_are_streamed(server, compressed):
    lines = [f"utt{number},{1 + number % 97}\n" for number in range(100_000)]
    content = ("id,duration\n" + "".join(lines)).encode()
    if compressed:
        content = gzip.compress(content)
    (server.folder / "train.csv").write_bytes(content)
    remote = load_lengths(f"{server.url}/train.csv")
    assert remote.fingerprint == load_lengths(server.folder / "train.csv").fingerprint
    assert server.sent < 2 * len(content) + 2**21


def test_an_arrow_file_behind_a_url(server):
    table = pyarrow.table({"duration": [1.5, 2.5, 0.5]})
    for name, new in [
        ("file", pyarrow.ipc.new_file),
        ("stream", pyarrow.ipc.new_stream),
    ]:
        path = server.folder / f"{name}.arrow"
        with new(path, table.schema) as writer:
            writer.write_table(table)
        assert load_lengths(f"{server.url}/{name}.arrow").total == 4.5


@pytest.mark.usefixtures("alone")
def test_audio_files_behind_urls(server):
    for number in range(3):
        (server.folder / f"a{number}.wav").write_bytes(wav(1600 * (number + 1)))
    assert load_stream(f"{server.url}/a{{0..2}}.wav").values.tolist() == [0.1, 0.2, 0.3]
    (server.folder / "a1.wav").unlink()
    assert "a1.wav does not exist" in refusal(f"{server.url}/a{{0..2}}.wav").message


@pytest.mark.parametrize("of_equal_size", [False, True])
def test_an_object_that_changes_while_it_is_read(server, of_equal_size):
    path = server.folder / "a.tar"
    content = audio_shard(*[100_000] * 20)
    path.write_bytes(content)
    changed = content[:-1] + b"x" if of_equal_size else content[: len(content) // 2]

    def change(number):
        if number == 30:
            path.write_bytes(changed)

    server.on_request = change
    assert "a.tar changed while it was read" in refusal(f"{server.url}/a.tar").message


def test_what_can_not_be_read_is_said(server):
    (server.folder / "a.csv").write_text("id,duration\na,1\n")
    missing = refusal(f"{server.url}/none.csv")
    assert missing.message == f"{server.url}/none.csv does not exist"
    server.status["/a.csv"] = 403
    denied = refusal(f"{server.url}/a.csv")
    assert "access denied" in denied.message
    assert "Credentials are read by" in denied.hint
    server.status["/a.csv"] = 500
    broken = refusal(f"{server.url}/a.csv")
    assert broken.message.endswith("can't be read: the server answers with status 500")
    unreached = refusal("http://127.0.0.1:9/a.csv")  # where nothing listens
    assert "can't be read: \"Cannot connect to host" in unreached.message
    assert "the network" in unreached.hint


@pytest.mark.parametrize(
    ("url", "problem", "hint"),
    [
        ("nosuch://bucket/a.csv", "Protocol not known", "local copy"),
        ("ftp://host/a.csv", "required argument: 'host'", "local copy"),
        ("zip://a.csv::b.zip", "chained URLs", "local copy"),
        ("box://a.csv", "a package is missing (Please install boxfs", "named there"),
    ],
)
def test_what_fsspec_can_not_open_is_said(url, problem, hint):
    error = refusal(url)
    assert error.message.startswith(f"{url} can't be read: ")
    assert problem in error.message
    assert hint in error.hint


def test_no_error_shows_a_password_or_a_signature(server):
    place = server.url.removeprefix("http://")
    query = "X-Amz-Date=2024&X-Amz-Signature=secret"
    signed = f"http://me:secret@{place}/a.csv?{query}"
    shown = f"http://…@{place}/a.csv?X-Amz-Date=…&X-Amz-Signature=…"
    assert refusal(signed).message == f"{shown} does not exist"
    (server.folder / f"a.csv?{query}").write_text("id,duration\na,1\n")
    unknown = refusal(signed, length_key="frames")
    assert unknown.message.startswith(f"{shown} has no column 'frames'")


def test_no_table_holds_a_password_or_a_signature(server, tmp_path):
    place = server.url.removeprefix("http://")
    (server.folder / "a.csv?sig=secret").write_text("id,duration\na,1\n")
    signed = [f"http://me:secret@{place}/{name}.csv?sig=secret" for name in "ab"]
    output = tmp_path / "lengths.parquet"
    with pytest.raises(ManifestError, match="1 of 2 sources"):
        scan(signed, ReadOptions(), output)
    (kept,) = (tmp_path / "lengths.parquet.parts").iterdir()
    assert b"secret" not in kept.read_bytes()
    (server.folder / "b.csv?sig=secret").write_text("id,duration\nb,2\n")
    scan(signed, ReadOptions(), output)
    sources = pyarrow.parquet.read_table(output)["source"].to_pylist()
    shown = [source.partition("#")[0] for source in sources]
    assert shown == [f"http://…@{place}/{name}.csv?sig=…" for name in "ba"]
    assert len(set(sources)) == 2


def test_a_missing_package_is_named(monkeypatch):
    _filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    error = refusal("s3://bucket/a.csv")
    assert "a package is missing" in error.message
    assert error.hint == "Install it: pip install fsspec s3fs."
