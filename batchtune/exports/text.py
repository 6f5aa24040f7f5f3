"""Templates, comments, numbers and lists for exports: no text of a hostile result file gets out of its comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from batchtune.errors import without_commands
from batchtune.units import (
    counted,
    format_length,
    format_number,
    format_seconds,
    with_full_stop,
)

_WIDTH = 100


def one_line(text: str) -> str:
    r"""Put text on one line: characters that end a comment (\n, \r, U+0085, U+2028, ...) or hide become escapes."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


class Written(str):
    """Text that a template inserts as it is, without escapes."""


def from_template(name: str, **values: Any) -> str:
    """Fill a template of this package; `one_line` makes all values that are text harmless, except `Written`.

    The filter `comments` makes a comment of each paragraph of a text; `paragraphs` joins sentences to such a text.
    """
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchtune.exports"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters.update(
        comments=_comments,
        paragraphs=_paragraphs,
        number=number,
        in_unit=format_length,
        thousands="{:,}".format,
        counted=counted,
        compact=format_number,
        seconds=format_seconds,
        flow=flow_list,
        broken=broken,
        literal=_literal,
    )
    return environment


def _comments(text: str) -> str:
    """Return each paragraph of a text as a `#` comment."""
    comments = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words:
            comments += textwrap.wrap(
                with_full_stop(words),
                _WIDTH,
                initial_indent="# ",
                subsequent_indent="# ",
                break_on_hyphens=False,
            )
    return "".join(f"{line.rstrip()}\n" for line in comments)


def _paragraphs(sentences: Iterable[str]) -> Written:
    return Written("\n\n".join(map(one_line, sentences)))


def broken(line: str, beneath: str = "    ") -> Written:
    """Wrap a list's line between its entries; the next lines begin with `beneath`."""
    return Written(
        textwrap.fill(
            line,
            _WIDTH,
            subsequent_indent=beneath,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _literal(value: object) -> Written:
    """Return a text, number or truth value as a Python literal in ASCII."""
    text = ascii(value)
    if text == f"'{value}'" and '"' not in text:
        text = f'"{value}"'
    return Written(text)


def number(value: float) -> str:
    """Write a number as YAML 1.1 and 1.2 read it, without an exponent.

    hyperpyyaml rewrites numbers, and ruamel.yaml's round trip drops a digit of those with an exponent.
    """
    if value == int(value):
        return str(int(value))
    return format(Decimal(repr(float(value))), "f")


def list_of_texts(values: Sequence[float]) -> list[str]:
    """Write the numbers of a list: with a decimal point in all, if one needs it."""
    texts = [number(value) for value in values]
    if not any("." in text for text in texts):
        return texts
    return [text if "." in text else f"{text}.0" for text in texts]


def flow_list(values: Sequence[float]) -> str:
    """Write `[3.995, 5.825, 15.0]`."""
    return f"[{', '.join(list_of_texts(values))}]"
