"""Scans on Ray: what is written is what this machine's processes write, even if workers are killed."""

import shutil
import signal
import sys
import tempfile

import psutil
import pytest
from manifests.samples import shard, wav

from batchtune.errors import BatchtuneError, UsageError
from batchtune.manifests import ReadOptions, scan


@pytest.fixture
def shards(tmp_path):
    return written(tmp_path / "shards", 48)


def written(folder, num_shards):
    folder.mkdir()
    members = []
    for example in range(300):
        members.append((f"utt{example}.wav", wav(800 + example)))
        members.append((f"utt{example}.txt", b"ab" * (example % 30 + 1)))
    content = shard(members)
    for number in range(num_shards):
        (folder / f"{number:03d}.tar").write_bytes(content)
    return folder


@pytest.fixture
def cluster():
    """Two CPUs of this machine."""
    ray = pytest.importorskip("ray")
    # The paths of its sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def workers():
    """The processes that do tasks, by the names that Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            name = " ".join(process.cmdline())
        except psutil.Error:
            continue
        # Others with "ray::" are the agents of the machine.
        if name.startswith(("ray::read_together", "ray::IDLE")):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_same_bytes_after_both_workers_are_killed(shards, cluster, tmp_path):
    options = ReadOptions(target_key="txt")
    killed = []

    def kill(share, examples, traffic):
        if examples and not killed:
            for process in workers():
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)

    for histogram in (False, True):
        killed.clear()
        local = tmp_path / f"local-{histogram}.parquet"
        scan(shards, options, local, histogram=histogram)
        ray = tmp_path / f"ray-{histogram}.parquet"
        scan(shards, options, ray, histogram=histogram, engine="ray", on_progress=kill)
        assert len(killed) >= 2
        assert ray.read_bytes() == local.read_bytes()


def test_a_missing_ray_is_named(tmp_path, monkeypatch):
    shards = written(tmp_path / "shards", 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        BatchtuneError, match="--engine ray needs the package ray"
    ) as caught:
        scan(shards, ReadOptions(), tmp_path / "lengths.parquet", engine="ray")
    assert caught.value.hint == "Install it: pip install ray."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_address_without_a_cluster_is_said(tmp_path):
    pytest.importorskip("ray")
    shards = written(tmp_path / "shards", 1)
    with pytest.raises(
        UsageError, match=r"no Ray cluster can be used at '127\.0\.0\.1:9'"
    ):
        scan(
            shards,
            ReadOptions(),
            tmp_path / "lengths.parquet",
            engine="ray",
            ray_address="127.0.0.1:9",
        )
