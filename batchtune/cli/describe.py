"""`batchtune scan`, `doctor` and `schema`: they describe a data set, this machine, and the result files."""

from __future__ import annotations

import io
import json as json_format
import sys
from pathlib import Path

from batchtune.cli import console
from batchtune.cli.options import (
    JSON,
    OUTPUT,
    QUIET,
    ManifestOptions,
    argument,
    expand,
    option,
)
from batchtune.errors import UsageError, did_you_mean, shortened

# Names of what -o does not write.
_OTHER_FORMATS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".arrow", ".gz", ".zst")

EXAMPLES = {
    "scan": """
batchtune scan train.csv
batchtune scan 'shards/train-{000..127}.tar' --target-key txt -o lengths.parquet
batchtune scan LibriSpeech/train-clean-100 --jobs 8 -o lengths.parquet
batchtune scan 's3://bucket/train/*.tar' --histogram -o histogram.parquet
batchtune scan 's3://bucket/train/*.tar' --engine ray -o lengths.parquet
batchtune scan train.tsv --length-scale 1/16000 --json | jq .percentiles
""",
    "doctor": """
batchtune doctor
batchtune doctor --json > doctor.json
""",
    "schema": """
batchtune schema
batchtune schema sweep
batchtune schema probe -o probe.schema.json
""",
}


@expand
def scan(
    source: ManifestOptions,
    output: Path | None = option(
        "Parquet file to write: id, length, target_length, source.",
        "FILE",
        "--output",
        "-o",
        variable=None,
    ),
    histogram: bool = option(
        "Write each distinct length once, with the number of its examples (count), instead of every example.",
        variable=None,
        default=False,
    ),
    engine: str = option(
        "What reads many files: local, the processes of this machine (--jobs), or ray, the tasks of a Ray cluster.",
        "ENGINE",
        variable=None,
        default="local",
    ),
    ray_address: str | None = option(
        "Address of the Ray cluster (default: the one that Ray finds, or else one started here).",
        "ADDRESS",
        variable=None,
    ),
    summary: bool = option(
        "Only show the summary, as without -o.", variable=None, default=False
    ),
    quiet: bool = QUIET,
    json: bool = JSON,
) -> None:
    """Read the lengths of a data set, once.

    Reads only the headers of audio and .npy arrays, in folders or tar shards. Without -o, shows how the lengths are
    distributed and what hurts batching.

    With -o, writes id, length, target length and source of every example as Parquet, a manifest for
    the other commands. Keeps the lengths of finished shards next to that file until all are
    written: if interrupted, the same command continues where it stopped. With --histogram, the file
    stays small for any number of examples; all commands take it as a manifest, except those that
    need each example or the order.
    """
    from batchtune.manifests import scan as write_scan
    from batchtune.manifests.inputs import check_choice
    from batchtune.manifests.reading import ENGINES
    from batchtune.reports.page import make_page, survey, survey_section

    to_stdout = str(output) == "-"
    if to_stdout and json:
        raise UsageError(
            "stdout can't hold both the Parquet file and the JSON",
            "Name a file with -o, or leave out --json.",
        )
    check_choice("--engine", engine, ENGINES)
    if ray_address is not None and engine != "ray":
        raise UsageError(
            "--ray-address is for the engine ray", "Add --engine ray, or leave it out."
        )
    writes = output is not None and not summary
    if not writes and (histogram or engine == "ray"):
        raise UsageError(
            "--histogram and --engine ray are for writing a file, but none is written",
            "Name it with -o, and leave out --summary.",
        )
    if output is None or summary:
        lengths = source.load(quiet=quiet, described=False)
    else:
        _check_output(output)
        stream = io.BytesIO()
        with console.progress("Reading", quiet=quiet) as bar:
            lengths = write_scan(
                source.manifest,
                source.read_options(),
                stream if to_stdout else output,
                histogram=histogram,
                engine=engine,
                ray_address=ray_address,
                jobs=source.processes,
                on_progress=bar.reading,
                on_note=console.note,
            )
        if to_stdout:
            sys.stdout.buffer.write(stream.getbuffer())
            console.describe(lengths, quiet=quiet)
            return
        holds = f"{lengths.count:,} lengths"
        if histogram:
            holds = f"the histogram of {holds}"
        console.note(f"{output} holds {holds}, the longest first.", quiet=quiet)
    surveyed = survey(lengths, source.manifest)
    if json:
        console.write_json(surveyed)
    else:
        console.show_page(make_page("batchtune scan", [survey_section(surveyed)]))


def _check_output(output: Path) -> None:
    """Raise UsageError rather than overwrite a file other than Parquet, perhaps the manifest, or be named like one."""
    if str(output) != "-" and output.is_file() and output.stat().st_size:
        with output.open("rb") as stream:
            if stream.read(4) != b"PAR1":
                raise UsageError(
                    f"{output} exists and is not a Parquet file",
                    "Name another with -o, or remove it.",
                )
    if output.suffix.lower() in _OTHER_FORMATS:
        raise UsageError(
            f"scan writes Parquet, but {output.name} is the name of another format",
            f"Give -o {output.with_suffix('.parquet')}.",
        )


@expand
def doctor(
    timeout: float = option(
        "Time limit for PyTorch and the driver to answer.",
        "SECONDS",
        min=1,
        default=120.0,
    ),
    json: bool = JSON,
) -> None:
    """Show the devices, memory and software of this machine.

    Shows devices with their memory, driver and clocks, the processes that use them, whether memory can be limited here,
    the settings that a probe would run with, and installed packages. Uses no GPU memory, and reads and writes no file.
    Send its output along with a bug report.
    """
    from batchtune.probe.doctor import examine

    machine = examine(timeout)
    if json:
        console.write_json(machine)
    else:
        from batchtune.reports.page import doctor_page

        console.show_page(doctor_page(machine))


@expand
def schema(
    name: str | None = argument(
        metavar="NAME",
        help="Name of the schema; without it, lists all names.",
        default=None,
    ),
    output: Path | None = OUTPUT,
    json: bool = JSON,
) -> None:
    """Print the JSON Schema of a result file.

    Each file in a run folder, and each command's output with --json, has one: JSON Schema 2020-12,
    with the meaning of each field. Its $id ends in the version of the file, which is also in the
    file's meta.

    Reads nothing. Writes to FILE if -o is given. A schema is always JSON; --json applies to the list of names.
    """
    from batchtune.reports.page import SCHEMAS, schema_list, schema_of

    if name is None and json:
        text = json_format.dumps({"schemas": schema_list()}, indent=2)
    elif name is None:
        text = "\n".join(
            f"{known:<13}  {schema.file}: {schema.summary}"
            for known, schema in SCHEMAS.items()
        )
    elif name in SCHEMAS:
        text = json_format.dumps(schema_of(name), indent=2, ensure_ascii=False)
    else:
        hint = f"{did_you_mean(name, SCHEMAS)}Known schemas: {', '.join(SCHEMAS)}."
        raise UsageError(f"unknown schema {shortened(name)}", hint)
    console.write_result(f"{text}\n", output)
