"""Writes a manifest of real lengths from what every machine has: Python's own standard library.

An example is a function or method (a nested one counts for itself and within the one around it). Its length
is the number of its tokens: what `tokenize` gives from the line of its `def` to its last line, without
comments and blank lines. Read are the modules that are a single file; the packages (test, tkinter, idlelib,
...) are not, as systems differ in which of them they install.

    python examples/stdlib_lengths.py -o stdlib_lengths.csv
"""

from __future__ import annotations

import argparse
import ast
import csv
import sys
import sysconfig
import tokenize
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}


def main() -> None:
    """Writes the manifest, and on stderr what was read and what could not be."""
    parser = argparse.ArgumentParser(
        description="Writes the token counts of the standard library's functions."
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the CSV file; stdout where it is not given"
    )
    arguments = parser.parse_args()

    rows, unreadable = collect(Path(sysconfig.get_path("stdlib")))
    table = StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("id", "num_tokens"))
    writer.writerows(rows)
    if arguments.output is None:
        sys.stdout.write(table.getvalue())
    else:
        arguments.output.write_text(table.getvalue(), encoding="utf-8")
    print(
        f"{len(rows):,} functions; {len(unreadable)} files could not be read",
        file=sys.stderr,
    )
    for message in unreadable:
        print(f"  {message}", file=sys.stderr)


def collect(library: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """Counts the tokens of every function in a folder's modules.

    Returns:
        (id, number of tokens), sorted by the module's name, outer functions before those inside them; the id
        is `module:qualified.name`, with `#2`, `#3`, ... where a name is defined again. And a message for each
        file that could not be read.
    """
    rows: list[tuple[str, int]] = []
    unreadable: list[str] = []
    for path in sorted(library.glob("*.py")):
        try:
            functions = list(functions_in(path.read_bytes()))
        except (OSError, SyntaxError, ValueError, tokenize.TokenError) as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        times: dict[str, int] = {}
        for name, num_tokens in functions:
            times[name] = times.get(name, 0) + 1
            again = f"#{times[name]}" if times[name] > 1 else ""
            rows.append((f"{path.stem}:{name}{again}", num_tokens))
    return rows, unreadable


def functions_in(source: bytes) -> Iterator[tuple[str, int]]:
    """Yields each function's qualified name and its number of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old sources
        tree = ast.parse(source)
    lines = [
        t.start[0]
        for t in tokenize.tokenize(BytesIO(source).readline)
        if t.type not in NO_CODE
    ]
    for name, node in definitions(tree, ""):
        yield (
            name,
            bisect_right(lines, node.end_lineno or node.lineno)
            - bisect_left(lines, node.lineno),
        )


def definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Walks through the functions and methods below a node, outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{child.name}", child
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from definitions(child, f"{prefix}{child.name}." if named else prefix)


if __name__ == "__main__":
    main()
