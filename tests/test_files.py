import os
import stat
from pathlib import Path

import pytest

from batchtune.errors import ResultError
from batchtune.files import write_whole


def test_a_file_that_cant_be_written_keeps_its_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultError, match="No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_stays_one():
    write_whole(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
