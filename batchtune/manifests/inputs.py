"""The user's words: which sources are meant, and the options for reading them, with the list of formats.

To add a format: a class in `manifests.formats`, and a line in `_ALL` here.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias, get_args

from braceexpand import braceexpand
from msgspec import structs

from batchtune.errors import (
    ManifestError,
    ResultError,
    UsageError,
    did_you_mean,
    listed,
    shortened,
)
from batchtune.lengths import UNITS, Unit
from batchtune.manifests.formats import Format, columnar, members, text
from batchtune.manifests.source import STDIN, Source
from batchtune.manifests.storage import Listed, is_folder, is_url, listed_objects
from batchtune.results import Counting, ReadingRecord, Reduction
from batchtune.units import counted

Manifest: TypeAlias = "str | Path | Sequence[str | Path]"

# Files of a folder as Kaldi and ESPnet lay it out, the most useful first.
_KALDI_FILES = (
    "utt2dur",
    "utt2num_samples",
    "speech_shape",
    "utt2num_frames",
    "segments",
    "reco2dur",
)
_FILES_AT_ONCE = 2000
_MOST_EXPANSIONS = 1_000_000
# NeMo's own braces, which shells leave alone: shard__OP_0..7_CL_.tar.
_NEMO_BRACES = re.compile(r"_OP_([^{}]*?)_CL_")
# What braceexpand takes as a range of numbers or of letters, and the signs that build lists.
_PARTS_OF_BRACES = re.compile(
    r"\{(?P<first>-?\d+)\.\.(?P<last>-?\d+)(?:\.\.-?(?P<step>\d+))?\}"
    r"|\{[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?\}|[{},]"
)
# What Hugging Face's datasets keep next to a data set.
_HIDDEN = re.compile(r"(?:^|/)\.")
_CACHE = re.compile(r"(?:^|/)cache-[^/]*\.arrow$")


def expand(named: Manifest, wanted: str | None) -> list[Source]:
    """Return the sources that a user's words mean.

    Each may be a file; `-`; a URL (of a file, a folder or a pattern); a folder; a pattern (`*`, `?`, `[…]`); braces
    (`shard-{000..127}.tar`, `{train,dev}.json`), also as NeMo writes them (`_OP_0..7_CL_`); or several of these,
    separated by commas. What exists is taken as it is, whatever characters its name has. In a folder, this takes the
    files of the format `wanted` or, if that is None, of the only format in it.

    Raises ManifestError if one of them means nothing, or a folder has no supported files, or several formats.
    """
    specs = [named] if isinstance(named, (str, Path)) else named
    sources: list[Source] = []
    for spec in map(str, specs):
        sources += _sources_named(spec, wanted)
    if not sources:
        raise ManifestError(
            "no manifest is named", "Name a file, a folder or - for standard input."
        )
    seen = Counter((_identity(source), source.names) for source in sources)
    for (path, _), count in seen.items():
        if count > 1:
            raise ManifestError(
                f"duplicate input: {path} is named more than once",
                "Name each file once.",
            )
    return sources


def _identity(source: Source) -> str:
    """Return what is the same for all names of a file."""
    if source.is_remote:
        return str(source.path)
    return os.path.realpath(source.path)


def _sources_named(spec: str, wanted: str | None) -> Iterator[Source]:
    if not spec:
        raise ManifestError(
            "the name of a manifest is empty", "Is a variable of the shell not set?"
        )
    if _exists(spec):
        yield from _sources_at(Path(spec), wanted)
        return
    names = [spec]
    if not (is_url(spec) and "?" in spec):  # a signed URL is taken as it is
        names = _expanded_braces(spec)
    for name in names:
        if name == str(STDIN):
            yield Source(STDIN)
        elif is_url(name):
            yield from _sources_behind(name, wanted, is_alone=len(names) == 1)
        elif _exists(name) or not glob.has_magic(name):
            yield from _sources_at(Path(name), wanted)
        else:
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise ManifestError(
                    f"nothing matches {spec}",
                    "Check the pattern; quote it, so that the shell leaves it alone.",
                )
            for match in matches:
                yield from _sources_at(Path(match), wanted, is_named=False)


def _exists(name: str) -> bool:
    try:
        os.lstat(name)
    except OSError:
        return False
    except ValueError:  # a NUL character, or half a surrogate pair
        raise ManifestError(
            f"{shortened(name)} can't name a manifest",
            "It contains a character that no file name can have.",
        ) from None
    return name != str(STDIN)


def _expanded_braces(spec: str) -> list[str]:
    """Return the names that braces (bash's and NeMo's), and commas outside them, stand for."""
    pattern = _NEMO_BRACES.sub(r"{\1}", spec)
    if pattern.count("{") != pattern.count("}"):
        return [spec]
    pattern = f"{{{pattern},}}"
    if _num_expansions(pattern) > _MOST_EXPANSIONS:
        raise ManifestError(
            f"{shortened(spec)} means more than {_MOST_EXPANSIONS:,} files",
            f"At most {_MOST_EXPANSIONS:,} can be named at once.",
        )
    names = braceexpand(pattern, escape=False)
    return [name.strip() for name in names if name.strip()] or [spec]


def _num_expansions(pattern: str) -> int:
    """Return the number of names that a pattern's braces stand for.

    It is counted first because braceexpand holds every number of a range and every name of an inner brace at once.
    """
    # For every open brace, the names before its last comma, and those since. A comma outside braces is a character.
    before_comma = [0]
    since_comma = [1]
    for match in _PARTS_OF_BRACES.finditer(pattern):
        part = match[0]
        if match["first"]:
            span = abs(int(match["last"]) - int(match["first"]))
            since_comma[-1] *= span // (int(match["step"] or 1) or 1) + 1
        elif part == "{":
            before_comma.append(0)
            since_comma.append(1)
        elif part not in ("}", ","):
            since_comma[-1] *= len(list(braceexpand(part)))
        elif len(since_comma) > 1:
            before_comma[-1] += since_comma[-1]
            since_comma[-1] = 1
            if part == "}":
                since_comma.pop()
                since_comma[-1] *= before_comma.pop()
    return since_comma[0]


def _sources_behind(url: str, wanted: str | None, *, is_alone: bool) -> list[Source]:
    """Return the sources that a URL means; only one that `is_alone` is asked for whether it is a folder."""
    if "*" in url:
        listed = listed_objects(url)
        if not listed:
            raise ManifestError(f"nothing matches {url}", "Check the pattern.")
        return [_source_at_url(name, wanted, found) for name, found in listed.items()]
    if not (url.endswith("/") or (is_alone and is_folder(url))):
        return [_source_at_url(url, wanted, None)]
    folder = url.rstrip("/")
    found_by_name = {
        name.removeprefix(f"{folder}/"): found
        for name, found in listed_objects(f"{folder}/").items()
    }
    return _sources_of(
        folder,
        [name for name in found_by_name if not _HIDDEN.search(name)],
        wanted,
        lambda name: Source(f"{folder}/{name}", None, found_by_name[name]),
    )


def _source_at_url(url: str, wanted: str | None, listed: Listed | None) -> Source:
    if _is_audio(url, wanted):
        folder, _, name = url.rpartition("/")
        return Source(folder, (name,))
    return Source(url, None, listed)


def _is_audio(name: str, wanted: str | None) -> bool:
    """Return whether a file is one of the examples, by its name."""
    audio = FORMATS["audio"]
    return wanted in (None, audio.name) and name.lower().endswith(audio.endings)


def _sources_at(
    path: Path, wanted: str | None, *, is_named: bool = True
) -> list[Source]:
    if path.is_dir():
        return _sources_in(path, wanted)
    if _is_audio(path.name, wanted) and path.exists():
        return [Source(path.parent, (path.name,))]
    return [Source(path, is_named=is_named)]


def _sources_in(folder: Path, wanted: str | None) -> list[Source]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/dataset_info.json"))
        raise ManifestError(
            f"{folder} is a DatasetDict, a folder of several data sets: {listed(splits)}",
            f"Name one of them, as {folder}/NAME.",
        )
    return _sources_of(
        folder,
        _files_below(folder),
        wanted,
        lambda name: Source(folder / name, is_named=False),
    )


def _sources_of(
    folder: Path | str,
    names: Sequence[str],
    wanted: str | None,
    source_of: Callable[[str], Source],
) -> list[Source]:
    """Return what is read of these files of a folder: one of Kaldi's, or all of the only format."""
    if wanted in (None, "kaldi"):
        for name in _KALDI_FILES:
            if name in names:
                return [source_of(name)]
    format_name, files = _of_one_format(folder, names, wanted)
    if format_name != "audio":
        return [source_of(name) for name in files]
    starts = range(0, len(files), _FILES_AT_ONCE)
    return [Source(folder, files[start : start + _FILES_AT_ONCE]) for start in starts]


def _of_one_format(
    folder: Path | str, found: Sequence[str], wanted: str | None
) -> tuple[str, list[str]]:
    """Return the only format that files of a folder have by their names, and these files. Raises ManifestError."""
    names = [name for name in found if not _CACHE.search(name)]
    names_by_format: dict[str, list[str]] = {}
    for member in FORMATS.values():
        files = [
            name for name in names if name.lower().endswith(member.endings or "\0")
        ]
        if files and wanted in (None, member.name):
            names_by_format[member.name] = files
    if len(names_by_format) > 1:
        counts = [
            f"{counted(len(files), 'file')} of {name}"
            for name, files in names_by_format.items()
        ]
        raise ManifestError(
            f"{folder} is a folder with several formats: {', '.join(counts)}",
            "Say which is the data set, with --format or with a pattern such as 'FOLDER/*.tar'.",
        )
    for format_name, files in names_by_format.items():
        return format_name, files
    raise ManifestError(
        f"{folder} is a folder that contains no supported files",
        "Supported: audio files, tar shards, Parquet, Arrow or JSONL files, a data set that Hugging Face's datasets "
        f"saved, a Kaldi folder ({', '.join(_KALDI_FILES)}). Or name a file.",
    )


def _files_below(folder: Path) -> list[str]:
    """Return all files below a folder but hidden ones, relative to it, sorted."""

    def refuse(error: OSError) -> None:
        raise ManifestError(
            f"{error.filename} can't be listed: {error.strerror}",
            "Ask for the right to read it.",
        )

    names = []
    entered = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real_path = os.path.realpath(parent)
        if real_path in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(parent, folder)
        names += [
            os.path.normpath(os.path.join(below, name))
            for name in files
            if not name.startswith(".")
        ]
    return sorted(names)


# Options

# Beyond these no data set goes, whatever its unit; sums and squares of lengths must stay exact and finite.
SMALLEST = 1e-9
LARGEST = 1e15

COUNTINGS: tuple[Counting, ...] = get_args(Counting)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

# The exponent is bounded: Fraction("1e999999999") would compute for hours.
_NUMBER = r"\+?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?"
_SCALE = re.compile(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER})\s*)?", re.ASCII)
# Only one option of each pair can be given: a tokenizer counts tokens, and a target has one length.
_EXCLUSIVE = (("measure", "tokenizer"), ("target_file", "target_key"))


class ReadOptions(ReadingRecord, frozen=True, kw_only=True):
    """How a manifest is read; None for every option that the user does not give. Raises UsageError for a wrong one.

    Attributes:
        format: A name in `batchtune.manifests.FORMATS`; None to detect it from the content.
        length_key: The column (or JSON key) of the lengths, or several (`a+b`) whose sum is the length; None to find
            it among the known names.
        unit: Unit of the lengths after `length_scale`; None to take it from the format or column.
        length_scale: Exact factor for lengths, but not for target lengths: a number or a fraction, `1/16000`.
        min_length, max_length: Inclusive, after scaling.
        truncate: Where the training cuts longer examples off, after scaling: they count as this long.
        skip_invalid: Leave out and count invalid rows, and the rest of a damaged source if there are several.
        measure: How the length of a text is counted; None for characters.
        tokenizer: The path of a `tokenizer.json`, or of its folder, whose tokens are counted instead.
        reduce: How a list becomes one length; None where lists are invalid.
        target_file: Files that hold the target lengths, named as manifests are.
    """

    def __post_init__(self) -> None:
        if self.length_scale is not None:
            parse_scale(self.length_scale)
        check_choice("--unit", self.unit, UNITS)
        check_choice("--measure", self.measure, COUNTINGS)
        check_choice("--reduce", self.reduce, REDUCTIONS)
        for name, other in _EXCLUSIVE:
            if getattr(self, name) is not None and getattr(self, other) is not None:
                names = f"--{name} and --{other}".replace("_", "-")
                raise UsageError(
                    f"{names} exclude each other", "Leave one of them out."
                )
        shortest = self.min_length or 0.0
        longest = math.inf if self.max_length is None else self.max_length
        if not shortest <= longest:
            raise UsageError(
                f"no example has a length from --min-length {shortest:.15g} to --max-length {longest:.15g}",
                "Exchange them, or leave one out.",
            )
        if (
            self.truncate is not None
            and not max(shortest, SMALLEST) <= self.truncate <= LARGEST
        ):
            raise UsageError(
                f"--truncate {self.truncate:.15g} leaves no length above {shortest:.15g}",
                "Give the length at which your training cuts examples off.",
            )

    @property
    def factor(self) -> Fraction | None:
        """The length scale, as a number."""
        return None if self.length_scale is None else parse_scale(self.length_scale)

    @property
    def counts_texts(self) -> bool:
        """Whether the user says how texts are counted."""
        return self.measure is not None or self.tokenizer is not None

    def text_unit(self, default: Unit) -> Unit:
        """Return the unit that texts are counted in, by default this one."""
        return "tokens" if self.tokenizer is not None else self.measure or default

    def record(self) -> ReadingRecord:
        """Return them as result files hold them."""
        return ReadingRecord(**structs.asdict(self))

    def completed(self, record: ReadingRecord) -> ReadOptions:
        """Return these options, completed by those of a result file that fit them. Raises ResultError."""
        recorded = structs.asdict(record)
        try:
            ReadOptions(**recorded)
        except UsageError as error:
            raise ResultError(
                f"how the run's manifest was read is damaged: {error.message}",
                "Create it again with the command that wrote it.",
            ) from error
        # 0.0 is given, though it equals False.
        given = {
            name
            for name, value in structs.asdict(self).items()
            if value is not None and value is not False
        }
        barred = set(given)
        for pair in _EXCLUSIVE:
            if given & set(pair):
                barred.update(pair)
        if "length_key" in given and self.length_key != record.length_key:
            # Of that column.
            barred.update(("unit", "length_scale", "measure", "tokenizer", "reduce"))
        return structs.replace(
            self,
            **{name: value for name, value in recorded.items() if name not in barred},
        )


def check_choice(name: str, choice: str | None, known: Iterable[str]) -> None:
    """Raise UsageError if a choice is unknown; the hint names all, and the nearest."""
    if choice is not None and choice not in known:
        raise UsageError(
            f"unknown {name} {shortened(choice)}",
            f"{did_you_mean(choice, known)}Known: {', '.join(known)}.",
        )


def parse_scale(text: str) -> Fraction:
    """Read a length scale such as `0.001` or `1/16000`, exactly. Raises UsageError if it is not above 0, or absurd."""
    match = _SCALE.fullmatch(text)
    try:
        scale = (
            Fraction(match[1]) / Fraction(match[2] or 1)
            if match is not None
            else Fraction(0)
        )
        if float(scale.numerator) > 0 and float(scale.denominator) > 0:
            return scale
    except (OverflowError, ZeroDivisionError):
        pass
    raise UsageError(
        f"{shortened(text)} is not a length scale",
        "Write a number above 0 or a fraction, such as 0.001 or 1/16000.",
    )


# A file without a given format is tried in this order: the particular before the general.
_ALL: tuple[type[Format], ...] = (
    members.AudioFolder,
    columnar.Parquet,
    columnar.Arrow,
    members.IndexFile,
    members.WebDataset,
    text.SpeechBrainJson,
    text.JsonList,
    text.Nemo,
    text.SpeechBrainCsv,
    text.NumberLines,
    text.Wav2vec,
    text.Kaldi,
    text.TableLines,
    text.Text,
)

FORMATS: dict[str, type[Format]] = {member.name: member for member in _ALL}
