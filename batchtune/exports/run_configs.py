"""batchtune's own sampler and stream, which can run every row: `sampler.yaml` and `stream.yaml`, and code around them.

Also `loader.yaml`. The code is for PyTorch and its trainers.
"""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from batchtune.configs import word_or_number
from batchtune.errors import ResultError
from batchtune.exports import (
    Chosen,
    Tuned,
    batches_per_rank,
    broken,
    choose_stream,
    export_of,
    from_template,
    packed_fields,
    recommended_row,
    stream_fields,
    table_fields,
)
from batchtune.files import write_whole
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    STREAM_ALGORITHMS,
    STREAM_CONFIG_FILE,
    EpochFigures,
    LoaderConfig,
    LoaderEvidence,
    LoaderTuning,
    PackedConfig,
    PackedRow,
    PackingSweep,
    Probe,
    ReadingRecord,
    SamplerConfig,
    SamplerEvidence,
    StreamConfig,
    StreamSweep,
    Sweep,
    Swept,
    read_if_written,
)

OWN_STREAM = "batchtune.BucketedStream"

_HEADERS = Path(__file__).parent / "templates" / "headers"
_LISTS = ("bucket_boundaries", "bucket_batch_sizes")
# The fields of a sampler that keeps the examples of each optimizer step.
_OF_STEPS = ("accumulate", "own_accumulate", "equal_counts", "pair_cost")


def sampler_config(
    sweep: Sweep, probe: Probe | None = None
) -> SamplerConfig | PackedConfig:
    """Return the sweep's recommended row as a sampler config; raise ResultError if it recommends no row."""
    if sweep.packed is not None:
        return _packed_config(sweep, sweep.packed, probe)
    row = recommended_row(sweep)
    return SamplerConfig(
        format=SamplerConfig.FORMAT,
        version=SamplerConfig.VERSION,
        unit=sweep.lengths.unit,
        max_batch_length=sweep.max_batch_length,
        max_batch_size=max(row.batch_sizes),
        num_buckets=len(row.boundaries),
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        seed=sweep.settings.seed,
        sampler=row.sampler,
        pool_size=row.pool_size,
        batch_overhead=row.batch_overhead,
        accumulate=row.accumulate,
        own_accumulate=sweep.settings.accumulate or 1 if row.keeps_examples else None,
        equal_counts=row.equal_counts,
        pair_cost=row.pair_cost,
        evidence=msgspec.structs.replace(
            _evidence_of(sweep, row, probe),
            unproven=sweep.unproven,
            proof=sweep.proof,
            multiple_of=sweep.settings.multiple_of,
        ),
    )


def _packed_config(
    sweep: Sweep, packing: PackingSweep, probe: Probe | None
) -> PackedConfig:
    """Return the recommended packer as a sampler config."""
    row = packing.row
    assert row.pool_size is not None
    own_accumulate = sweep.settings.accumulate or 1
    if row.unproven is None:
        # The device and its margin were measured with other batches, if at all.
        sweep = msgspec.structs.replace(sweep, device_name=None)
        probe = None
    return PackedConfig(
        format=PackedConfig.FORMAT,
        version=PackedConfig.VERSION,
        unit=sweep.lengths.unit,
        sampler="same-step-packed" if row.keeps_examples else "packed",
        max_tokens=packing.max_tokens,
        packer=row.packer,
        pool_size=row.pool_size,
        time_law=packing.time_law,
        cut_at=packing.cut_at,
        accumulate=row.accumulate or own_accumulate,
        own_accumulate=own_accumulate if row.keeps_examples else None,
        seed=sweep.settings.seed,
        evidence=msgspec.structs.replace(
            _evidence_of(sweep, row, probe),
            unproven=sweep.unproven,
            proof=sweep.proof,
        ),
    )


def render_sampler_yaml(config: SamplerConfig | PackedConfig) -> str:
    """Return the config as YAML; the same config gives the same bytes, and reading gives the same config."""
    document = msgspec.to_builtins(config)
    unused = {
        "packed": ("own_accumulate",),
        "same-step-packed": ("shuffle", "drop_last", "seed"),
        "bucket": ("sampler", "pool_size", "batch_overhead", *_OF_STEPS),
        "pooled": _OF_STEPS,
        "same-step": (
            "shuffle",
            "batch_ordering",
            "drop_last",
            "seed",
            "batch_overhead",
        ),
    }
    for name in unused[config.sampler]:
        del document[name]
    header = "sampler" if config.sampler == "bucket" else f"sampler-{config.sampler}"
    return _render_yaml(document, header)


def stream_config(stream: StreamSweep, probe: Probe | None = None) -> StreamConfig:
    """Return the best row that `BucketedStream` can run as its config; raises ResultError as `choose_stream` does."""
    row = choose_stream(stream, OWN_STREAM, *STREAM_ALGORITHMS).row
    assert row.algorithm != "speechbrain"
    return StreamConfig(
        format=StreamConfig.FORMAT,
        version=StreamConfig.VERSION,
        unit=stream.lengths.unit,
        algorithm=row.algorithm,
        buffer_size=row.buffer_size,
        max_batch_length=stream.max_batch_length,
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        max_padding_ratio=row.max_padding_ratio,
        shuffle=True,
        drop_last=False,
        batches_per_epoch=None
        if stream.batches_per_rank is None
        else batches_per_rank(row, stream),
        seed=stream.settings.seed,
        evidence=_evidence_of(stream, row, probe),
    )


def render_stream_yaml(config: StreamConfig) -> str:
    """Return the config as YAML; the same config gives the same bytes, and reading gives the same config."""
    return _render_yaml(msgspec.to_builtins(config), f"stream-{config.algorithm}")


def write_config(swept: Sweep | StreamSweep, folder: Path) -> Path | None:
    """Write a sweep's recommendation as `sampler.yaml` or `stream.yaml`, with what the folder's probe proves.

    If nothing is recommended, an earlier file is removed, and its path is returned.
    """
    path = folder / SAMPLER_FILE
    if isinstance(swept, StreamSweep):
        path = folder / STREAM_CONFIG_FILE
    if swept.recommends_nothing:
        if not path.exists():
            return None
        path.unlink()
        return path
    probe = read_if_written(folder / PROBE_FILE, Probe)
    write_whole(path, own_config(swept, probe), follow=False)
    return None


def own_config(swept: Sweep | StreamSweep, probe: Probe | None) -> str:
    """Return a sweep's recommendation as YAML; raise ResultError if it recommends nothing that we can run."""
    if isinstance(swept, StreamSweep):
        return render_stream_yaml(stream_config(swept, probe))
    return render_sampler_yaml(sampler_config(swept, probe))


def loader_config(tuning: LoaderTuning) -> LoaderConfig:
    """Return the recommended row as a config; raise ResultError without a recommendation."""
    row = tuning.recommended_row
    if row is None:
        raise ResultError(
            f"No setting of the loader is recommended: {tuning.reason}",
            "Make one work, and run `batchtune tune-loader` again.",
        )
    return LoaderConfig(
        format=LoaderConfig.FORMAT,
        version=LoaderConfig.VERSION,
        kind=tuning.kind,
        arguments=row.arguments,
        evidence=LoaderEvidence(
            target=tuning.target.words,
            device_name=tuning.device_name,
            processors=tuning.measured_with.processors,
            ranks_per_node=tuning.measured_with.ranks_per_node,
            examples_per_second=row.examples_per_second,
            step_seconds=None if tuning.demand is None else tuning.demand.step_seconds,
            gpu_idle=row.gpu_idle,
        ),
    )


def render_loader_yaml(tuning: LoaderTuning) -> str:
    """Return the recommended arguments as YAML; raise ResultError if no setting is recommended."""
    return _render_yaml(
        msgspec.to_builtins(loader_config(tuning)), f"loader-{tuning.kind}"
    )


def _evidence_of(
    sweep: Swept[Any],
    row: EpochFigures | PackedRow,
    probe: Probe | None,
) -> SamplerEvidence:
    """Return the evidence for a row of a sweep."""
    reading = sweep.lengths.reading or ReadingRecord()
    return SamplerEvidence(
        fingerprint=sweep.lengths.fingerprint,
        device=sweep.device_name,
        allocator=None if probe is None else probe.device.allocator,
        batches=row.batches,
        padding_ratio=row.padding_ratio,
        estimated_epoch_seconds=row.estimated_epoch_seconds,
        unproven=row.unproven,
        margin_bytes=probe.margin.free_bytes
        if probe is not None and probe.margin is not None
        else None,
        min_length=reading.min_length,
        max_length=reading.max_length,
        left_out=sweep.lengths.left_out,
        truncate=reading.truncate,
    )


def _render_yaml(document: dict[str, Any], header: str) -> str:
    """Return a config's fields as YAML below the header of that name, in ASCII, long lists on several lines."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedSeq
    from ruamel.yaml.representer import RoundTripRepresenter

    class Representer(RoundTripRepresenter):
        """Writes null as a word, 1e-05 as 1.0e-05 and 'YES' in quotes, which readers of YAML 1.1 understand, too."""

        def write_none(self, _: None) -> Any:
            return self.represent_scalar("tag:yaml.org,2002:null", "null")

        def write_float(self, value: float) -> Any:
            text = repr(value)
            if "." not in text:
                text = text.replace("e", ".0e")
            return self.represent_scalar("tag:yaml.org,2002:float", text)

        def write_text(self, text: str) -> Any:
            plain = text[:1].isalpha() and word_or_number(text) == text
            plain = plain and text.lower() not in ("on", "off")
            return self.represent_scalar(
                "tag:yaml.org,2002:str", text, style=None if plain else "'"
            )

    Representer.add_representer(str, Representer.write_text)
    Representer.add_representer(type(None), Representer.write_none)
    Representer.add_representer(float, Representer.write_float)
    for name in document.keys() & set(_LISTS):
        document[name] = CommentedSeq(document[name])
        document[name].fa.set_flow_style()
    yaml = YAML()
    yaml.Representer = Representer
    yaml.allow_unicode = False
    # Long lines first, for the lists to be broken below: YAML's own breaks leave spaces at the ends of lines.
    yaml.width = sys.maxsize
    stream = io.StringIO()
    yaml.dump(document, stream)
    lines = [(_HEADERS / f"{header}.txt").read_text(encoding="utf-8")]
    for line in stream.getvalue().splitlines(keepends=True):
        if line.startswith(_LISTS):
            line = f"{broken(line, '  ')}\n"
        lines.append(line)
    return "".join(lines)


# How a framework is given the loader of a sampler that keeps the examples of each step, and where it says how many
# micro-batches these have.
_IN_FRAMEWORKS = {
    "transformers": {
        "within": "return same_steps(super().get_train_dataloader(), lengths) from get_train_dataloader",
        "setting": "gradient_accumulation_steps",
    },
    "accelerate": {
        "within": "same_steps(accelerator.prepare(loader), lengths), whose batches are sent to the device by hand",
        "setting": "gradient_accumulation_steps",
    },
    "lightning": {
        "within": "return same_steps(loader, lengths) from train_dataloader; on several ranks a loader with a "
        "DistributedSampler, and use_distributed_sampler=False",
        "setting": "accumulate_grad_batches",
    },
    "pytorch": {
        "within": "loader = same_steps(loader, lengths); on several ranks one with a DistributedSampler",
        "setting": "where it calls optimizer.step()",
    },
}


def _render_sampler(name: str, tuned: Tuned) -> str:
    """Return code for a trainer around the sampler of `sampler.yaml`."""
    sweep = tuned.needed_sweep
    reading = sweep.lengths.reading or ReadingRecord()
    options = msgspec.structs.asdict(reading).items()
    template = f"{name}.py.j2"
    if sweep.packed is None:
        row = recommended_row(sweep)
        micro_batches = row.accumulate
        fields = table_fields(Chosen(row), tuned)
    else:
        micro_batches = sweep.packed.row.accumulate
        fields = packed_fields(tuned, sweep.packed)
    if micro_batches is not None:
        template = "same_step.py.j2"
        fields.update(_IN_FRAMEWORKS[name])
    return from_template(
        template,
        title=export_of(name).title,
        micro_batches=micro_batches,
        reading={option: value for option, value in options if isinstance(value, str)},
        config=tuned.config,
        packed=sweep.packed is not None,
        **fields,
    )


def _render_stream(name: str, tuned: Tuned) -> str:
    """Return code for a loader around the stream of `stream.yaml`."""
    sweep = tuned.needed_stream
    chosen = choose_stream(sweep, OWN_STREAM, *STREAM_ALGORITHMS)
    return from_template(
        f"{name}.py.j2",
        title=export_of(name).title,
        config=tuned.stream_config,
        nominal=sweep.batches_per_rank is not None,
        **stream_fields(chosen, tuned),
    )


RENDERS = {
    **{name: partial(_render_sampler, name) for name in _IN_FRAMEWORKS},
    "webdataset": partial(_render_stream, "webdataset"),
    "hf-streaming": partial(_render_stream, "hf-streaming"),
}
