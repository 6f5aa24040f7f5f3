"""`batchtune scan` as a process: what it writes, shows and keeps."""

import io
import os
import signal
import subprocess
import time

import pyarrow.parquet
import pytest
from cli.conftest import command
from manifests.samples import shard, wav
from typer.testing import CliRunner

from batchtune.cli.app import app


def write_shard(path, first, count=3):
    """Write a shard of wavs of 0.1 s, 0.2 s, … with as long texts."""
    members = []
    for number in range(first, first + count):
        members.append((f"utt{number}.wav", wav(1600 * (number + 1))))
        members.append((f"utt{number}.txt", b"ab" * (number + 1)))
    path.write_bytes(shard(members))


@pytest.fixture
def shards(tmp_path):
    """Four shards of three wavs of 0.1 s, 0.2 s, … 1.2 s each."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        write_shard(folder / f"train-{number}.tar", 3 * number)
    return folder


WRITE = ("-o", "lengths.parquet")
TEXTS = ("--target-key", "txt")


@pytest.fixture
def rows(tmp_path):
    """`rows()`: what was written."""
    path = tmp_path / "lengths.parquet"
    return lambda: pyarrow.parquet.read_table(path).to_pylist()


@pytest.fixture
def parts(tmp_path):
    """Where sources that are read are kept until all are."""
    return tmp_path / "lengths.parquet.parts"


def test_the_lengths_of_shards_are_written_longest_first(succeed, shards, rows, parts):
    ran = succeed("scan", f"{shards}/train-{{0..3}}.tar", *TEXTS, *WRITE)
    assert rows() == [
        {
            "id": f"utt{number}",
            "length": (number + 1) / 10,
            "target_length": 2 * (number + 1),
            "source": f"{shards}/train-{number // 3}.tar",
            "row": number,
        }
        for number in reversed(range(12))
    ]
    assert "12 lengths in descending order: 1.2 s to 0.1 s" in ran.stdout
    assert not parts.exists()


def test_a_broken_shard_is_named_and_only_it_is_read_again(
    batchtune, succeed, shards, tmp_path, rows, parts
):
    broken = shards / "train-2.tar"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 3])
    ran = batchtune("scan", shards, *WRITE, code=1)
    assert "1 of 4 sources can't be read" in ran.stderr
    assert "train-2.tar" in ran.stderr
    assert "3 of 4 sources are read and kept in lengths.parquet.parts" in ran.stderr
    assert not (tmp_path / "lengths.parquet").exists()
    broken.write_bytes(whole)
    again = succeed("scan", shards, *WRITE)
    assert "3 of 4 sources were read before" in again.stderr
    assert len(rows()) == 12
    assert not parts.exists()


@pytest.mark.slow
def test_an_interrupted_scan_leaves_no_process_and_goes_on(
    succeed, tmp_path, rows, parts
):
    (tmp_path / "shards").mkdir()
    whole = tmp_path / "whole.tar"
    write_shard(whole, 0, 12)
    for number in range(600):
        os.link(whole, tmp_path / "shards" / f"train-{number:04}.tar")
    started = subprocess.Popen(
        command("scan", "shards", *WRITE, "--jobs", 2),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and started.poll() is None:
        # Only a finished part: one that is being written has a name that begins with a dot.
        if any(parts.glob("[!.]*.part")):
            break
        os.sched_yield()
    started.send_signal(signal.SIGINT)
    _, stderr = started.communicate(timeout=60)
    if started.returncode == 0:
        pytest.skip("it was done before it could be interrupted")
    assert started.returncode == 130, stderr
    assert "the same command goes on" in stderr
    ran = succeed("scan", "shards", *WRITE)
    assert "were read before" in ran.stderr
    assert len(rows()) == 7200


def test_interrupted_while_it_writes_it_says_what_is_kept(
    batchtune, succeed, shards, rows, monkeypatch
):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    command = ("scan", shards, *WRITE)
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet, "write_table", interrupt)
        ran = batchtune(*command, code=130)
    assert "4 of 4 sources are read and kept" in ran.stderr
    assert "the same command goes on" in ran.stderr
    assert "4 of 4 sources were read before" in succeed(*command).stderr
    assert len(rows()) == 12


def test_a_dash_writes_parquet_to_stdout(manifest):
    ran = CliRunner().invoke(app, ["scan", str(manifest), "-o", "-"])
    assert pyarrow.parquet.read_table(io.BytesIO(ran.stdout_bytes)).num_rows == 36
    assert "36 lengths" in ran.stderr


def test_a_folder_that_is_a_file_is_one_message(batchtune, manifest):
    ran = batchtune("scan", manifest, "-o", "absent/../lengths.csv/x.parquet", code=1)
    assert "Error:" in ran.stderr and "Traceback" not in ran.stderr


def test_a_file_that_is_no_parquet_is_not_overwritten(batchtune, manifest):
    before = manifest.read_bytes()
    ran = batchtune("scan", manifest, "-o", manifest.name, code=2)
    assert "exists and is not a Parquet file" in ran.stderr
    assert manifest.read_bytes() == before


def test_names_can_do_nothing_to_the_terminal(batchtune, tmp_path):
    (tmp_path / "red\x1b[31m\x07.csv").write_text("id,\x1b[32mcolumn\na,1\n")
    ran = batchtune("scan", "red\x1b[31m\x07.csv", code=1)
    assert not {"\x1b", "\x07"} & set(ran.stderr)
    assert "red\\x1b[31m" in ran.stderr


def test_a_histogram_is_a_manifest_of_the_commands(succeed, shards):
    ran = succeed("scan", shards, "--histogram", "-o", "histogram.parquet")
    assert "holds the histogram of 12 lengths" in ran.stderr
    succeed("sweep-buckets", "histogram.parquet", "--max-batch-length", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--histogram"], "are for writing a file, but none is written"),
        (["--engine", "ray"], "are for writing a file, but none is written"),
        (["--engine", "dask"], "unknown --engine 'dask'"),
        (["--ray-address", "auto"], "--ray-address is for the engine ray"),
        (["--measure", "letters"], "letters"),
        (["--reduce", "mean"], "mean"),
        (["-o", "new.csv"], "scan writes Parquet, but new.csv is the name of another"),
    ],
)
def test_options_that_say_nothing_are_refused(batchtune, shards, arguments, message):
    assert message in batchtune("scan", shards, *arguments, code=2).stderr
    assert [path.name for path in shards.parent.iterdir()] == ["shards"]
