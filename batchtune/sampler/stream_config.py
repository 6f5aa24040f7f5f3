"""The arguments of a `BucketedStream` that a config file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchtune.configs.tree import parse_yaml, plain_value, read_text
from batchtune.exports.sampler import read_sampler_yaml
from batchtune.results import SamplerConfig

_OF_BOTH = ("bucket_boundaries", "bucket_batch_sizes", "shuffle", "drop_last", "seed")
_OF_STREAM = (*_OF_BOTH, "algorithm", "buffer_size", "max_padding_ratio", "batches_per_epoch")


def config_options(path: Path) -> dict[str, Any]:
    """Return the arguments that a `stream.yaml` or a `sampler.yaml` says.

    Raises:
        ResultError: The file is missing or damaged.
    """
    document = plain_value(parse_yaml(read_text(path, str(path), ""), str(path))) if path.exists() else None
    if not isinstance(document, dict) or document.get("format") != SamplerConfig.FORMAT:
        from batchtune.exports.stream import read_stream_yaml

        config = read_stream_yaml(path)
        return {name: getattr(config, name) for name in _OF_STREAM}
    table = read_sampler_yaml(path)
    options = {name: getattr(table, name) for name in _OF_BOTH}
    return options if table.pool_size is None else {**options, "algorithm": "pool", "buffer_size": table.pool_size}
