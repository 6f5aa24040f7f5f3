"""One probe at a time on a device."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from batchtune.errors import ProbeError
from batchtune.probe.devices import LOCKS_FOLDER, lock_device


@pytest.fixture
def locks(tmp_path, monkeypatch):
    """The folder of the locks, below a temporary folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / LOCKS_FOLDER


@pytest.mark.process
def test_a_holder_that_was_killed_holds_nothing(locks):
    code = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from batchtune.probe.devices import lock_device\n"
        "lock = lock_device('cpu', 'CPU'); print('held', flush=True); time.sleep(1000)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(locks.parent)], stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ProbeError, match=f"process {holder.pid}"):
        lock_device("cpu", "CPU")
    holder.kill()
    holder.communicate()
    lock_device("cpu", "CPU").close()


@pytest.mark.process
def test_no_process_that_is_started_holds_it(locks):
    with lock_device("cpu", "CPU"):
        child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    try:
        lock_device("cpu", "CPU").close()
    finally:
        child.kill()
        child.wait()


def test_all_users_may_take_it_whatever_the_umask(locks):
    before = os.umask(0o077)
    try:
        lock_device("cpu", "CPU").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
    assert stat.S_IMODE((locks / "cpu.lock").stat().st_mode) == 0o666


def test_an_id_can_not_lead_out_of_the_folder(locks):
    with lock_device("../../etc/passwd", "a device"):
        assert [path.name for path in locks.iterdir()] == [".._.._etc_passwd.lock"]


def test_a_folder_that_is_a_link_is_not_followed(locks, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    locks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProbeError, match="can't be used"):
        lock_device("cpu", "CPU")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("kind", ["a link", "a second name", "a pipe", "a folder"])
def test_a_file_that_is_no_plain_file_is_left_alone(locks, tmp_path, kind):
    locks.mkdir()
    (tmp_path / "precious").write_text("precious")
    lock = locks / "cpu.lock"
    if kind == "a link":
        lock.symlink_to(tmp_path / "precious")
    elif kind == "a second name":
        lock.hardlink_to(tmp_path / "precious")
    elif kind == "a pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(ProbeError, match=r"cpu\.lock can't be used.*\n.*TMPDIR"):
        lock_device("cpu", "CPU")
    assert (tmp_path / "precious").read_text() == "precious"
