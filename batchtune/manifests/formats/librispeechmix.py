"""LibriSpeechMix's manifests of overlapped speech: JSON Lines with `delays` and `durations`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from batchtune.errors import shortened
from batchtune.lengths import Unit
from batchtune.manifests.jsonlines import Identified, Objects, begins_with_list, first_keys
from batchtune.manifests.rows import Column, Rows
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Unreadable, fault, number

_HINT = 'This format holds one whole JSON object on every line: {"delays": [0.0, 2.5], "durations": [5.8, 10.4], …}.'


class _Timed(Identified, gc=False):
    """As much of a mixture as its duration depends on."""

    delays: Any = None
    durations: Any = None


class _Mixture(_Timed, gc=False):
    texts: Any = None


class LibriSpeechMix:
    """As https://github.com/NaoyukiKanda/LibriSpeechMix publishes them.

    A mixture lasts until its last utterance ends: `duration` = max(delay + duration), in s.
    """

    name = "librispeechmix"
    description = "one JSON object on every line, with lists of delays and durations"
    units: Mapping[str, Unit] = {}
    named_columns = True

    def fits(self, head: Head) -> bool:
        """Whether the first line is an object with both lists."""
        keys = first_keys(head) if b'"delays"' in head.data and not begins_with_list(head) else {}
        return keys.get("delays") == keys.get("durations") == "["

    def columns(self, source: Source) -> Sequence[Column]:
        """`id`, the `duration` of the mixture, the `durations` and the `texts` of its utterances as lists."""
        return Objects(source, _Mixture, _HINT).columns(_COLUMNS)

    def default_column(self, columns: Sequence[Column]) -> str:
        """What is read where the user names nothing."""
        return "duration"

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """One `Rows` for every block of the file."""
        if all(key is None or key.split(".")[0] in _TIMED for key in (length_key, target_key)):
            return Objects(source, _Timed, _HINT).rows(_TIMED, length_key, target_key)
        return Objects(source, _Mixture, _HINT).rows(_COLUMNS, length_key, target_key)


def _duration(mixture: _Timed) -> object:
    delays, durations = mixture.delays, mixture.durations
    if not isinstance(delays, list) or not isinstance(durations, list):
        return None
    if len(delays) != len(durations):
        return Unreadable("not as many delays as durations", f"{len(delays)} delays, {len(durations)} durations")
    if not durations:
        return Unreadable("an empty list", "[]")
    if not (_NUMBERS.issuperset(map(type, delays)) and _NUMBERS.issuperset(map(type, durations))):
        for value in (*delays, *durations):
            found = number(value)
            if found is None or not math.isfinite(found):
                return Unreadable(fault(value, math.nan if found is None else found), shortened(value))
    try:
        return max(map(operator.add, map(float, delays), map(float, durations)))
    except OverflowError:  # a whole number beyond all floats
        return math.inf


_NUMBERS = {int, float}
_TIMED: dict[str, Callable[[_Timed], object]] = {
    "id": lambda mixture: mixture.id,
    "duration": _duration,
    "durations": lambda mixture: mixture.durations,
}
_COLUMNS: dict[str, Callable[[_Mixture], object]] = {**_TIMED, "texts": lambda mixture: mixture.texts}

FORMAT = LibriSpeechMix()
