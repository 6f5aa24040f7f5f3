"""`batchtune export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchtune.cli.options import DEFAULT_RUN_FOLDER, Json, Quiet, option

if TYPE_CHECKING:
    from batchtune.exports import Export, Tuned
    from batchtune.results import Probe, Sweep

EXAMPLE = """Examples:
batchtune export --to espnet
batchtune export my-run --to lightning -o batches.py
batchtune export --to speechbrain --patch train.yaml
"""


def frameworks() -> Sequence[str]:
    """What `--to` takes."""
    from batchtune.exports import FRAMEWORKS

    return FRAMEWORKS


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", envvar="BATCHTUNE_RUN", show_envvar=False, help="The run folder.")
    ] = DEFAULT_RUN_FOLDER,
    to: Annotated[
        str | None,
        option(
            "The framework; --list shows the known ones.",
            flag="--to",
            name="TO",
            metavar="FRAMEWORK",
            values=frameworks,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - is stdout.")
    ] = None,
    patch: Annotated[
        Path | None,
        typer.Option(
            "--patch",
            metavar="FILE",
            help="With --to speechbrain: change this train.yaml, in place unless -o is given; stderr shows what "
            "changed.",
        ),
    ] = None,
    key_path: Annotated[
        str | None,
        typer.Option("--key-path", metavar="A.B", help="With --patch: where in FILE the sampler's settings are."),
    ] = None,
    list_known: Annotated[bool, typer.Option("--list", help="Show the frameworks.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write the recommendation in another framework's words."""
    from batchtune.cli import console

    if list_known:
        console.write_result(_listed(as_json=json), None)
        return
    framework = _framework(to, patch, key_path)
    tuned = _read(run)
    if patch is not None:
        _patch(framework, tuned, patch, key_path, output, quiet=quiet, as_json=json)
        return
    text = framework.render(tuned)
    to_file = output is not None and str(output) != "-"
    if to_file:
        console.write_result(text, output)
    if json:
        console.write_result(_as_json(framework, str(output) if to_file else framework.file, text), None)
    elif not to_file:
        console.write_result(text, None)


def _framework(to: str | None, patch: Path | None, key_path: str | None) -> Export:
    """What `--to` names.

    Raises:
        UsageError: Nothing, or options that do not go with it.
    """
    from batchtune.errors import UsageError, shortened
    from batchtune.exports import FRAMEWORKS, export_of

    known = f"Known ones: {', '.join(FRAMEWORKS)}."
    if to is None:
        raise UsageError("which framework to export to is not known", f"Name it with --to. {known}")
    if to not in FRAMEWORKS:
        import difflib

        near = difflib.get_close_matches(to.lower(), FRAMEWORKS, n=1)
        hint = f"Did you mean {near[0]!r}? {known}" if near else known
        raise UsageError(f"{shortened(to)} is no framework that batchtune exports to", hint)
    framework = export_of(to)
    if patch is not None and framework.patch is None:
        patching = " or ".join(name for name in FRAMEWORKS if export_of(name).patch is not None)
        raise UsageError(f"--patch goes with --to {patching}, not with --to {to}", "Write a new file with -o FILE.")
    if key_path is not None and patch is None:
        raise UsageError("--key-path says where in the file of --patch the settings are", "Add --patch FILE.")
    return framework


def _read(run: Path) -> Tuned:
    """The run.

    Raises:
        ResultError: It is missing or damaged, or holds no sweep.
    """
    from batchtune.errors import ResultError
    from batchtune.reports import load_run
    from batchtune.results import SWEEP_FILE

    results = load_run(run)
    if results.sweep is None:
        raise ResultError(
            f"{run} holds no {SWEEP_FILE}: nothing is recommended yet",
            f"`batchtune sweep-buckets MANIFEST --run {run}` writes it.",
        )
    return tuned_run(results.sweep, results.probe, run)


def tuned_run(sweep: Sweep, probe: Probe | None, run: Path) -> Tuned:
    """A run as exports see it; its config is named from the working folder."""
    from batchtune.exports import Tuned
    from batchtune.results import SAMPLER_FILE

    return Tuned(sweep=sweep, probe=probe, config=_near(run / SAMPLER_FILE))


def _near(path: Path) -> str:
    """A path from the working folder where it lies in it, as it was given elsewhere."""
    here = Path.cwd()
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()


def _patch(
    framework: Export,
    tuned: Tuned,
    path: Path,
    key_path: str | None,
    output: Path | None,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """Writes the user's file with the recommendation in it, and shows the difference on stderr."""
    from batchtune.cli import console

    assert framework.patch is not None  # _framework has looked
    before = _text_of(path)
    patched = framework.patch(before, tuned, key_path=key_path, name=str(path))
    after = patched.text
    console.notes([_difference(before, after, str(path)) or f"{path} says so already.", *patched.notes], quiet=quiet)
    to_stdout = output is not None and str(output) == "-"
    target = path if output is None or to_stdout else output
    if not to_stdout:
        _write(after, target, like=path, changed=after != before)
    if as_json:
        console.write_result(_as_json(framework, str(target), after), None)
    elif to_stdout:
        sys.stdout.write(after)


def _text_of(path: Path) -> str:
    """A file's text, its line ends as they are.

    Raises:
        ResultError: Missing, unreadable, or no UTF-8.
    """
    from batchtune.errors import ResultError

    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ResultError(
            f"{path} can't be read: {error.strerror or error}", "Give the training's YAML file."
        ) from None
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} is no UTF-8 text: {error}", "Nothing was changed.") from None


def _write(text: str, path: Path, *, like: Path, changed: bool) -> None:
    """Writes a file whole; what lies in its place, or else `like`, lends it its permissions."""
    from batchtune.files import write_whole

    if not changed and path == like:
        return
    permissions = (path if path.exists() else like).stat().st_mode & 0o7777
    write_whole(path, text)
    if path.is_file():
        path.chmod(permissions)


def _difference(before: str, after: str, name: str) -> str:
    """What changed, as `diff -u` shows it; empty where nothing did."""
    import difflib

    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, f"{name} (tuned)", lineterm="")
    return "\n".join(lines)


def _as_json(framework: Export, file: str, content: str) -> str:
    from batchtune.results import Exported, encode, meta_of

    file = file.encode(errors="backslashreplace").decode()  # a name that is no UTF-8
    exported = Exported(
        meta=meta_of(Exported), framework=framework.name, title=framework.title, file=file, content=content
    )
    return encode(exported).decode()


def _listed(*, as_json: bool) -> str:
    """The known frameworks, a line each."""
    from batchtune.exports import FRAMEWORKS, export_of

    known = [export_of(name) for name in FRAMEWORKS]
    if as_json:
        return _encoded([{"framework": one.name, "title": one.title, "file": one.file} for one in known])
    width = max(len(one.name) for one in known)
    return "".join(f"{one.name:<{width}}  {one.title}\n" for one in known)


def _encoded(value: Any) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
