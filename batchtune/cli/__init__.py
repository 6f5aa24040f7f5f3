"""The command line: parse, call, print, exit. The only code that prints or exits."""

from __future__ import annotations


def main() -> None:
    """The entry point `batchtune`."""
    from batchtune.cli.app import app

    app(prog_name="batchtune")
