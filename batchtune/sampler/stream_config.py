"""The arguments of `BucketedStream` that a file describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from batchtune.configs import parse_yaml, plain_value, read_text
from batchtune.exports.run_configs import read_sampler_yaml, read_stream_yaml
from batchtune.results import SamplerConfig, StreamConfig
from batchtune.sampler.common import truncated
from batchtune.sampler.worker import SHORTEST_LENGTH

_OF_BOTH = ("bucket_boundaries", "bucket_batch_sizes", "shuffle", "drop_last", "seed")
_OF_STREAM = ("algorithm", "buffer_size", "max_padding_ratio", "batches_per_epoch")


def read_stream_options(path: Path, length_of: Callable[[Any], float]) -> dict[str, Any]:
    """Return the arguments of a `stream.yaml`, or of a `sampler.yaml`; ResultError if it is missing or damaged."""
    config: SamplerConfig | StreamConfig
    if _is_sampler_yaml(path):
        config = read_sampler_yaml(path)
        options = {name: getattr(config, name) for name in _OF_BOTH}
        if config.pool_size is not None:
            options["algorithm"] = "pool"
            options["buffer_size"] = config.pool_size
    else:
        config = read_stream_yaml(path)
        options = {name: getattr(config, name) for name in (*_OF_BOTH, *_OF_STREAM)}
    evidence = config.evidence
    options["length_of"] = length_of
    if evidence.truncate is not None:
        options["length_of"] = partial(truncated, length_of, evidence.truncate)
    options["min_length"] = evidence.min_length or SHORTEST_LENGTH
    options["overlong"] = "drop"
    return options


def _is_sampler_yaml(path: Path) -> bool:
    if not path.exists():
        return False
    document = plain_value(parse_yaml(read_text(path, str(path)), str(path)))
    return isinstance(document, dict) and document.get("format") == SamplerConfig.FORMAT
