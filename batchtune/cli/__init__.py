"""The command line: parse, call, print, exit. The only code that prints or exits."""

from __future__ import annotations


def main() -> None:
    """Run the command line: the entry point `batchtune`."""
    from batchtune.cli.streams import outlive_readers

    outlive_readers()
    try:
        from batchtune.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name="batchtune")
