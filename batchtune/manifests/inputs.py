"""What the user names → the sources to read: braces, patterns, lists, folders."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchtune.errors import ManifestError
from batchtune.manifests.headers import AUDIO_SUFFIXES
from batchtune.manifests.hf import hf_files
from batchtune.manifests.source import STDIN, Source
from batchtune.units import counted

# Of a folder as Kaldi and ESPnet lay it out, the first of these that is there tells the lengths.
_KALDI = ("utt2dur", "utt2num_samples", "speech_shape", "utt2num_frames", "segments", "reco2dur")
_ENDINGS = {
    "tar shards": (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"),
    "parquet files": (".parquet",),
    "arrow files": (".arrow",),
    "JSON Lines": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz"),
}
# Of a folder in which nothing else lies: beside audio or shards such files are no manifests.
_JSON, _JSON_ENDINGS = "JSON files", (".json", ".json.gz")
_AUDIO = "audio files"
_FORMATS = {
    "webdataset": "tar shards",
    "parquet": "parquet files",
    "arrow": "arrow files",
    "nemo": "JSON Lines",
    "lhotse": "JSON Lines",
    "audio": _AUDIO,
}
_FILES_AT_ONCE = 2000
_MOST_EXPANSIONS = 1_000_000
# NeMo's own braces, which shells leave alone: shard__OP_0..7_CL_.tar.
_OPEN, _CLOSE = "_OP_", "_CL_"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,12})\.\.(\d{1,12})")


@dataclass(frozen=True, slots=True)
class Input:
    """One source of a data set.

    Attributes:
        path: A file or `STDIN`, or the folder in which the files are.
        names: Relative to the folder; None for a file.
        kept: The source, once it is open: what was found out about it, or copied from a pipe, is not lost.
    """

    path: Path
    names: tuple[str, ...] | None = None
    kept: list[Source] = field(default_factory=list, compare=False, repr=False)

    def open(self) -> Source:
        """Raises ManifestError where it can't be read."""
        if self.kept:
            return self.kept[0]
        self.kept.append(Source(self.path, self.names))
        return self.kept[0]

    def __reduce__(self) -> tuple[type[Input], tuple[Path, tuple[str, ...] | None]]:
        """For another process, which opens the source itself."""
        return Input, (self.path, self.names)

    @property
    def size(self) -> int:
        """Bytes to read, 0 where that is not known; for files of which only headers are, a rough guess."""
        if self.names is not None:
            return len(self.names) * 16_384
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def expand(named: str | Path | Sequence[str | Path], wanted: str | None) -> list[Input]:
    """The sources that a user's words mean.

    Each may be a file; `-`; a folder; a pattern (`*`, `?`, `[…]`); braces (`shard-{000..127}.tar`,
    `{train,dev}.json`), also as NeMo writes them (`_OP_0..7_CL_`); or several of these, separated by commas.
    What exists is taken as it is, whatever characters its name has.

    Args:
        named: What the user gave, one or several.
        wanted: A format that the user named, which decides what is looked for in a folder.

    Raises:
        ManifestError: One of them means nothing, or a folder holds nothing known, or several kinds.
    """
    specs = [named] if isinstance(named, (str, Path)) else list(named)
    if any(str(spec) == "" for spec in specs):
        raise ManifestError("the name of a manifest is empty", "Is a variable of the shell not set?")
    if any("\0" in str(spec) for spec in specs):
        raise ManifestError("the name of a manifest holds a NUL character", "No file can have such a name.")
    found = [one for spec in specs for one in _expanded(str(spec), wanted)]
    if not found:
        raise ManifestError("no manifest is named", "Name a file, a folder or - for standard input.")
    if len(found) > 1:
        _refuse_twice(found)
    return found


def _refuse_twice(found: Sequence[Input]) -> None:
    seen: dict[tuple[str, tuple[str, ...] | None], Input] = {}
    for one in found:
        first = seen.setdefault((os.path.realpath(one.path), one.names), one)
        if first is not one:
            spelt = "" if first.path == one.path else f", once as {first.path}"
            raise ManifestError(f"{one.path} is named more than once{spelt}", "Its examples would count twice.")


def _expanded(spec: str, wanted: str | None) -> Iterator[Input]:
    if spec == str(STDIN):
        yield Input(STDIN)
    elif os.path.exists(spec):
        yield from _inputs(Path(spec), wanted)
    elif "," in spec and (parts := _split(spec)) != [spec]:
        for part in parts:
            yield from _expanded(part, wanted)
    else:
        for path in _braces(_plain_braces(spec), spec):
            yield from _globbed(path, spec, wanted)


def _globbed(path: str, spec: str, wanted: str | None) -> Iterator[Input]:
    if os.path.exists(path) or not glob.has_magic(path):
        yield from _inputs(Path(path), wanted)
        return
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise ManifestError(
            f"nothing matches {spec}", "Check the pattern; quote it, so that the shell leaves it alone."
        )
    for match in matches:
        yield from _inputs(Path(match), wanted)


def _split(spec: str) -> list[str]:
    """The parts between commas outside braces."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(spec):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append(spec[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, spec[start:]) if part.strip()]


def _plain_braces(spec: str) -> str:
    if _OPEN in spec and _CLOSE in spec:
        return spec.replace(_OPEN, "{").replace(_CLOSE, "}")
    return spec


def _braces(pattern: str, spec: str) -> list[str]:
    """As bash expands them: a range keeps the leading zeros of its ends."""
    pieces = _BRACES.split(pattern)
    choices = [_choices(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    total = 1
    for options in choices:
        total *= len(options)
    if total > _MOST_EXPANSIONS:
        raise ManifestError(f"{spec} means {total:,} files", f"At most {_MOST_EXPANSIONS:,} can be named at once.")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(inside: str) -> Sequence[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= _MOST_EXPANSIONS:
        raise ManifestError(f"{{{inside}}} means {abs(last - first) + 1:,} names", "Check the ends of the range.")
    padded = any(len(end) > 1 and end.startswith("0") for end in match.groups())
    width = max(map(len, match.groups())) if padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]


def _inputs(path: Path, wanted: str | None) -> Iterator[Input]:
    if path.is_dir():
        yield from _folder(path, wanted)
    elif _suffix(path.name) in AUDIO_SUFFIXES and wanted in (None, "audio"):
        if not path.exists():
            raise ManifestError(f"{path} does not exist", "Check the path.")
        yield Input(path.parent, (path.name,))
    else:
        yield Input(path)


def _folder(folder: Path, wanted: str | None) -> Iterator[Input]:
    arrows = hf_files(folder)
    if arrows is not None:
        yield from map(Input, arrows)
        return
    names = _files(folder)
    if wanted not in _FORMATS:
        kaldi = next((name for known in _KALDI for name in (known, f"{known}.gz") if name in names), None)
        if kaldi is not None:
            yield Input(folder / kaldi)
            return
    kinds = {kind: [name for name in names if name.lower().endswith(ends)] for kind, ends in _ENDINGS.items()}
    kinds[_AUDIO] = [name for name in names if _suffix(name) in AUDIO_SUFFIXES]
    if wanted in _FORMATS:
        kinds = {kind: found for kind, found in kinds.items() if kind == _FORMATS[wanted]}
    held = {kind: found for kind, found in kinds.items() if found}
    if not held and _FORMATS.get(wanted or "", _FORMATS["nemo"]) == _FORMATS["nemo"]:
        held = {_JSON: found} if (found := [name for name in names if name.endswith(_JSON_ENDINGS)]) else {}
    if len(held) > 1:
        listed = ", ".join(counted(len(found), kind.removesuffix("s")) for kind, found in held.items())
        raise ManifestError(
            f"{folder} is a folder in which different things lie: {listed}",
            "Say which is the data set, with --format or with a pattern such as 'FOLDER/*.tar'.",
        )
    if not held:
        raise ManifestError(
            f"{folder} is a folder in which nothing {f'of the format {wanted}' if wanted else 'known'} lies",
            "Known: audio files, tar shards, parquet, arrow or JSON files, a data set that Hugging Face's "
            f"datasets saved, a Kaldi folder ({', '.join(_KALDI)}). Or name a file.",
        )
    if _AUDIO in held:
        yield from (Input(folder, chunk) for chunk in _chunks(names))
    else:
        yield from (Input(folder / name) for found in held.values() for name in found)


def _files(folder: Path) -> list[str]:
    """All files below a folder, relative to it, sorted; hidden ones are none."""
    found = []

    def refuse(error: OSError) -> None:
        raise ManifestError(f"{error.filename} can't be listed: {error.strerror}", "Ask for the right to read it.")

    entered: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        if real in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(parent, folder)
        prefix = "" if below == "." else f"{below}/"
        found += [prefix + name for name in files if not name.startswith(".")]
    return sorted(found, key=lambda name: (_stem(name), name))


def _chunks(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The names in handy numbers; files of one stem stay together."""
    chunk: list[str] = []
    for _, group in itertools.groupby(names, key=_stem):
        chunk += group
        if len(chunk) >= _FILES_AT_ONCE:
            yield tuple(chunk)
            chunk = []
    if chunk:
        yield tuple(chunk)


def _stem(name: str) -> str:
    """What files of one example have in common: `x` of x.wav and x.normalized.txt, with the folder."""
    folder, base = os.path.split(name)
    return os.path.join(folder, base.split(".", 1)[0])


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower().removeprefix(".")
