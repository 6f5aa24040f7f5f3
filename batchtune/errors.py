"""The exceptions that a user sees: a message, a hint, an exit code.

Every failure that a user can cause or fix is a `BatchtuneError`; `batchtune.cli` catches it in one place and prints
it. Anything else that escapes is a bug of batchtune.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

QUOTED_CHARACTERS = 80
_MOST_LISTED = 20
# Longer words in a message, such as a path, are cut in the middle.
_LONG_WORD = re.compile(r"\S{401,}")
# A long word may be broken anywhere.
_WORDS_BEGIN = re.compile(r"(?<!\S)::|\S{40,}")
# What msgspec says of a value, and the same in plain words.
_EXPECTED = re.compile(r"Expected `(\w+)[\w| ]*`(?: (>=|<=|>|<) ([-+.e\d]+))?")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_LINES_BEGIN = re.compile(r"^\s*::", re.MULTILINE)
# A user with a password in a URL, any user on the web (Azure has a container's name in that place), and the query.
_USER = re.compile(
    r"(?<=://)[^\s/?#:@]*:[^\s/?#]*@|(?:(?<=http://)|(?<=https://))[^\s/?#]*@"
)
_QUERY = re.compile(r"(?<=://)[^\s?'\"]+\?[^\s'\"]+")
_QUERY_VALUE = re.compile(r"=[^&]*?(?=[,.:;)]*(?:&|$))")


def shortened(value: object, limit: int = QUOTED_CHARACTERS) -> str:
    """Quote a foreign value for a message: its repr, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole numbers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 2]}…{text[-1]}"


def listed(values: Sequence[object]) -> str:
    """List foreign values for a message: the first ones, shortened, and the number of the others."""
    words = [shortened(value) for value in values[:_MOST_LISTED]]
    if len(values) > _MOST_LISTED:
        words.append(f"and {len(values) - _MOST_LISTED:,} more")
    return ", ".join(words)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar, if any is similar enough."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean 'optimal'? ` for a misspelt name, and an empty text if no known name is similar."""
    near = nearest(name, known)
    return "" if near is None else f"Did you mean {near!r}? "


def bounded(text: str) -> str:
    """Cut each word of a message that is longer than 400 characters to its beginning and end."""
    return _LONG_WORD.sub(lambda match: f"{match[0][:200]}…{match[0][-100:]}", text)


def without_secrets(text: str) -> str:
    """Return text whose URLs have neither a user nor values in their query: a signed URL opens its object to anyone."""
    text = _USER.sub("…@", text)
    return _QUERY.sub(_without_values, text)


def _without_values(url: re.Match[str]) -> str:
    name, _, query = url[0].partition("?")
    return f"{name}?{_QUERY_VALUE.sub('=…', query)}"


def printable(text: str) -> str:
    """Return text safe for a terminal: control characters become question marks."""
    return "".join(character if character.isprintable() else "?" for character in text)


def without_commands(text: str, *, wrapped: bool = True) -> str:
    """Return text in which GitHub Actions finds no command when a log shows it.

    Commands are `::name::` at the start of a line, and `##[name]` anywhere (https://github.com/actions/runner,
    `ActionCommand.cs`). If `wrapped`, lines may still be broken, between words or in a long one.
    """
    parted = (_WORDS_BEGIN if wrapped else _LINES_BEGIN).sub(
        lambda match: match[0].replace("::", ": :"), text
    )
    return parted.replace("##[", "## [")


class BatchtuneError(Exception):
    """An error that the user can understand and fix: what is wrong and where; what to do about it, or None."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = bounded(without_secrets(message))
        hint = None if hint is None else bounded(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.__notes__ = [hint]  # from Python 3.11 on, tracebacks show it


class UsageError(BatchtuneError):
    """The command line or the environment has a meaningless setting."""

    exit_code = 2


class ManifestError(BatchtuneError):
    """A source of lengths can't be read as requested."""


class ResultError(BatchtuneError):
    """A result file or run folder is missing, damaged, newer than known, or belongs to other data."""


class WorkloadError(BatchtuneError):
    """The user's workload failed with an error other than OOM; `traceback` is the end of its own traceback."""

    def __init__(
        self, message: str, hint: str | None = None, traceback: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.traceback = traceback


class NoStepError(WorkloadError):
    """The user's training script goes on, but no optimizer steps."""


class OptionError(WorkloadError):
    """A `--set` option of a workload is unknown, missing or has a wrong value."""

    exit_code = 2


class LoaderError(WorkloadError):
    """The user's data loader can't be built or measured."""


class ProbeError(BatchtuneError):
    """The probe has no result: nothing fits, or the device can't be used."""


def linked_errors(
    error: BaseException, *, contexts: bool = False
) -> list[BaseException]:
    """Return the exception and what it was raised from, each once; with `contexts`, also what was being handled."""
    chain = [error]
    for link in chain:  # which grows
        causes = [link.__cause__]
        if contexts and not link.__suppress_context__:
            causes.append(link.__context__)
        for cause in causes:
            if cause is not None and all(cause is not known for known in chain):
                chain.append(cause)
    return chain


def invalid_field(error: Exception) -> str:
    """Return what msgspec finds wrong in plain words: `num_buckets: must be a whole number of at least 1`."""
    problem, _, place = printable(str(error)).partition(" - at `$.")
    problem = _EXPECTED.sub(_required, problem)
    if not place:
        return problem
    return f"{place.rstrip('`')}: {problem}"


def _required(expected: re.Match[str]) -> str:
    kind, comparison, bound = expected.groups()
    required = f"must be {_KINDS.get(kind, kind)}"
    if comparison is None:
        return required
    return f"{required} {_BOUNDS[comparison]} {float(bound):g}"


# What the processes of a script print at their end that were not measured, and what it means.

NO_STEP = "ended, and no optimizer stepped after any of its"
"""Is said of batches of loaders: the process may only help the one that trains."""
NO_LOADER = "iterated over no torch DataLoader in its first"
"""Is said of the optimizer steps of a process that was ended, as it trains without one."""

_HINTS = {
    NO_LOADER: "batchtune gives a script its batches through a torch DataLoader. Describe the training step to it "
    "instead, as a class with setup, make_batch and step: --workload FILE:NAME.",
    NO_STEP: "Its training loop must call step() of a torch optimizer after a batch of a DataLoader. Is its loss "
    "finite?",
}


def meaning_of_output(output: str, *, failed: bool) -> tuple[str, str] | None:
    """Return what was said last in the output of a script, which may have `failed`, and a hint; None without it."""
    for words, hint in _HINTS.items():
        said = re.findall(rf"batchtune: (.*{words}.*)$", output, re.MULTILINE)
        if said and (words == NO_LOADER or not failed):
            return said[-1], hint
    return None
