"""References within a YAML file: hyperpyyaml's `!ref <key>` and OmegaConf's `${key}`, without running anything."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchtune.configs.tree import Node
from batchtune.errors import ResultError, printable

REFERENCE = re.compile(r"<([^<>]*)>")
_DEEPEST = 32
_LONGEST_FORMULA = 200
_GIVE = "Write the number in the file, or give the settings as --current key=value,key=value."
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_FORMULA = re.compile(r"[0-9eE.+\-*/%() ]+")

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    # As floats: a power of integers could fill the memory.
    ast.Pow: lambda base, exponent: math.pow(float(base), float(exponent)),
}


def reference_path(reference: str) -> tuple[str, ...]:
    """Return the path of `key[inner]` as hyperpyyaml reads it; attributes of objects count as the object."""
    return tuple(part.strip("]") for part in reference.split(".")[0].split("["))


@dataclass(slots=True)
class References:
    """Turns nodes of a document, which messages call `name`, into plain values."""

    root: Node
    name: str
    _known: dict[int, Any] = field(default_factory=dict)

    def plain(self, node: Node, chain: tuple[Node, ...], depth: int = 0) -> Any:
        """Return the value of a node: a number, a word, None, or a list of them.

        `chain` holds the mappings from the document's top to the one that holds it; `depth` references led here. Raises
        ResultError for a mapping, a missing value, one made by code, or a reference that can't be followed.
        """
        value = node.value
        if depth > _DEEPEST:
            raise self._wrong(node, "its references lead around in a circle, or too far")
        if id(node) in self._known:  # aliases may name a list, and formulas each other, thousands of times
            return self._known[id(node)]
        if node.tag in ("!ref", "!copy") and isinstance(value, str):
            self._known[id(node)] = self._referred(node, value, depth)
            return self._known[id(node)]
        if node.tag == "!PLACEHOLDER" or value == "???":
            raise self._wrong(node, f"it is {'a ' if node.tag else ''}{node.tag or value}, to be filled in")
        if node.tag is not None:
            raise self._wrong(node, f"it is made by code ({node.tag[:60]}), which batchtune does not run")
        if isinstance(value, dict):
            raise self._wrong(node, "it is a mapping, where a number or a list is needed")
        if isinstance(value, list):
            entries = [self.plain(entry, chain, depth + 1) for entry in value]
            if any(isinstance(inner, list) for entry in entries if isinstance(entry, list) for inner in entry):
                raise self._wrong(node, "its lists nest more than two deep")
            self._known[id(node)] = entries
            return entries
        return self._interpolated(node, value, chain, depth) if isinstance(value, str) and "${" in value else value

    def _referred(self, node: Node, text: str, depth: int) -> Any:
        """Read `<key>`, `<key[inner]>`, or arithmetic with them, as hyperpyyaml 1.2 reads them."""
        whole = REFERENCE.fullmatch(text.strip())
        if whole is not None:
            return self.plain(*self._referenced(node, whole[1]), depth + 1)
        if len(text) > _LONGEST_FORMULA:
            raise self._wrong(node, "its formula is too long")
        formula = REFERENCE.sub(lambda match: self._operand(node, match[1], depth), text)
        result = evaluated(formula)
        if result is None:
            raise self._wrong(node, f"{formula[:60]!r} is not arithmetic with numbers")
        return result

    def _operand(self, node: Node, reference: str, depth: int) -> str:
        found, chain = self._referenced(node, reference)
        if found.tag == "!ref" and REFERENCE.fullmatch(str(found.value).strip()) is None and found.line > node.line:
            # hyperpyyaml would put in its text, without parentheses.
            raise self._wrong(node, f"<{reference}> is a formula that stands further down")
        return str(self.plain(found, chain, depth + 1))[:_LONGEST_FORMULA]

    def _referenced(self, node: Node, reference: str) -> tuple[Node, tuple[Node, ...]]:
        if "." in reference:
            raise self._wrong(node, f"<{reference}> reads an attribute of an object, which batchtune does not make")
        return self._find(node, (self.root,), reference_path(reference), f"<{reference}>")

    def _interpolated(self, node: Node, text: str, chain: tuple[Node, ...], depth: int) -> Any:
        """Read `${a.b}` from the top, `${.b}` next to the key, `${..b}` one level up, as OmegaConf 2.3 does."""
        shown = text[:60]
        match = _INTERPOLATION.fullmatch(text.strip())
        if match is None:
            raise self._wrong(node, f"{shown!r} is put together of parts")
        inner = match[1].strip()
        if ":" in inner:
            raise self._wrong(node, f"{shown!r} needs {inner.split(':')[0]}, which only the training itself can ask")
        dots = len(inner) - len(inner.lstrip("."))
        if dots > len(chain):
            raise self._wrong(node, f"{shown!r} points above the top of the file")
        start = chain[: len(chain) - dots + 1] if dots else (self.root,)
        keys = inner.lstrip(".").replace("[", ".").replace("]", "").split(".")
        return self.plain(*self._find(node, start, keys, shown), depth + 1)

    def _find(
        self, node: Node, start: tuple[Node, ...], keys: tuple[str, ...] | list[str], shown: str
    ) -> tuple[Node, tuple[Node, ...]]:
        """Return the node at these keys, and the mappings from the document's top to the one that holds it."""
        chain, target = start[:-1], start[-1]
        for key in keys:
            chain, found = (*chain, target), target.get(key)
            if found is None:
                raise self._wrong(node, f"{shown} points to {key!r}, which does not exist")
            target = found
        return target, chain

    def _wrong(self, node: Node, problem: str) -> ResultError:
        return ResultError(f"{self.name}, line {node.line}: the value can't be read: {printable(problem)}", _GIVE)


def evaluated(formula: str) -> float | int | None:
    """Return the result of + - * / // % ** on numbers; None for anything else, or without a finite result."""

    def value(node: ast.expr) -> float | int:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        # No unary minus: hyperpyyaml leaves a formula with one as text.
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only arithmetic with numbers")

    if not _FORMULA.fullmatch(formula) or len(formula) > _LONGEST_FORMULA:
        return None
    try:
        result = value(ast.parse(formula.strip(), mode="eval").body)
        return result if math.isfinite(result) else None
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
