"""Templates, comments, numbers and lists for exports: no text of a hostile result file gets out of its comment."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from batchtune.errors import without_commands
from batchtune.units import counted, format_length, format_number, format_seconds

_WIDTH = 100


def one_line(text: str) -> str:
    r"""Put text on one line: characters that end a comment (\n, \r, U+0085, U+2028, ...) or hide become escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in without_commands(text)
    )


def commented(sentences: Iterable[str], *, indent: str = "") -> str:
    """Return sentences as `#` comments, each on lines of its own, with a full stop added if its end lacks one."""
    lines: list[str] = []
    for sentence in sentences:
        text = one_line(sentence)
        text = text if text.endswith((".", ":", "!", "?")) else f"{text}."
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )
    return "".join(f"{line.rstrip()}\n" for line in lines)


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

    def comments(text: str, indent: str = "") -> str:
        paragraphs = (re.sub(r"\s*\n\s*", " ", part).strip() for part in text.split("\n\n"))
        return commented(filter(None, paragraphs), indent=indent)

    environment = Environment(
        loader=PackageLoader("batchtune.exports"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters.update(
        comments=comments,
        paragraphs=lambda sentences: Written("\n\n".join(map(one_line, sentences))),
        number=number,
        in_unit=format_length,
        thousands="{:,}".format,
        counted=counted,
        compact=format_number,
        seconds=format_seconds,
        flow=flow_list,
        broken=lambda line: Written(broken(line).rstrip("\n")),
        literal=lambda text: Written(literal(text)),
        python=lambda value: Written(repr(value).replace("'", '"')),
    )
    return environment


def literal(text: str) -> str:
    """Return text as a Python literal in ASCII."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else ascii(text)


def number(value: float) -> str:
    """Write a number as YAML 1.1 and 1.2 read it, without an exponent.

    hyperpyyaml rewrites numbers, and ruamel.yaml's round trip drops a digit of those with an exponent.
    """
    return str(int(value)) if value == int(value) else format(Decimal(repr(float(value))), "f")


def list_of_texts(values: Sequence[float]) -> list[str]:
    """Write the numbers of a list: with a decimal point in all, if one needs it."""
    texts = [number(value) for value in values]
    if not any("." in text for text in texts):
        return texts
    return [text if "." in text else f"{text}.0" for text in texts]


def flow_list(values: Sequence[float]) -> str:
    """Write `[3.995, 5.825, 15.0]`."""
    return f"[{', '.join(list_of_texts(values))}]"


def broken(line: str, *, indent: int = 4) -> str:
    """Wrap a list's line between its entries, the next lines indented by `indent` more; ends with a line break."""
    beneath = " " * (len(line) - len(line.lstrip()) + indent)
    return textwrap.fill(line, _WIDTH, subsequent_indent=beneath, break_long_words=False, break_on_hyphens=False) + "\n"
