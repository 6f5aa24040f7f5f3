"""What the gate says of one rule."""

from __future__ import annotations

from typing import Literal

from batchtune.results import Record

Answer = Literal["holds", "fails", "error"]


class Verdict(Record, frozen=True, kw_only=True):
    """What the gate says of one rule.

    Attributes:
        rule: As it was given, white space made even.
        outcome: `holds`; `fails`; or `error`: it can't be told, which is never a pass.
        value: Of the rule's field; None where it is not known.
        limit: What the rule compares it with; for `worse` the share that is allowed, 0.02 for 2%.
        baseline: The value in the other run, for `worse`; None else.
        message: The value and the limit, or why it can't be told; no full stop.
    """

    rule: str
    outcome: Answer
    value: float | int | bool | None
    limit: float | bool
    baseline: float | int | None = None
    message: str
