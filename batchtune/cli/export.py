"""`batchtune export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from batchtune.cli import console
from batchtune.cli.options import DEFAULT_RUN_FOLDER, Json, Output, Quiet, RunFolder, expand, option
from batchtune.errors import ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.exports import Export, Tuned
    from batchtune.reports import RunResults

EXAMPLES = """
batchtune export --to espnet
batchtune export my-run --to lightning -o batches.py
batchtune export --to speechbrain --patch train.yaml
"""


@expand
def export(
    run: RunFolder = DEFAULT_RUN_FOLDER,
    to: Annotated[
        str | None, option("The framework; --list shows all.", "FRAMEWORK", values="batchtune.exports:FRAMEWORKS")
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
        str | None, option("With --patch: where FILE holds the sampler's settings.", "A.B", variable=None)
    ] = None,
    list_known: Annotated[bool, option("List the frameworks.", None, "--list", variable=None)] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write the recommendation as a config for another framework."""
    from batchtune.reports import load_run
    from batchtune.results import Exported, meta_of

    if list_known:
        _list(as_json=json)
        return
    framework = _framework(to, patch, key_path)
    results = load_run(run)
    console.warn_of_edited_configs(results, needed=framework.reads)
    to_stdout = str(output) == "-" or (output is None and patch is None)
    target = None if to_stdout else output or patch
    if patch is not None:
        text = _patch(framework, tuned_run(results), patch, target, key_path=key_path, quiet=quiet)
    else:
        text = framework.render(tuned_run(results))
        if target is not None:
            console.write_result(text, target)
    if json:
        file = str(target or patch or framework.file).encode(errors="backslashreplace").decode()  # perhaps not UTF-8
        named = {"framework": framework.name, "title": framework.title, "file": file}
        console.write_json(Exported(meta=meta_of(Exported), content=text, **named))
    elif to_stdout:
        sys.stdout.write(text)


def _patch(
    framework: Export, tuned: Tuned, file: Path, target: Path | None, *, key_path: str | None, quiet: bool
) -> str:
    """Return a user's file with the recommended numbers, show the changes, and write it to the target if there is one.

    Raises ResultError if the file is missing, unreadable, not UTF-8, or can't be patched.
    """
    import difflib

    from batchtune.configs import LARGEST_BYTES
    from batchtune.files import read_regular, write_whole

    assert framework.patch is not None  # _framework has checked
    if target is not None and target != file:
        console.refuse_overwriting(target)
    try:
        before = read_regular(file, LARGEST_BYTES, "Give the training's YAML file.").decode()  # with its line ends
    except UnicodeDecodeError as error:
        raise ResultError(f"{file} is not UTF-8 text: {error}", "Nothing was changed.") from None
    text, notes = framework.patch(before, tuned, key_path=key_path, name=str(file))
    lines = before.splitlines(), text.splitlines()
    difference = "\n".join(difflib.unified_diff(*lines, str(file), f"{file} (tuned)", lineterm=""))
    console.notes([difference or f"{file} has these values already.", *notes], quiet=quiet)
    if target is not None and (text != before or target != file):
        permissions = (target if target.exists() else file).stat().st_mode & 0o7777
        write_whole(target, text)
        if target.is_file():
            target.chmod(permissions)
    return text


def _framework(to: str | None, patch: Path | None, key_path: str | None) -> Export:
    """Return the framework that `--to` names. Raises UsageError if it is unknown, or other options exclude it."""
    from batchtune.exports import FRAMEWORKS, export_of

    if to is None:
        raise UsageError("no framework to export to", f"Name it with --to. Known frameworks: {', '.join(FRAMEWORKS)}.")
    framework = export_of(to)
    if patch is not None and framework.patch is None:
        patching = " or ".join(name for name in FRAMEWORKS if export_of(name).patch is not None)
        raise UsageError(f"--patch needs --to {patching}, not --to {to}", "Write a new file with -o FILE.")
    if key_path is not None and patch is None:
        raise UsageError("--key-path needs --patch: it says where that file holds the settings", "Add --patch FILE.")
    return framework


def tuned_run(results: RunResults) -> Tuned:
    """Return a run as exports need it; paths are relative to the working folder if the run lies in it."""
    from batchtune.exports import Tuned

    here = Path.cwd()
    folder = results.folder.relative_to(here) if results.folder.is_relative_to(here) else results.folder
    return Tuned(
        sweep=results.sweep,
        stream=results.stream,
        probe=results.probe,
        loader=results.loader,
        config=(folder / "sampler.yaml").as_posix(),
        stream_config=(folder / "stream.yaml").as_posix(),
    )


def _list(*, as_json: bool) -> None:
    import json

    from batchtune.exports import FRAMEWORKS, export_of

    known = [export_of(name) for name in FRAMEWORKS]
    listed = [{"framework": one.name, "title": one.title, "file": one.file} for one in known]
    lines = (f"{one.name:<{max(map(len, FRAMEWORKS))}}  {one.title}" for one in known)
    console.write_result(json.dumps(listed, indent=2, ensure_ascii=False) if as_json else "\n".join(lines), None)
