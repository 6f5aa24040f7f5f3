"""Runs a command on a disk that is too small for one of its files after the other, then on one with room.

Started in a user and mount namespace of its own, so that it may mount: `unshare -rm python full_disk.py FOLDER
COMMAND...`, where the command is a `batchtune tune` whose run folder is FOLDER/run. The disk is a tmpfs of a few
pages, mounted there. It is gone with this process, so all that it held is copied to FOLDER/after-STAGE, and
FOLDER/stages.json tells how each stage ended. Exits with 77 where nothing may be mounted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

NOT_PERMITTED = 77
PAGE = os.sysconf("SC_PAGE_SIZE")
ROOM = 256


class Disk:
    """A tmpfs: what is free on it is counted in pages."""

    def __init__(self, path: Path, pages: int) -> None:
        self.path = path
        path.mkdir()
        size = f"size={pages * PAGE}"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], capture_output=True, text=True
        )
        if mounted.returncode:
            print(mounted.stderr.strip())
            raise SystemExit(NOT_PERMITTED)

    def leave(self, pages: int) -> None:
        """Makes the disk so large or so small that this much is free."""
        facts = os.statvfs(self.path)
        used = facts.f_blocks - facts.f_bfree
        subprocess.run(["mount", "-o", f"remount,size={(used + pages) * PAGE}", str(self.path)], check=True)

    def pages_of(self, name: str) -> int:
        return -(-(self.path / name).stat().st_size // PAGE)


def main() -> None:
    """Each stage leaves so little room that one more file can't be written; after it the same command goes on."""
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    stages: dict[str, dict[str, object]] = {}

    def run(stage: str) -> None:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        stages[stage] = {"returncode": ran.returncode, "stderr": ran.stderr}
        shutil.copytree(folder / "run", folder / f"after-{stage}")

    disk = Disk(folder / "run", pages=2)  # one for run.json, one for the first lines of the journal
    run("trials.jsonl")
    disk.leave(3)  # for the rest of the journal, which is less than two pages, and for a part of probe.json
    run("probe.json")
    disk.leave(10)  # enough for probe.json, not for sweep.json
    run("sweep.json")
    disk.leave(ROOM)
    run("room")
    sweep_pages = disk.pages_of("sweep.json")
    for name in ("sweep.json", "sampler.yaml"):
        (disk.path / name).unlink()
    disk.leave(sweep_pages)
    run("sampler.yaml")
    (folder / "stages.json").write_text(json.dumps(stages))


if __name__ == "__main__":
    main()
