"""The published schemas: what commands write holds to them, what is damaged does not.

The schemas are held as snapshots, so that a change of a file's format is noticed. To write them anew after a wanted
change:

    REFRESH_SNAPSHOTS=1 python -m pytest tests/cli/test_schema.py

and read the difference before keeping it: a field that is gone or means something else needs a new version.
"""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from cli.conftest import run_here
from jsonschema import Draft202012Validator
from report_records import made_sweep
from ruamel.yaml import YAML
from streamed_records import made_stream, whole_stream

from batchtune.reports.page import SCHEMAS, schema_of
from batchtune.results import encode

SNAPSHOTS = Path(__file__).parent / "schemas"


@cache
def validator(name):
    return Draft202012Validator(schema_of(name))


def errors(name, document):
    return [
        f"{error.json_path}: {error.message}"
        for error in validator(name).iter_errors(document)
    ]


@pytest.fixture(scope="session")
def written(made_once, verified):
    """A folder with what commands write: a run folder, and what they print with --json; not to be written to."""

    def make(folder):
        shutil.copytree(verified, folder, dirs_exist_ok=True)
        run, manifest = folder / "batchtune-run", folder / "lengths.csv"
        commands = {
            "sweep": ["sweep-buckets", manifest, "--num-buckets", "2:3", "--run", run],
            "scan": ["scan", manifest],
            "report": ["report", run],
            "export": ["export", run, "--to", "pytorch"],
        }
        for name, words in commands.items():
            ran = run_here(*words, "--json", code=0)
            (folder / f"{name}.stdout").write_text(ran.stdout)

    return made_once("schema-written", make)


def documents(written):
    """Where it was found, which schema holds for it, and the document."""
    run = written / "batchtune-run"
    for name in ("run", "probe", "sweep", "verify"):
        yield f"{name}.json", name, json.loads((run / f"{name}.json").read_text())
    for number, line in enumerate((run / "trials.jsonl").read_text().splitlines()):
        yield f"trials.jsonl, {number}", "trials", json.loads(line)
    yield "sampler.yaml", "sampler", YAML(typ="safe").load(run / "sampler.yaml")
    for path in written.glob("*.stdout"):
        yield path.name, path.stem, json.loads(path.read_text())


def test_all_that_commands_write_and_print_holds_to_its_schema(written):
    for where, name, document in documents(written):
        assert errors(name, document) == [], where


def test_the_schemas_cover_every_file_of_a_run_folder(written):
    files = {path.name for path in (written / "batchtune-run").iterdir()}
    assert files <= {one.file.partition(",")[0] for one in SCHEMAS.values()}


def test_what_is_damaged_does_not_hold(written):
    for _, name, document in documents(written):
        assert errors(name, {"meta": document.get("meta")}), name
        for field in SCHEMAS[name].record.__struct_fields__[:3]:
            assert errors(name, {**document, field: {"not": "this"}}), (name, field)


@pytest.mark.parametrize(
    "stream", [made_stream(timed=False), whole_stream()], ids=["made", "whole"]
)
def test_a_stream_holds_to_its_schema(stream):
    document = json.loads(encode(stream))
    assert errors("stream", document) == []
    document["shards"]["broken"] = -1
    assert errors("stream", document)


def test_another_format_or_a_newer_version_does_not_hold():
    document = json.loads(encode(made_sweep()))
    assert errors("sweep", document) == []
    assert errors("probe", document)
    for other in ({"format": "batchtune/probe"}, {"version": 99}):
        assert errors("sweep", {**document, "meta": {**document["meta"], **other}})


def test_the_schemas_are_as_in_their_snapshots():
    schemas = {f"{name}.schema.json": schema_of(name) for name in SCHEMAS}
    if os.environ.get("REFRESH_SNAPSHOTS") == "1":
        for name, schema in schemas.items():
            text = json.dumps(schema, indent=2, ensure_ascii=False)
            (SNAPSHOTS / name).write_text(f"{text}\n", encoding="utf-8")
    snapshots = {
        path.name: json.loads(path.read_bytes()) for path in SNAPSHOTS.iterdir()
    }
    assert without_names(snapshots) == without_names(schemas)


def without_names(schemas):
    """Return `schemas` without the rules for property names, which msgspec adds from 0.23 on."""
    return json.loads(
        json.dumps(schemas),
        object_hook=lambda found: {
            key: rule for key, rule in found.items() if key != "propertyNames"
        },
    )


def test_a_schema_is_one_of_2020_12():
    parts = {}  # what schemas share is checked once
    for name in SCHEMAS:
        schema = schema_of(name)
        for part in (*schema.pop("$defs").values(), schema):
            parts[json.dumps(part)] = part
    Draft202012Validator.check_schema({"$defs": parts})


def test_schemas_are_listed_printed_and_written(batchtune, tmp_path):
    lines = batchtune("schema").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMAS)
    listed = json.loads(batchtune("schema", "--json").stdout)["schemas"]
    assert [one["name"] for one in listed] == list(SCHEMAS)
    assert json.loads(batchtune("schema", "run").stdout) == schema_of("run")
    assert batchtune("schema", "probe", "-o", "probe.schema.json").stdout == ""
    file = tmp_path / "probe.schema.json"
    assert json.loads(file.read_text()) == schema_of("probe")
