"""`loader.yaml`: the recommended arguments of a data loader."""

from __future__ import annotations

import msgspec

from batchtune.errors import ResultError
from batchtune.exports.sampler import render_yaml
from batchtune.results import LoaderConfig, LoaderEvidence, LoaderTuning

_HEADERS = {
    "torch": """\
# batchtune's recommendation for torch's DataLoader: pass `arguments` to it, next to the data set and
# what makes its batches.
""",
    "dali": """\
# batchtune's recommendation for a function that makes batches with DALI's dynamic mode (ndd):
# call ndd.set_num_threads(num_threads) once, before anything else; take batches within
# `with ndd.EvalMode.<eval_mode>:`; with reader_threads, call the function in so many threads, each with its
# shard_id and num_shards, and let each keep queue_depth batches ready. All else is passed to the function.
""",
}
_HEADER = """\
# batchtune's recommendation for a data loader: pass `arguments` to the function that makes it.
"""


def loader_config(tuning: LoaderTuning) -> LoaderConfig:
    """Return the recommended row as a config; raise ResultError if none is recommended."""
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
            gpu_idle=row.idle,
        ),
    )


def render_loader_yaml(tuning: LoaderTuning) -> str:
    """Return the recommended arguments as YAML; raise ResultError if no setting is recommended."""
    return render_yaml(msgspec.to_builtins(loader_config(tuning)), _HEADERS.get(tuning.kind, _HEADER))
