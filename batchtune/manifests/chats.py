"""Chats, lists of messages: the length of their contents, or of the text that a tokenizer's chat template makes."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from batchtune.errors import ManifestError, shortened
from batchtune.files import read_regular
from batchtune.lengths import Unit
from batchtune.manifests.values import Unreadable, Values, counter, tokenizer_file

if TYPE_CHECKING:
    from jinja2 import Template

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
# Real templates take less than a millisecond.
_LONGEST_SECONDS = 10.0
_LARGEST_BYTES = 64 * 1024 * 1024
_FETCH = "Fetch the tokenizer again, or take the template out to count the contents alone."
# What a template may name besides the messages, as transformers' `special_tokens_map`.
_SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# The date in a rendered template, so that lengths do not depend on the day.
_TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template, the file that holds it, and the special tokens that it may name."""

    path: Path
    template: Template
    special_tokens: Mapping[str, str]

    def text_of(self, chat: Sequence[Mapping[str, object]]) -> str:
        """Return a chat as the model sees it in training, as transformers' `apply_chat_template` (5.23) does."""
        messages = [{name: value for name, value in message.items() if value is not None} for message in chat]
        with _time_limit():
            return self.template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=False, **self.special_tokens
            )


class _OutOfTimeError(Exception):
    """A template computes for too long."""


def _raise_out_of_time(*_: object) -> NoReturn:
    raise _OutOfTimeError


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise `_OutOfTimeError` in a block that computes for too long; only the main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def chat_lengths(chats: Values, unit: Unit, tokenizer: Path | None) -> list[object]:
    """Return the length of each chat, by its chat template if the tokenizer has one; Unreadable for what is no chat."""
    template = None if tokenizer is None else template_of(tokenizer_file(tokenizer))
    count = counter(unit, tokenizer, adds_special_tokens=False)
    texts_of_chats = [_texts(chat, template) for chat in chats]
    readable = [texts for texts in texts_of_chats if isinstance(texts, list)]
    counts = iter(count(list(itertools.chain.from_iterable(readable))))
    return [sum(itertools.islice(counts, len(texts))) if isinstance(texts, list) else texts for texts in texts_of_chats]


def _texts(chat: object, template: ChatTemplate | None) -> list[str] | Unreadable | None:
    """Return the texts whose lengths add up to the chat's: the rendered one, or all contents."""
    if chat is None:
        return None
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        return Unreadable("not a list of messages", shortened(chat))
    if not chat:
        return Unreadable("an empty list", "[]")
    if template is None:
        return list(_contents(chat))
    try:
        return [template.text_of(chat)]
    except _OutOfTimeError:
        message = f"{template.path}: the chat template takes more than {_LONGEST_SECONDS:g} s for one chat"
        raise ManifestError(message, _FETCH) from None
    except Exception as error:  # a template may fail in any way
        return Unreadable("refused by the chat template", shortened(str(error), 200))


def _contents(chat: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield the texts of all messages; a message may have several, among images, or none."""
    for message in chat:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


@lru_cache
def template_of(tokenizer: Path) -> ChatTemplate | None:
    """Return the chat template next to a tokenizer's file, or None. Raises ManifestError for a damaged one."""
    config_path = tokenizer.with_name(_CONFIG)
    template_path = tokenizer.with_name(_TEMPLATE)
    config: dict[str, Any] = {}
    if config_path.is_file():
        try:
            config = msgspec.json.decode(read_regular(config_path, _LARGEST_BYTES, _FETCH), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ManifestError(f"{config_path} can't be read: {error}", _FETCH) from None
    if template_path.is_file():
        source: object = read_regular(template_path, _LARGEST_BYTES, _FETCH).decode(errors="replace")
    else:
        template_path = config_path
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by their names
            named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
            source = named[0].get("template") if named else None
    if not isinstance(source, str):
        return None
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[name] = token
    return ChatTemplate(template_path, _compiled(source, template_path), special_tokens)


def _compiled(source: str, path: Path) -> Template:
    """Compile a template in jinja2's sandbox with the names that transformers gives it.

    A template from anywhere is code: in the sandbox it can reach neither Python nor files.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Passes the text in `{% generation %}` on, which marks what the model has written."""

        tags = {"generation"}  # noqa: RUF012  # as the base class declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Refuses names that Python itself looks up, such as `__html__`."""

        def __init__(self, /, *others: Any, **attributes: Any) -> None:
            super().__init__()
            for name, value in dict(*others, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace can't hold {shortened(name)}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _TODAY.strftime,
        "dict": lambda *arguments, **items: dict(*arguments, **items),
        "namespace": Namespace,
    }
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ManifestError(f"{path}: the chat template is not valid: {error}", _FETCH) from None


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(str(message))
