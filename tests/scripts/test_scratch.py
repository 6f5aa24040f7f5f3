"""The scratch: whatever a script does, the user's files stay as they are."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ways_to_write import FILE, WAYS

from batchtune.errors import ProbeError, ResultError
from batchtune.files import temporary_folder
from batchtune.probe.requests import ScriptRequest
from batchtune.probe.supervisor import script_request
from batchtune.scripts import landlock, mounts, scratch

PROGRAM = Path(__file__).with_name("ways_to_write.py")
HYDRA = "outputs/2026-11-29/10-00-00/version_0/checkpoints"
LARGE = 33 << 20


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("refused")


@pytest.fixture(params=["mounts", "user namespace", "landlock"])
def protection(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The way in which scripts are kept from files, where this kernel has it."""
    kind: str = request.param
    enter = {
        "mounts": mounts.enter,
        "user namespace": partial(mounts.enter, privileged=False),
        "landlock": refuse,
    }[kind]
    monkeypatch.setattr(mounts, "enter", enter)
    if kind != "landlock":
        monkeypatch.setattr(landlock, "confine", refuse)
    with script_request(["true"]) as script:
        try:
            scratch.start(script, environment).wait()
        except ProbeError as error:
            pytest.skip(error.message)
    yield kind


def environment(options: Any) -> dict[str, str]:
    return dict(os.environ)


def ran(*command: str) -> str:
    """What a command prints that runs as a script does."""
    with script_request(list(command)) as script:
        process = scratch.start(script, environment, stdout=subprocess.PIPE)
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return printed.decode()


def make_layouts(root: Path) -> list[str]:
    """Make a project with a folder for each layout, and in each a file for each way to write."""
    project = root / "project"
    elsewhere = root / "elsewhere"
    plain = {"plain": FILE, "large": FILE, "many": FILE, "a/b/c/d/e": FILE, HYDRA: FILE}
    for layout in (*plain, "linked files", "hard links"):
        for way in WAYS:
            folder = project / layout / way
            folder.mkdir(parents=True)
            file = folder / FILE
            if layout in plain:
                file.write_bytes(b"old content")
                continue
            target = elsewhere / layout / way
            target.mkdir(parents=True)
            (target / FILE).write_bytes(b"old content")
            if layout == "linked files":
                file.symlink_to(target / FILE)
            else:
                os.link(target / FILE, file)
    for way in WAYS:
        os.truncate(project / "large" / way / FILE, LARGE)
        linked = elsewhere / "folder" / way
        linked.mkdir(parents=True)
        (linked / FILE).write_bytes(b"old content")
    (project / "linked folder").symlink_to(elsewhere / "folder")
    for number in range(1001):
        (project / "many" / f"{number}.wav").touch()
    return [*plain, "linked files", "hard links", "linked folder"]


def state_of(root: Path, *, metadata: bool) -> dict[str, Any]:
    """What stands in each file and link below a folder, and with `metadata` all that is known of it."""
    state = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and status.st_size == LARGE:
            content = status.st_blocks  # it has holes
        elif path.is_file():
            content = path.read_bytes()
        state[str(path)] = content
        if metadata:
            times = (status.st_mtime_ns, status.st_ctime_ns)
            state[str(path)] = (content, status.st_mode, status.st_ino, *times)
    return state


@pytest.mark.process
def test_no_way_to_write_reaches_the_users_files(
    protection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = make_layouts(tmp_path)
    assert len(layouts) == 8 and len(WAYS) == 40
    monkeypatch.chdir(tmp_path / "project")
    # What Landlock can't forbid: a file's mode and times.
    metadata = protection != "landlock"
    before = state_of(tmp_path, metadata=metadata)
    failed = ran(sys.executable, str(PROGRAM), *layouts).splitlines()
    assert state_of(tmp_path, metadata=metadata) == before
    if metadata:  # all others succeeded, though in the scratch
        assert {line.rpartition(": ")[2] for line in failed} <= {"folder renamed"}
