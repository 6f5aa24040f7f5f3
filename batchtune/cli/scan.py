"""`batchtune scan`."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

from batchtune.cli import console
from batchtune.cli.options import Json, ManifestOptions, Quiet, expand, option
from batchtune.errors import UsageError

EXAMPLES = {
    "scan": """
batchtune scan train.csv
batchtune scan 'shards/train-{000..127}.tar' --target-key txt -o lengths.parquet
batchtune scan LibriSpeech/train-clean-100 --jobs 8 -o lengths.parquet
batchtune scan train.tsv --length-scale 1/16000 --json | jq .percentiles
"""
}


@expand
def scan(
    source: ManifestOptions,
    output: Annotated[
        Path | None,
        option(
            "Parquet file to write: id, length, target_length, source.",
            "FILE",
            "--output",
            "-o",
            variable=None,
        ),
    ] = None,
    summary: Annotated[
        bool, option("Only show the summary, as without -o.", variable=None)
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Read the lengths of a data set, once.

    Reads only the headers of audio and .npy arrays, in folders or tar shards. Without -o, shows how the lengths are
    distributed and what hurts batching.

    With -o, writes id, length, target length and source of every example as Parquet, a manifest for the other
    commands. Keeps the lengths of finished shards next to it until all are written: if interrupted, the same command
    continues where it stopped.
    """
    from batchtune.cli.progress import progress
    from batchtune.manifests import scan as write_scan
    from batchtune.reports.page import make_page
    from batchtune.reports.survey import survey, survey_section

    to_stdout = str(output) == "-"
    if to_stdout and json:
        raise UsageError(
            "stdout can't hold both the Parquet file and the JSON",
            "Name a file with -o, or leave out --json.",
        )
    if output is None or summary:
        lengths = source.load(quiet=quiet, described=False)
    else:
        _check_output(output)
        stream = io.BytesIO()
        with progress("Reading", quiet=quiet) as bar:
            lengths = write_scan(
                source.manifest,
                source.read_options(),
                stream if to_stdout else output,
                jobs=source.processes,
                on_progress=bar.reading,
                on_note=console.note,
            )
        if to_stdout:
            sys.stdout.buffer.write(stream.getbuffer())
            console.describe(lengths, quiet=quiet)
            return
        console.note(
            f"{output} holds {lengths.count:,} lengths, the longest first.", quiet=quiet
        )
    scan = survey(lengths, source.manifest)
    if json:
        console.write_json(scan)
    else:
        console.show_page(make_page("batchtune scan", [survey_section(scan)]))


def _check_output(output: Path) -> None:
    """Raise UsageError rather than overwrite a file other than Parquet: perhaps the manifest itself."""
    if str(output) != "-" and output.is_file() and output.stat().st_size:
        with output.open("rb") as stream:
            if stream.read(4) != b"PAR1":
                raise UsageError(
                    f"{output} exists and is not a Parquet file",
                    "Name another with -o, or remove it.",
                )
