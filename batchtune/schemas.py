"""JSON Schemas (draft 2020-12) of the files that commands write, described by the records' docstrings."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from batchtune.reports.json_format import Report
from batchtune.results import (
    Doctor,
    Exported,
    LoaderConfig,
    LoaderTuning,
    Probe,
    Record,
    Run,
    SamplerConfig,
    Scan,
    StreamConfig,
    StreamSweep,
    Sweep,
    Trial,
    Verification,
)

# One entry of a Google-style section: one or several names, a colon, the text, in which another entry may begin.
_ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*): (?P<text>.*)")
_NEXT = re.compile(r"; ([a-z]\w*): ")
_NONE = re.compile(r"\bNone\b")


class Described(NamedTuple):
    """The record in a file, the name of the file, and what it holds."""

    record: type[Record]
    file: str
    one_line: str


SCHEMAS = {
    "run": Described(Run, "run.json", "the conditions of a run folder's trials"),
    "probe": Described(Probe, "probe.json", "what fits on the device, and what a batch costs"),
    "sweep": Described(Sweep, "sweep.json", "the bucket tables compared, and the recommended one"),
    "stream": Described(StreamSweep, "stream.json", "the ways to batch a stream compared, and the recommended one"),
    "stream-config": Described(StreamConfig, "stream.yaml", "the recommendation for a stream; YAML with this content"),
    "loader": Described(LoaderTuning, "loader.json", "the settings of a data loader compared, and the recommended one"),
    "loader-config": Described(LoaderConfig, "loader.yaml", "the recommended arguments of a loader; YAML"),
    "verify": Described(Verification, "verify.json", "what running the recommended batches showed"),
    "trials": Described(Trial, "trials.jsonl, each line", "one batch shape that was measured"),
    "sampler": Described(SamplerConfig, "sampler.yaml", "the recommendation; YAML with the same content as JSON"),
    "report": Described(Report, "report --format json, tune --json", "the summary of a run, and its result files"),
    "export": Described(Exported, "export --json", "the recommendation as another framework's config"),
    "scan": Described(Scan, "scan --json", "what the lengths of a data set look like"),
    "doctor": Described(Doctor, "doctor --json", "what a machine offers"),
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a file, by its name in `SCHEMAS`."""
    record = SCHEMAS[name].record
    (_,), components = msgspec.json.schema_components([record], ref_template="#/$defs/{name}")
    records = {kind.__name__: kind for kind in (record, *_subclasses(Record)) if kind.__name__ in components}
    definitions = {title: _described(schema, records[title]) for title, schema in components.items()}
    root = definitions.pop(record.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier_of(name),
        **root,
        "title": f"batchtune: {SCHEMAS[name].file}",
        **({"$defs": definitions} if definitions else {}),
    }


def render_schema(name: str) -> str:
    """Return the schema as JSON text, with a line break at its end; the same bytes each time."""
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def render_names() -> str:
    """Return the names of all schemas, one a line, each with its file and what that holds."""
    width = max(map(len, SCHEMAS))
    return "".join(f"{name:<{width}}  {one.file}: {one.one_line}\n" for name, one in SCHEMAS.items())


def render_list() -> str:
    """Return the names of all schemas as JSON text."""
    listed: list[dict[str, Any]] = []
    for name, (record, file, one_line) in SCHEMAS.items():
        listed.append({"name": name, "file": file, "description": one_line})
        listed[-1] |= {"version": record.VERSION, "id": identifier_of(name)}
    return json.dumps({"schemas": listed}, indent=2, ensure_ascii=False) + "\n"


def identifier_of(name: str) -> str:
    """Return the `$id` of a schema, which ends in the version of its files."""
    return f"urn:batchtune:schema:{name}:{SCHEMAS[name].record.VERSION}"


def _subclasses(kind: type[Record]) -> Iterator[type[Record]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _described(schema: dict[str, Any], record: Any) -> dict[str, Any]:
    """Describe a record's schema by its docstring: the text at the top, each attribute's at its property."""
    text, attributes = read_docstring(inspect.getdoc(record) or "")
    properties: dict[str, Any] = schema["properties"]
    for name, words in attributes.items():
        properties[name] = {**properties[name], "description": _NONE.sub("null", words)}
    if hasattr(record, "FORMAT"):
        declaration = {
            "format": {"type": "string", "const": record.FORMAT},
            "version": {"type": "integer", "minimum": 1, "maximum": record.VERSION},
        }
        # A file has its format and version in `meta`, or at its top.
        if "meta" in properties:
            properties["meta"] = {**properties["meta"], "properties": declaration}
        else:
            properties.update(declaration)
    return {**schema, "description": _NONE.sub("null", text), "properties": properties}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its text, paragraph by paragraph, and its attributes' descriptions.

    Several names before one colon share its text; one entry may hold several attributes, as `a: ...; b: ...`.
    """
    head, _, section = text.partition("\nAttributes:\n")
    attributes: dict[str, str] = {}
    # A continuation line is indented further.
    entries = re.sub(r"\n +", " ", textwrap.dedent(section)).strip().splitlines()
    for entry in filter(None, map(_ENTRY.fullmatch, entries)):
        words, *others = _NEXT.split(entry["text"])
        attributes |= dict.fromkeys(entry["names"].split(", "), words)
        attributes |= zip(others[::2], others[1::2], strict=True)
    paragraphs = [" ".join(part.split()) for part in head.strip().split("\n\n")]
    return "\n\n".join(paragraphs), attributes
