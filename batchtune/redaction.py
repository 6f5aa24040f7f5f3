"""Leaves secrets out of what is written to files: by the name of an option, and by the shape of a value.

In place of each stands the beginning of its SHA-256, so that two commands can still be told apart.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from batchtune.errors import without_secrets

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
