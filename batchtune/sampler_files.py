"""Reads `sampler.yaml` and `stream.yaml`, which samplers run in every training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError, invalid_field, shortened
from batchtune.records import PackedConfig, SamplerConfig, StreamConfig

# The samplers of a `PackedConfig`.
_PACKED = ("packed", "same-step-packed")


def read_sampler_yaml(path: Path) -> SamplerConfig:
    """Read and check a `sampler.yaml` of padded batches.

    Raises ResultError as `_read_config` does, and for packed ones.
    """
    config = read_any_sampler_yaml(path)
    if isinstance(config, PackedConfig):
        raise ResultError(
            f"{path} describes packed micro-batches, and padded batches are needed here",
            "Run `batchtune sweep-buckets` without --max-tokens, in a run folder without a probe of packed batches.",
        )
    return config


def read_any_sampler_yaml(
    path: Path, command: str = "tune"
) -> SamplerConfig | PackedConfig:
    """Read and check a `sampler.yaml`, which `command` writes; raises ResultError as `_read_config` does."""
    config: SamplerConfig | PackedConfig = _read_config(
        path, SamplerConfig, "sampler.yaml", command
    )
    return config


def _check(config: SamplerConfig | PackedConfig | StreamConfig) -> None:
    """Raise ValueError if fields contradict each other."""
    if isinstance(config, PackedConfig):
        from batchtune.packing.packing import budget_of

        budget_of(
            config.max_tokens,
            packer=config.packer,
            time_law=config.time_law,
            cut_at=config.cut_at,
        )
        if (config.sampler == "packed") == config.keeps_examples:
            raise _wrong_for_sampler(config, "own_accumulate")
        return
    BucketTable.of(config.bucket_boundaries, config.bucket_batch_sizes)
    if isinstance(config, StreamConfig):
        if config.max_padding_ratio is not None and config.algorithm != "pivot":
            raise ValueError(
                f"max_padding_ratio belongs to the algorithm pivot, but algorithm is {config.algorithm}"
            )
        return
    sizes = config.bucket_batch_sizes
    of_table = {"num_buckets": len(sizes), "max_batch_size": max(sizes)}
    for name, value in of_table.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but the table's is {value}"
            )
    if (config.sampler == "bucket") == (config.pool_size is not None):
        raise _wrong_for_sampler(config, "pool_size")
    if config.batch_overhead is not None and config.sampler != "pooled":
        raise ValueError(
            f"batch_overhead belongs to the sampler pooled, but sampler is {config.sampler}"
        )
    for name in ("accumulate", "own_accumulate"):
        if (config.sampler == "same-step") != (getattr(config, name) is not None):
            raise _wrong_for_sampler(config, name)


def _wrong_for_sampler(config: SamplerConfig | PackedConfig, name: str) -> ValueError:
    return ValueError(
        f"sampler is {config.sampler}, but {name} is {getattr(config, name)}"
    )


def read_stream_yaml(path: Path) -> StreamConfig:
    """Read and check a `stream.yaml`; raises ResultError as `_read_config` does."""
    config: StreamConfig = _read_config(
        path, StreamConfig, "stream.yaml", "sweep-stream"
    )
    return config


def _why_none(path: Path) -> str | None:
    """Return the reason of the sweep next to a config that does not exist; None unless it recommends nothing."""
    from batchtune.results import (
        STREAM_CONFIG_FILE,
        STREAM_FILE,
        SWEEP_FILE,
        StreamSweep,
        Sweep,
        read_if_written,
    )

    kind: type[Sweep | StreamSweep] = Sweep
    swept = path.with_name(SWEEP_FILE)
    if path.name == STREAM_CONFIG_FILE:
        kind = StreamSweep
        swept = path.with_name(STREAM_FILE)
    sweep = read_if_written(swept, kind)
    if sweep is None or not sweep.recommends_nothing:
        return None
    return sweep.reason


def _read_config(
    path: Path,
    kind: type[SamplerConfig] | type[StreamConfig],
    name: str,
    command: str,
) -> Any:
    """Read a config, which `command` writes as `name`.

    Raises:
        ResultError: Missing, unreadable, not YAML, of another format, newer, or damaged; the message names the field.
    """
    if not path.exists():
        reason = _why_none(path)
        if reason is not None:
            raise ResultError(
                f"{path} does not exist: {reason}",
                f"Keep your current batches, or try `batchtune {command}` with other options.",
            )
        raise ResultError(
            f"{path} does not exist",
            f"`batchtune {command}` writes it. Another run folder is named with --run.",
        )
    from batchtune.configs import parse_yaml, plain_value, read_text

    again = f"Fix it, or create it again with `batchtune {command}`."
    text = read_text(path, str(path), again)
    document = plain_value(parse_yaml(text, str(path), again))
    header = document if isinstance(document, dict) else {}
    declared = header.get("format")
    if declared != kind.FORMAT:
        # Aliases may make the text of a list endless.
        named = declared if isinstance(declared, str) else None
        raise ResultError(
            f"{path} has the format {shortened(named)}; a file of the format {kind.FORMAT!r} is needed here",
            f"Give the {name} that `batchtune {command}` wrote.",
        )
    version = header.get("version")
    if isinstance(version, int) and version > kind.VERSION:
        raise ResultError(
            f"{path} has version {version} of {declared}; this batchtune knows versions up to {kind.VERSION}",
            "Install a newer batchtune.",
        )
    read_as: type[SamplerConfig | PackedConfig | StreamConfig] = kind
    if kind is SamplerConfig and header.get("sampler") in _PACKED:
        read_as = PackedConfig
    try:
        config = msgspec.convert(document, type=read_as)
        _check(config)
    except ValueError as error:  # msgspec's own, too
        problem = invalid_field(error)
        raise ResultError(f"{path} is damaged: {problem}", again) from error
    return config
