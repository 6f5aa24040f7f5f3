"""Writes files whole or not at all, and keeps secrets out of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from batchtune.errors import ResultError, without_secrets
from batchtune.units import format_size

_OWNER = "owner"
"""A file in a temporary folder that its process holds locked."""


def write_whole(path: Path, content: str | bytes, *, follow: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; arguments as in `writing_whole`."""
    with writing_whole(path, follow=follow) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing_whole(
    path: Path, *, synced: bool = True, follow: bool = True
) -> Iterator[IO[bytes]]:
    """Open a temporary file in the same folder; it replaces the file when the block ends, or is removed on failure.

    The folder is created if missing; a file that exists keeps its permissions. If `synced`, the file survives a power
    loss. If `follow`, a link is followed, and a device or pipe written to: not in a run folder, which may come from
    anywhere, with links to any file. Raises ResultError if the file can't be written.
    """
    temporary: str | None = None
    try:
        target = path.resolve() if follow else path
        if follow and target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as stream:
                yield stream
            return
        make_folder(target.parent)
        handle, temporary = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        )
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            if synced:
                os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        permissions = 0o666 & ~mask
        if target.is_file():
            permissions = stat.S_IMODE(target.lstat().st_mode)
        os.chmod(temporary, permissions)
        os.replace(temporary, target)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: str | Path | None) -> Iterator[Path]:
    """Make a folder that is removed at the end; if this process is killed, by the next that makes one there.

    Raises ResultError if it can't be made.
    """
    parent = Path(parent or tempfile.gettempdir())
    for stale in parent.glob(f"{prefix}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            if stale.parent.lstat().st_uid == os.geteuid():
                with stale.open() as owner:
                    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(stale.parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unlocked = folder / f"{_OWNER}.part"
        owner = unlocked.open("w")
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(owner, fcntl.LOCK_EX)
        unlocked.rename(folder / _OWNER)
    except OSError as error:
        raise unwritable(parent, error) from error
    with owner:
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible, with what lies in folders that may not be listed (overlayfs leaves some)."""
    for root, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def open_to_append(path: Path) -> int:
    """Open a file to add lines to, without following a link, and return its descriptor; its folder is made.

    Raises ResultError if it can't be written, or is not an ordinary file: a pipe would wait for its reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        make_folder(path.parent)
        file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise unwritable(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ResultError(f"{path} is not an ordinary file", "Remove it.")
    return file


def read_regular(
    path: Path, most_bytes: int, hint: str | None, *, name: str | None = None
) -> bytes:
    """Read a file that may come from anywhere, called `name` in messages, by default its path. Raises as `reading`."""
    with reading(path, most_bytes, hint, name=name) as file:
        # Read as much as there is: all that is asked for is allocated at once.
        return file.read(os.fstat(file.fileno()).st_size)


@contextlib.contextmanager
def reading(
    path: Path, most_bytes: int, hint: str | None = None, *, name: str | None = None
) -> Iterator[IO[bytes]]:
    """Open a file that may come from anywhere, called `name` in messages, by default its path.

    Raises ResultError if it is missing, unreadable, too large, or not an ordinary file: a pipe might never end.
    """
    name = name or str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ResultError(
                f"{name} is {'a folder' if stat.S_ISDIR(found.st_mode) else 'not an ordinary file'}",
                hint,
            )
        if found.st_size > most_bytes:
            raise ResultError(
                f"{name} is larger than {format_size(most_bytes)}: batchtune writes no such file",
                hint,
            )
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise ResultError(f"{name} does not exist", hint) from None
    except OSError as error:
        raise ResultError(
            f"{name} can't be read: {error.strerror or error}", hint
        ) from error


def check_writable(folder: Path) -> None:
    """Raise ResultError if no file can be made in the folder, before work whose result goes there."""
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ResultError(
            f"{folder} can't be written to: the folder, or its disk, is read-only for you",
            "Copy the run folder to a place where you can write, and name that.",
        )


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists, and those that it lies in. Raises ResultError if it can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        if folder.is_symlink():
            reason = "it is a link that leads to no folder"
        raise ResultError(
            f"the folder {folder} can't be created: {reason}",
            "Choose another with --run or -o.",
        ) from error


def unwritable(path: Path, error: OSError) -> ResultError:
    """Return the error for a file that can't be written, with the system's reason."""
    return ResultError(
        f"{path} can't be written: {error.strerror or error}",
        "Nothing was left half-written. Make room or choose another place, then run the same command again.",
    )


# Leaves secrets out of what is written to files: by the name of an option, and by the shape of a value.
#
# In place of each stands the beginning of its SHA-256, so that two commands can still be told apart.

_NAME = (
    r"(?:[\w.-]*[_.-])?(?:token|secret|password|passwd|passphrase|passcode|credentials?|authorization|bearer"
    r"|(?:api|access|secret|private|account|encryption|wandb|auth)[_-]?(?:key|token)|apikey|pat)"
)
# Tokens of a vocabulary.
_VOCABULARY = (
    r"(?:[\w.-]*[_.-])?(?:pad|eos|bos|unk|mask|sep|cls|image|audio|video|speech|text|stop|start|end|blank|space|special"
    r"|new|extra|prefix|suffix|per|decoder|language|lang|task)[_-]token"
)
_SECRET_NAME = re.compile(rf"(?!{_VOCABULARY}$){_NAME}", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?!-*{_VOCABULARY}[=:\s])((?:{_NAME}[=:]\s*|--{_NAME}\s+)(?:bearer\s+|basic\s+)?)"
    r"(?!-)([^\s'\",;]+)",
    re.IGNORECASE,
)
_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{10,}\.[\w-]+\.[\w-]*)"
)
# They say whether there is a secret.
_PLAIN = {"true", "false", "none", "null", "yes", "no", "0", "1", ""}


def redacted(text: str) -> str:
    """Return text without users and queries of URLs, and without what looks like a secret."""
    text = _ASSIGNED.sub(lambda match: match[1] + _hidden(match[2]), text)
    text = _SHAPE.sub(lambda match: _hidden(match[0]), text)
    return redacted_url(text)


def redacted_url(text: str) -> str:
    """Return the text of a URL without its user and the values of its query."""
    public = without_secrets(text)
    if public == text:
        return text
    return f"{public}#{_hidden(text)}"


def redacted_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets."""
    public = []
    is_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_secret and not word.startswith("-"):
            public.append(_hidden(word))
        elif equals and _is_secret(name):
            public.append(f"{name}={_hidden(value)}")
        else:
            public.append(redacted(word))
        is_secret = word.startswith("-") and _is_secret(word)
    return public


def command_text(words: Sequence[str]) -> str:
    """Return a command as a line for a shell, without secrets."""
    return shlex.join(redacted_command(words))


def redacted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without secrets in their texts."""
    return {
        name: redacted(f"{name}={value}").removeprefix(f"{name}=")
        if isinstance(value, str)
        else value
        for name, value in options.items()
    }


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.fullmatch(name.lstrip("-+")) is not None


def _hidden(secret: str) -> str:
    """Return what stands for a secret."""
    if secret.lower() in _PLAIN or secret.startswith("sha256:"):
        return secret
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
