"""The scratch folder: it reads like the working folder, and nothing is written through it."""

import subprocess
import sys
from pathlib import Path

import pytest

import batchtune.scripts.scratch
from batchtune.scripts.scratch import mirror

WRITES = """
import os, sys
from batchtune.scripts.scratch import keep_links_unwritten
keep_links_unwritten(os.getcwd())
with open("model.pt", "w") as file:
    file.write("new")
with open("logs/log.txt", "a") as file:
    file.write(" and more")
with open("logs/log.txt") as file:
    print(file.read())
os.system("echo gone > table.txt")
os.remove("data.csv")
os.makedirs("checkpoints/1")
"""


@pytest.mark.process
@pytest.mark.parametrize("largest_copy", [100, 5], ids=["copies", "links"])
def test_what_a_script_writes_stays_in_the_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest_copy: int
) -> None:
    monkeypatch.setattr(batchtune.scripts.scratch, "_LARGEST_COPY", largest_copy)
    folder = tmp_path / "project"
    (folder / "logs").mkdir(parents=True)
    contents = {
        "model.pt": "an earlier one",
        "logs/log.txt": "one line",
        "data.csv": "1,2",
        "table.txt": "kept",
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    scratch = tmp_path / "scratch"
    mirror(folder, scratch)
    assert (scratch / "data.csv").read_text() == "1,2"
    assert (scratch / "model.pt").is_symlink() == (largest_copy == 5)
    ran = subprocess.run(
        [sys.executable, "-c", WRITES],
        cwd=scratch,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "one line and more\n"
    assert (scratch / "model.pt").read_text() == "new"
    assert {name: (folder / name).read_text() for name in contents} == contents
    assert sorted(path.name for path in folder.iterdir()) == [
        "data.csv",
        "logs",
        "model.pt",
        "table.txt",
    ]


def test_folders_of_data_are_linked_as_a_whole(tmp_path: Path) -> None:
    data = tmp_path / "project" / "clips"
    data.mkdir(parents=True)
    for number in range(1001):
        (data / f"{number}.wav").touch()
    mirror(tmp_path / "project", tmp_path / "scratch")
    assert (tmp_path / "scratch" / "clips").is_symlink()


def test_of_very_many_files_the_lower_folders_are_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchtune.scripts.scratch, "_MOST_IN_ALL", 10)
    project = tmp_path / "project"
    for speaker in "abcdef":
        (project / "clips" / speaker).mkdir(parents=True)
        (project / "clips" / speaker / "1.wav").touch()
    (project / "runs").mkdir()
    (project / "train.py").touch()
    scratch = tmp_path / "scratch"
    mirror(project, scratch)
    for own in ("clips", "runs", "train.py"):
        assert not (scratch / own).is_symlink()
    speakers = list((scratch / "clips").iterdir())
    assert sum(speaker.is_symlink() for speaker in speakers) == 2
    assert all((speaker / "1.wav").is_file() for speaker in speakers)
