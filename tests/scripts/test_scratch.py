"""The scratch: whatever a script does, the user's files stay as they are."""

import errno
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from ways_to_write import FILE, TORCH, WAYS

from batchtune.errors import ProbeError, ResultError
from batchtune.files import temporary_folder
from batchtune.probe.supervisor import script_error, script_request
from batchtune.processes.worker import WorkerLost
from batchtune.scripts import launching, sandbox
from batchtune.scripts.launching import mirror

PROGRAM = Path(__file__).with_name("ways_to_write.py")
HYDRA = "outputs/2026-11-29/10-00-00/version_0/checkpoints"
LARGE = 33 << 20


def refuse(*_, **__):
    raise OSError("refused")


@pytest.fixture(params=["mounts", "user namespace", "landlock"])
def protection(request, tmp_path, monkeypatch):
    """The way in which scripts are kept from files, where this kernel has it."""
    kind = request.param
    enter = {
        "mounts": sandbox.enter,
        "user namespace": partial(sandbox.enter, privileged=False),
        "landlock": refuse,
    }[kind]
    monkeypatch.setattr(sandbox, "enter", enter)
    if kind != "landlock":
        monkeypatch.setattr(sandbox, "confine", refuse)
    monkeypatch.chdir(tmp_path)  # a folder with little to copy
    with script_request(["true"]) as script:
        try:
            launching.start(script, environment).wait()
        except ProbeError as error:
            pytest.skip(error.message)
    yield kind


def environment(options):
    return dict(os.environ)


def ran(*command, times=1):
    """What a command prints that runs as a script does, in its last start."""
    with script_request(list(command)) as script:
        for _ in range(times):
            process = launching.start(script, environment, stdout=subprocess.PIPE)
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0
    return printed.decode()


def old_file(folder):
    folder.mkdir(parents=True)
    file = folder / FILE
    file.write_bytes(b"old content")
    return file


def make_layouts(root):
    """Make a project with a folder for each layout, and in each a file for each way to write."""
    project = root / "project"
    elsewhere = root / "elsewhere"
    plain = ["plain", "large", "many", "a/b/c/d/e", HYDRA]
    links = {"linked files": os.symlink, "hard links": os.link}
    for way in (*WAYS, TORCH):
        for layout in plain:
            old_file(project / layout / way)
        os.truncate(project / "large" / way / FILE, LARGE)
        for layout, link in links.items():
            (project / layout / way).mkdir(parents=True)
            link(old_file(elsewhere / layout / way), project / layout / way / FILE)
        old_file(elsewhere / "folder" / way)
    (project / "linked folder").symlink_to(elsewhere / "folder")
    for number in range(1001):
        (project / "many" / f"{number}.wav").touch()
    return [*plain, *links, "linked folder"]


def state_of(root, *, metadata):
    """What stands in each file and link below a folder, and with `metadata` all that is known of it."""
    state = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = None
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


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.process),
        pytest.param(["--torch"], marks=pytest.mark.slow),
    ],
    ids=["", "torch"],
)
def test_no_way_to_write_reaches_the_users_files(
    protection, options, tmp_path, monkeypatch
):
    layouts = make_layouts(tmp_path)
    assert len(layouts) == 8 and len(WAYS) == 30
    monkeypatch.chdir(tmp_path / "project")
    # What Landlock can't forbid: a file's mode and times.
    metadata = protection != "landlock"
    before = state_of(tmp_path, metadata=metadata)
    failed = ran(sys.executable, str(PROGRAM), *options, *layouts).splitlines()
    assert state_of(tmp_path, metadata=metadata) == before
    if metadata:  # all others succeeded, though in the scratch
        assert {line.rpartition(": ")[2] for line in failed} <= {"folder renamed"}


ARGUMENTS = """
import argparse, os, pathlib, sys, tempfile
parser = argparse.ArgumentParser()
parser.add_argument("--data", type=pathlib.Path)
data = parser.parse_args().data
print((data / "lengths.csv").read_text(), pathlib.Path("here.txt").read_text())
pathlib.Path("../out").mkdir()
pathlib.Path("../out/model.pt").write_text("new")
pathlib.Path("here.txt").write_text("new")
print(tempfile.gettempdir())
cache = pathlib.Path(os.environ["HF_HOME"], "downloaded")
print("cached" if cache.exists() else "downloading")
cache.touch()
pathlib.Path("/dev/shm", data.resolve().parent.name).touch()
"""


@pytest.mark.process
def test_arguments_may_leave_the_folder(protection, tmp_path, monkeypatch):
    """As in `cd sub; batchtune tune ../lengths.csv -- python ../train.py --data ../data`, started twice."""
    project = Path(tempfile.mkdtemp(dir=tmp_path))
    for folder in (project / "data", project / "sub", tmp_path / "cache"):
        folder.mkdir()
    (project / "data" / "lengths.csv").write_text("1 2")
    (project / "train.py").write_text(ARGUMENTS)
    (project / "sub" / "here.txt").write_text("kept")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(project / "sub")
    before = state_of(project, metadata=True)
    command = [sys.executable, "../train.py", "--data", "../data"]
    read, temporary, cache = ran(*command, times=2).splitlines()
    assert (read, cache) == ("1 2 kept", "cached")
    assert Path(temporary).parent.name.startswith("batchtune-")
    assert not Path(temporary).exists()  # it is removed at the end
    assert state_of(project, metadata=True) == before
    shared = Path("/dev/shm", project.name)
    if protection == "landlock":
        shared.unlink()
    else:
        assert not shared.exists()
        assert os.listdir(tmp_path / "cache") == []


@pytest.mark.process
def test_a_script_is_refused_where_nothing_protects_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "enter", refuse)
    monkeypatch.setattr(sandbox, "confine", refuse)
    with pytest.raises(ProbeError, match="nothing here protects your files") as raised:
        ran("touch", "new")
    assert "--scratch none" in (raised.value.hint or "")
    assert not (tmp_path / "new").exists()
    with script_request(["touch", "new"], "none") as script:
        assert launching.start(script, environment).wait() == 0
    assert (tmp_path / "new").exists()


@pytest.mark.process
def test_a_python_that_a_scheduler_starts_elsewhere_is_confined(tmp_path):
    outside = tmp_path / "outside"
    outside.touch()
    (tmp_path / "scratch").mkdir()
    options = {"outside": str(outside), "writable": [str(tmp_path / "scratch")]}
    program = f"""
from pathlib import Path
from batchtune.scripts.sandbox import stay_inside
for _ in range(20):  # Linux takes 16 at most
    stay_inside({options})
Path("scratch/new").touch()
try:
    Path("outside").write_text("new")
except PermissionError:
    print("kept")
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "Landlock" in ran.stderr or "syscall" in ran.stderr:
        pytest.skip("this kernel has no Landlock")
    assert (ran.stdout, ran.stderr) == ("kept\n", "")


def test_what_runs_on_other_machines_is_confined_in_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_NNODES", "2")
    with script_request(["srun", "python", "train.py"]) as script:
        (place,) = launching._places(script)
        assert place.folder.is_relative_to(script.scratch)
    monkeypatch.delenv("SLURM_NNODES")
    with script_request(["python", "train.py"]) as script:
        places = list(launching._places(script))
        assert [place.folder == tmp_path for place in places] == [True, False]
        monkeypatch.setattr(sandbox, "SHARED_MEMORY", str(tmp_path.parent))
        with pytest.raises(ProbeError, match="protects the folder"):
            list(launching._places(script))


def test_a_full_disk_is_said_to_be_full(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/last.pt")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "mirror", full)
    with script_request(["true"], str(tmp_path)) as script:
        places = launching._places(script)
        next(places)
        with pytest.raises(
            ProbeError, match=r"scratch folder .* /scratch/last.pt: No space left"
        ) as raised:
            next(places)
    assert "--scratch DIR" in (raised.value.hint or "")
    lost = WorkerLost(
        "crash", "ended with exit code 1", "OSError: No space left on device"
    )
    assert "--scratch DIR" in (script_error("python train.py", lost).hint or "")


def test_what_a_killed_process_left_is_removed(tmp_path):
    stale = tmp_path / "batchtune-stale"
    unlisted = stale / "layers" / "work"
    unlisted.mkdir(parents=True)
    unlisted.chmod(0)  # as overlayfs makes it
    (stale / "owner").touch()
    strange = tmp_path / "batchtune-1.0"
    strange.mkdir()
    with temporary_folder("batchtune-", tmp_path) as first:
        assert not stale.exists()
        with temporary_folder("batchtune-", tmp_path) as second:
            assert first != second and first.exists()
    assert os.listdir(tmp_path) == [strange.name]


def test_a_scratch_folder_that_is_not_there_is_named(tmp_path):
    with (
        pytest.raises(ResultError, match=r"missing can't be written: No such file"),
        script_request(["true"], str(tmp_path / "missing")),
    ):
        pass


def test_of_very_many_files_the_lower_folders_are_linked(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_IN_ALL", 10)
    project = tmp_path / "project"
    for speaker in "abcdef":
        (project / "clips" / speaker).mkdir(parents=True)
        (project / "clips" / speaker / "1.wav").touch()
    (project / "runs").mkdir()
    (project / "train.py").touch()
    copy = mirror(project, project / "scratch")  # which leaves itself out
    for own in ("clips", "runs", "train.py"):
        assert not (copy / own).is_symlink()
    speakers = list((copy / "clips").iterdir())
    assert sum(speaker.is_symlink() for speaker in speakers) == 2
    assert all((speaker / "1.wav").is_file() for speaker in speakers)
