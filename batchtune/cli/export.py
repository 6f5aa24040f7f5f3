"""`batchtune export`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.cli.options import (
    JSON,
    OUTPUT,
    QUIET,
    RUN_FOLDER,
    expand,
    option,
)
from batchtune.errors import ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.exports.base import Tuned
    from batchtune.reports import RunResults

EXAMPLES = {
    "export": """
batchtune export --to espnet
batchtune export my-run --to lightning -o batches.py
batchtune export --to speechbrain
"""
}


@expand
def export(
    run: Path = RUN_FOLDER,
    to: str | None = option("The framework; --list shows all.", "FRAMEWORK"),
    output: Path | None = OUTPUT,
    list_known: bool = option(
        "List the frameworks.", None, "--list", variable=None, default=False
    ),
    quiet: bool = QUIET,
    json: bool = JSON,
) -> None:
    """Write the recommendation as a config for another framework."""
    from batchtune.exports import FRAMEWORKS, export_of
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
    framework = export_of(to)
    tuned = tuned_run(load_run(run))
    warn_of_damage(run, quiet=quiet)
    if (
        tuned.sweep is not None
        and tuned.sweep.proof is not None
        and not tuned.sweep.proof.holds
    ):
        console.note(
            f"Warning: the recommended batches are not proven: {tuned.sweep.proof.reason}.",
            quiet=quiet,
        )
    text = framework.render(tuned)
    output = console.file_of(output)
    if output is not None or not json:
        console.write_result(text, output, quiet=quiet)
    if json:
        # Perhaps not UTF-8.
        file = str(output or framework.file).encode(errors="backslashreplace").decode()
        exported = Exported(
            meta=meta_of(Exported),
            framework=framework.name,
            title=framework.title,
            file=file,
            content=text,
        )
        console.write_json(exported)


def warn_of_damage(folder: Path, *, quiet: bool) -> None:
    """Warn of a `sampler.yaml` that samplers would refuse; other results can still be shown."""
    from batchtune.sampler_files import read_any_sampler_yaml

    path = folder / "sampler.yaml"
    if path.exists():
        try:
            read_any_sampler_yaml(path)
        except ResultError as error:
            console.note(f"Warning: {error.message}. {error.hint}", quiet=quiet)


def tuned_run(results: RunResults) -> Tuned:
    """Return a run as exports need it; paths are relative to the working folder if the run is in it."""
    from batchtune.exports.base import Tuned

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
