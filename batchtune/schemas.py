"""JSON Schemas (draft 2020-12) of the files that commands write, described by the records' docstrings."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import msgspec

from batchtune.reports.page import Report
from batchtune.results import (
    Doctor,
    Exported,
    LoaderConfig,
    LoaderTuning,
    PackedConfig,
    Probe,
    Record,
    Run,
    SamplerConfig,
    Scan,
    StreamConfig,
    StreamSweep,
    Sweep,
    TrainingStart,
    TrainingStep,
    Trial,
    Verification,
)


class DescribedFile(NamedTuple):
    """The record in a file, the name of the file, and what it holds."""

    record: type[Record]
    file: str
    summary: str


SCHEMAS = {
    "run": DescribedFile(Run, "run.json", "the conditions of a run folder's trials"),
    "probe": DescribedFile(
        Probe, "probe.json", "what fits on the device, and what a batch costs"
    ),
    "sweep": DescribedFile(
        Sweep, "sweep.json", "the bucket tables compared, and the recommended one"
    ),
    "stream": DescribedFile(
        StreamSweep,
        "stream.json",
        "the ways to batch a stream compared, and the recommended one",
    ),
    "stream-config": DescribedFile(
        StreamConfig,
        "stream.yaml",
        "the recommendation for a stream; YAML with this content",
    ),
    "loader": DescribedFile(
        LoaderTuning,
        "loader.json",
        "the settings of a data loader compared, and the recommended one",
    ),
    "loader-config": DescribedFile(
        LoaderConfig, "loader.yaml", "the recommended arguments of a loader; YAML"
    ),
    "verify": DescribedFile(
        Verification, "verify.json", "what running the recommended batches showed"
    ),
    "trials": DescribedFile(
        Trial, "trials.jsonl, each line", "one batch shape that was measured"
    ),
    "training": DescribedFile(
        TrainingStart, "training.jsonl, first line", "the start of a recording"
    ),
    "training-step": DescribedFile(
        TrainingStep, "training.jsonl, each further line", "one step of a training"
    ),
    "sampler": DescribedFile(
        SamplerConfig,
        "sampler.yaml",
        "the recommendation; YAML with the same content as JSON",
    ),
    "packed-sampler": DescribedFile(
        PackedConfig,
        "sampler.yaml of a training that packs",
        "the recommended packer; YAML with the same content as JSON",
    ),
    "report": DescribedFile(
        Report,
        "report --format json, tune --json",
        "the summary of a run, and its result files",
    ),
    "export": DescribedFile(
        Exported, "export --json", "the recommendation as another framework's config"
    ),
    "scan": DescribedFile(
        Scan, "scan --json", "what the lengths of a data set look like"
    ),
    "doctor": DescribedFile(Doctor, "doctor --json", "what a machine offers"),
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a file, by its name in `SCHEMAS`; each record is described by its docstring."""
    record = SCHEMAS[name].record
    described = msgspec.json.schema(record)
    for definition in described["$defs"].values():
        definition["description"] = inspect.cleandoc(definition["description"])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": _identifier(name),
        "title": f"batchtune: {SCHEMAS[name].file}",
        **described,
    }
    # A file has its format and version in `meta`, or at its top; a line of a journal has none.
    if hasattr(record, "FORMAT"):
        declared = {
            "format": {"const": record.FORMAT},
            "version": {"minimum": 1, "maximum": record.VERSION},
        }
        has_meta = "meta" in record.__struct_fields__
        schema["properties"] = (
            {"meta": {"properties": declared}} if has_meta else declared
        )
    return schema


def schema_list() -> list[dict[str, Any]]:
    """Return what the schemas are of."""
    return [
        {
            "name": name,
            "file": schema.file,
            "description": schema.summary,
            "version": schema.record.VERSION,
            "id": _identifier(name),
        }
        for name, schema in SCHEMAS.items()
    ]


def _identifier(name: str) -> str:
    """Return the `$id` of a schema, which ends in the version of its files."""
    return f"urn:batchtune:schema:{name}:{SCHEMAS[name].record.VERSION}"
