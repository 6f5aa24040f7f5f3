"""Overwrites and deletes files in many ways, each in a folder of its own; names the ways that raise an error.

    python ways_to_write.py [--torch] LAYOUT...

With `--torch` PyTorch writes alone, whose import takes seconds. A layout is a folder with a folder for each way, which
holds `last.pt`.
"""

import contextlib
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

FILE = "last.pt"
NEW = b"new, and longer than what was there before"


def shell(line):
    return lambda path: subprocess.run(
        ["sh", "-c", line, "sh", path, os.path.dirname(path)],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def opened(mode):
    def write(path):
        with open(path, mode) as file:
            file.write(NEW)

    return write


def descriptor(flags):
    def write(path):
        file = os.open(path, os.O_WRONLY | flags)
        os.write(file, NEW)
        os.close(file)

    return write


def python(code):
    return lambda path: subprocess.run(
        [sys.executable, "-c", code, path], check=True, stderr=subprocess.DEVNULL
    )


def beside(path):
    new = f"{path}.new"
    Path(new).write_bytes(NEW)
    return new


def torch_save(path):
    import torch

    torch.save(torch.ones(9), path)


def mapped(path):
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4) as memory:
        memory[:4] = b"new!"


def hard_linked(path):
    os.link(path, f"{path}.link")
    Path(f"{path}.link").write_bytes(NEW)


def linked(path):
    os.symlink(os.path.realpath(path), f"{path}.link")
    Path(f"{path}.link").write_bytes(NEW)


def made_writable(path):
    os.chmod(path, 0o666)
    Path(path).write_bytes(NEW)


def database(path):
    os.remove(path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table t (a)")


def copied_in_kernel(path):
    with open(beside(path), "rb") as source, open(path, "r+b") as target:
        os.copy_file_range(source.fileno(), target.fileno(), len(NEW))


def folder_renamed(path):
    os.rename(os.path.dirname(path), f"{os.path.dirname(path)}-old")


WAYS = {
    "open w": opened("wb"),
    "open r+": opened("r+b"),
    "open a": opened("ab"),
    "os.open": descriptor(0),
    "os.open O_TRUNC": descriptor(os.O_TRUNC),
    "os.truncate": lambda path: os.truncate(path, 0),
    "os.remove": os.remove,
    "os.rename": lambda path: os.rename(path, f"{path}.old"),
    "os.replace": lambda path: os.replace(beside(path), path),
    "os.chmod": lambda path: os.chmod(path, 0o600),
    "os.utime": lambda path: os.utime(path, (0, 0)),
    "os.copy_file_range": copied_in_kernel,
    "shutil.rmtree": lambda path: shutil.rmtree(os.path.dirname(path)),
    "shutil.move": lambda path: shutil.move(beside(path), path),
    "shutil.copyfile": lambda path: shutil.copyfile(beside(path), path),
    "pathlib write": lambda path: Path(path).write_text("new"),
    "absolute path": lambda path: Path(path).absolute().write_bytes(NEW),
    "real path": lambda path: Path(path).resolve().write_bytes(NEW),
    "mmap": mapped,
    "sqlite": database,
    "hard link": hard_linked,
    "symbolic link": linked,
    "chmod and write": made_writable,
    "folder renamed": folder_renamed,
    "subprocess": python("import sys; open(sys.argv[1], 'w').write('new')"),
    "sh >": shell('echo new > "$1"'),
    "sh >>": shell('echo new >> "$1"'),
    "rm -rf": shell('rm -rf "$2"'),
    "sed -i": shell('sed -i s/old/new/ "$1"'),
    "dd": shell('echo new | dd of="$1" conv=notrunc'),
}


TORCH = "torch.save"


def main():
    layouts = sys.argv[1:]
    ways = WAYS
    if layouts[0] == "--torch":
        ways = {TORCH: torch_save}
        del layouts[0]
    for layout in layouts:
        for name, write in ways.items():
            try:
                write(os.path.join(layout, name, FILE))
            except (OSError, RuntimeError, subprocess.CalledProcessError, shutil.Error):
                print(f"{layout}: {name}")


if __name__ == "__main__":
    main()
