"""`batchtune export`."""

from __future__ import annotations

import difflib
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    Json,
    Output,
    Quiet,
    RunFolder,
    expand,
    option,
)
from batchtune.errors import ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.exports import Export, Tuned
    from batchtune.reports import RunResults

EXAMPLES = {
    "export": """
batchtune export --to espnet
batchtune export my-run --to lightning -o batches.py
batchtune export --to speechbrain --patch train.yaml
"""
}


@expand
def export(
    run: RunFolder = DEFAULT_RUN_FOLDER,
    to: Annotated[
        str | None, option("The framework; --list shows all.", "FRAMEWORK")
    ] = None,
    output: Output = None,
    patch: Annotated[
        Path | None,
        option(
            "With --to speechbrain or speechbrain-stream: change this train.yaml, in place unless -o is given, and "
            "show the changes.",
            "FILE",
            variable=None,
        ),
    ] = None,
    key_path: Annotated[
        str | None,
        option(
            "With --patch: where FILE holds the sampler's settings.",
            "A.B",
            variable=None,
        ),
    ] = None,
    list_known: Annotated[
        bool, option("List the frameworks.", None, "--list", variable=None)
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write the recommendation as a config for another framework."""
    from batchtune.exports import FRAMEWORKS, export_of
    from batchtune.files import write_whole
    from batchtune.reports import load_run
    from batchtune.results import Exported, meta_of

    if list_known:
        console.write_result(_listed(as_json=json), None)
        return
    if to is None:
        raise UsageError(
            "no framework to export to",
            f"Name it with --to. Known frameworks: {', '.join(FRAMEWORKS)}.",
        )
    if key_path is not None and patch is None:
        raise UsageError(
            "--key-path needs --patch: it says where that file holds the settings",
            "Add --patch FILE.",
        )
    framework = export_of(to)
    results = load_run(run)
    target = output or patch
    if patch is None:
        text = framework.render(tuned_run(results))
    else:
        text = _patched(framework, tuned_run(results), patch, key_path, quiet=quiet)
    if target is None or str(target) == "-":
        if not json:
            console.write_result(text, None)
    elif target != patch:
        console.write_result(text, target)
    elif text.encode() != target.read_bytes():
        write_whole(target, text)
    if json:
        named = (
            output
            if output is not None and str(output) != "-"
            else patch or framework.file
        )
        # Perhaps not UTF-8.
        file = str(named).encode(errors="backslashreplace").decode()
        exported = Exported(
            meta=meta_of(Exported),
            framework=framework.name,
            title=framework.title,
            file=file,
            content=text,
        )
        console.write_json(exported)


def _patched(
    framework: Export, tuned: Tuned, file: Path, key_path: str | None, *, quiet: bool
) -> str:
    """Return a user's file with the recommended numbers, and show the changes.

    Raises ResultError if the file is missing, unreadable, not UTF-8, or can't be patched.
    """
    from batchtune.configs import LARGEST_BYTES
    from batchtune.files import read_regular

    if framework.patch is None:
        raise UsageError(
            f"--patch needs --to speechbrain or speechbrain-stream, not --to {framework.name}",
            "Write a new file with -o FILE.",
        )
    try:
        # With its line ends.
        before = read_regular(
            file, LARGEST_BYTES, "Give the training's YAML file."
        ).decode()
    except UnicodeDecodeError as error:
        raise ResultError(
            f"{file} is not UTF-8 text: {error}", "Nothing was changed."
        ) from None
    text, notes = framework.patch(before, tuned, key_path=key_path, name=str(file))
    difference = difflib.unified_diff(
        before.splitlines(),
        text.splitlines(),
        str(file),
        f"{file} (tuned)",
        lineterm="",
    )
    console.notes(
        ["\n".join(difference) or f"{file} has these values already.", *notes],
        quiet=quiet,
    )
    return text


def tuned_run(results: RunResults) -> Tuned:
    """Return a run as exports need it; paths are relative to the working folder if the run is in it."""
    from batchtune.exports import Tuned

    here = Path.cwd()
    folder = results.folder
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    return Tuned(
        sweep=results.sweep,
        stream=results.stream,
        probe=results.probe,
        loader=results.loader,
        config=(folder / "sampler.yaml").as_posix(),
        stream_config=(folder / "stream.yaml").as_posix(),
    )


def _listed(*, as_json: bool) -> str:
    from batchtune.exports import FRAMEWORKS, export_of

    known = [export_of(name) for name in FRAMEWORKS]
    if as_json:
        listed = [
            {
                "framework": framework.name,
                "title": framework.title,
                "file": framework.file,
            }
            for framework in known
        ]
        return json_format.dumps(listed, indent=2, ensure_ascii=False)
    return "\n".join(f"{framework.name:<20}{framework.title}" for framework in known)
