"""Writes the help of each command into its page, between two pairs of marks: `python examples/site/help_pages.py`."""

import inspect
import re
from pathlib import Path
from typing import Any

from batchtune.cli.app import COMMANDS, COMMON, load_command

PAGES = Path(__file__).parents[1] / "commands"


def fresh(name: str, page: str) -> str:
    """Return a command's page with the command's present help between the marks."""
    command = load_command(name)
    examples = command.epilog.strip()
    about = f"{inspect.cleandoc(command.help)}\n\n```sh\n{examples}\n```"
    page = filled(page, "help", about)
    return filled(page, "options", f"## Options\n\n{tables(command)}")


def filled(page: str, mark: str, text: str) -> str:
    """Return a page with a text between the begin and the end of a mark."""
    marked = re.compile(f"(<!-- {mark} -->).*?(<!-- /{mark} -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[2]}", page)


def tables(command: Any) -> str:
    """Return a table of a command's arguments, and one for each topic of its options."""
    rows: dict[str, list[str]] = {}
    for parameter in command.params:
        if parameter.hidden:
            continue
        panel = parameter.rich_help_panel or COMMON
        if parameter.param_type_name == "argument":
            panel = "Arguments"
        rows.setdefault(panel, []).append(row(parameter))
    panels = sorted(rows, key=lambda panel: panel == COMMON)
    return "\n\n".join(
        "\n".join([f"| {panel} | |", "|---|---|", *rows[panel]]) for panel in panels
    )


def row(parameter: Any) -> str:
    """Return the row of an argument or option in its table."""
    metavar = parameter.metavar or ""
    name = metavar
    if parameter.param_type_name == "option":
        name = f"{', '.join(parameter.opts)} {metavar}".strip()
    text = parameter.help
    default = parameter.default
    is_shown = isinstance(default, str | int | float | Path) and default is not False
    if is_shown and "default:" not in text and parameter.show_default:
        text += f" Default: {default}."
    text = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return f"| `{name}` | {text} |"


def main() -> None:
    """Write all pages."""
    for name in COMMANDS:
        path = PAGES / f"{name}.md"
        path.write_text(fresh(name, path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
