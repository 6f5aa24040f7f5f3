"""Texts and chats: how many characters, words, bytes, or tokens of a tokenizer they have.

A chat, a list of messages, is as long as its contents, or as the text that the tokenizer's chat template makes of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.files import read_regular
from batchtune.lengths import Unit
from batchtune.manifests.formats import Unreadable, Values, walk
from batchtune.results import MALFORMED

if TYPE_CHECKING:
    from jinja2 import Template

TextCounter = Callable[[Sequence[str]], Sequence[int]]

_COUNTS: dict[str, TextCounter] = {
    "characters": lambda texts: list(map(len, texts)),
    "words": lambda texts: [len(text.split()) for text in texts],
    "bytes": lambda texts: [
        len(text.encode("utf-8", errors="surrogatepass")) for text in texts
    ],
}


@lru_cache
def counter(
    unit: str, tokenizer: str | None, *, adds_special_tokens: bool = True
) -> TextCounter:
    """Return a function that counts characters, words, bytes, or tokens of texts.

    The tokenizer is a `tokenizer.json` of Hugging Face's tokenizers, or its folder; the special tokens that it adds to
    a single sequence count. Raises UsageError without the package tokenizers, ManifestError for a damaged tokenizer.
    """
    if tokenizer is None:
        return _COUNTS[unit]
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers",
            "Install it: pip install tokenizers.",
        ) from None
    path = _tokenizer_file(tokenizer)
    if not path.is_file():
        raise ManifestError(
            f"{path}, the tokenizer, does not exist",
            "Name a tokenizer.json on this machine.",
        )
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more particular
        raise ManifestError(
            f"{tokenizer} is not a tokenizer: {error}",
            "Name a tokenizer.json of tokenizers.",
        ) from None
    loaded.no_truncation()
    loaded.no_padding()
    # The text of a template holds special tokens that only the config may know.
    template = None if adds_special_tokens else template_of(tokenizer)
    if template is not None:
        loaded.add_special_tokens(list(template.special_tokens.values()))

    def count(texts: Sequence[str]) -> list[int]:
        encodings = loaded.encode_batch(
            list(texts), add_special_tokens=adds_special_tokens
        )
        return list(map(len, encodings))

    return count


def _tokenizer_file(tokenizer: str) -> Path:
    """Return the tokenizer's file: a folder's is `tokenizer.json`."""
    path = Path(tokenizer)
    if path.is_dir():
        return path / "tokenizer.json"
    return path


def measured(values: Values, count: TextCounter) -> Sequence[object]:
    """Replace texts, also those in lists, by their lengths; any other value is Unreadable, but for None."""
    if set(map(type, values)) == {str}:
        return count(values)  # type: ignore[arg-type]  # all are str
    # Counted all at once, as a tokenizer does it by many threads.
    texts = []
    for value in values:
        texts += _texts_in(value)
    lengths = iter(count(texts))
    return [_measured_one(value, lengths) for value in values]


def _texts_in(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    return []


def _measured_one(value: object, lengths: Iterator[int]) -> object:
    """Return a value, or what stands for it: a text and a list of texts take the next lengths."""
    if isinstance(value, str):
        return next(lengths)
    if isinstance(value, list) and len(_texts_in(value)) == len(value):
        return list(itertools.islice(lengths, len(value)))
    if value is None or isinstance(value, Unreadable):
        return value
    return Unreadable("not text", shortened(value))


# Chats

# As ShareGPT calls them.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Real templates take less than a millisecond.
_LONGEST_SECONDS = 10.0
_LARGEST_BYTES = 64 * 1024 * 1024
_FETCH = (
    "Fetch the tokenizer again, or take the template out to count the contents alone."
)
# The date in a rendered template, so that lengths do not depend on the day.
_TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template, the file that holds it, and the special tokens that it may name."""

    path: Path
    template: Template
    special_tokens: Mapping[str, str]

    def text_of(
        self, chat: Sequence[Mapping[str, object]], tools: object
    ) -> str | Unreadable:
        """Return a chat as the model sees it in training, as transformers' `apply_chat_template` (5.23) does.

        Returns Unreadable for a chat that the template refuses. Raises ManifestError if it computes for too long.
        """
        messages = [
            {name: value for name, value in message.items() if value is not None}
            for message in chat
        ]
        try:
            with _time_limit():
                return self.template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=False,
                    **self.special_tokens,
                )
        except TimeoutError:
            raise ManifestError(
                f"{self.path}: the chat template takes more than {_LONGEST_SECONDS:g} s for one chat",
                _FETCH,
            ) from None
        except Exception as error:  # a template may fail in any way
            return Unreadable(
                "refused by the chat template", shortened(str(error), 200)
            )


def _raise_timeout(*_: object) -> NoReturn:
    raise TimeoutError


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError in a block that computes for too long; only the main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def chat_lengths(
    chats: Values, unit: Unit, tokenizer: str | None, tools: Values | None = None
) -> list[object]:
    """Return the length of each chat, by its chat template if the tokenizer has one; Unreadable for anything else.

    The template gets the tools of each chat, a list or its JSON.
    """
    template = template_of(tokenizer)
    count = counter(unit, tokenizer, adds_special_tokens=False)
    if tools is None:
        tools = [None] * len(chats)
    rows = zip(chats, tools, strict=True)
    lengths = measured([_texts(chat, template, used) for chat, used in rows], count)
    return [sum(length) if isinstance(length, list) else length for length in lengths]


def _parsed(value: object) -> object:
    """Return what a JSON text says, and any other value or text as it is."""
    if isinstance(value, str):
        with contextlib.suppress(*MALFORMED):
            return msgspec.json.decode(value)
    return value


def _as_message(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message of ShareGPT as one with role and content; any other as it is."""
    if not {"from", "value"} <= message.keys():
        return message
    return {
        "role": _ROLES.get(str(message["from"]), message["from"]),
        "content": message["value"],
    }


def joined(parts: Sequence[object]) -> object:
    """Return the chat whose parts stand in several columns, or the first of them that is not a list."""
    messages = []
    for part in parts:
        if not isinstance(part, list):
            return part
        messages += part
    return messages


def _texts(chat: object, template: ChatTemplate | None, tools: object) -> object:
    """Return the texts whose lengths add up to the chat's: the rendered one, or all contents, without images.

    Returns Unreadable for anything but a chat, None for a missing one.
    """
    if chat is None:
        return None
    if not isinstance(chat, list) or not all(
        isinstance(message, dict) for message in chat
    ):
        return Unreadable("not a list of messages", shortened(chat))
    if not chat:
        return Unreadable("an empty list")
    chat = list(map(_as_message, chat))
    if template is not None:
        tools = _parsed(tools) or None
        if isinstance(tools, list):
            tools = list(map(_parsed, tools))
        return template.text_of(chat, tools)
    parts: list[object] = []
    for message in chat:
        content = message.get("content")
        parts += content if isinstance(content, list) else [content]
    texts = [
        walk(part, ("text",)) if isinstance(part, dict) else part for part in parts
    ]
    return [text for text in texts if isinstance(text, str)]


@lru_cache
def template_of(tokenizer: str | None) -> ChatTemplate | None:
    """Return the chat template next to a tokenizer's file, or None. Raises ManifestError for a damaged one."""
    if tokenizer is None:
        return None
    path = _tokenizer_file(tokenizer)
    config_path = path.with_name("tokenizer_config.json")
    template_path = path.with_name("chat_template.jinja")
    config: dict[str, Any] = {}
    if config_path.is_file():
        try:
            config = msgspec.json.decode(
                read_regular(config_path, _LARGEST_BYTES, _FETCH), type=dict[str, Any]
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ManifestError(
                f"{config_path} can't be read: {error}", _FETCH
            ) from None
    source = config.get("chat_template")
    if template_path.is_file():
        source = read_regular(template_path, _LARGEST_BYTES, _FETCH).decode(
            errors="replace"
        )
    else:
        template_path = config_path
    if isinstance(source, list):  # several, by their names
        named = [
            entry.get("template")
            for entry in source
            if walk(entry, ("name",)) == "default"
        ]
        source = next(iter(named), None)
    if not isinstance(source, str):
        return None
    special_tokens = {}
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special_tokens[f"{name}_token"] = token
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
                raise jinja2.exceptions.SecurityError(
                    f"a namespace can't hold {shortened(name)}"
                )
            super().__setitem__(name, value)

    def refuse(message: object) -> NoReturn:
        raise jinja2.TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": _TODAY.strftime,
        "dict": lambda *arguments, **items: dict(*arguments, **items),
        "namespace": Namespace,
    }
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ManifestError(
            f"{path}: the chat template is not valid: {error}", _FETCH
        ) from None
