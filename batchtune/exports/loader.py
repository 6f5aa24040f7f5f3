"""`loader.yaml`: the recommended arguments of a data loader; and the same in the configs of frameworks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from batchtune.errors import ResultError
from batchtune.exports.base import Tuned
from batchtune.exports.sampler import render_yaml
from batchtune.results import (
    LOADER_CONFIG_FILE,
    TORCH_ARGUMENTS,
    Argument,
    Arguments,
    LoaderConfig,
    LoaderEvidence,
    LoaderRow,
    LoaderTuning,
    argument_text,
)
from batchtune.units import format_number, format_percent

# The defaults of torch's DataLoader: an argument with its default needs no word where it can't be expressed.
_DEFAULTS: Arguments = {"prefetch_factor": 2, "pin_memory": False, "persistent_workers": False, "in_order": True}
# Arguments that torch refuses without workers, or that do nothing then.
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")

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
    """Return the recommended arguments as YAML; the same tuning gives the same bytes.

    Raises:
        ResultError: No setting is recommended.
    """
    return render_yaml(msgspec.to_builtins(loader_config(tuning)), _HEADERS.get(tuning.kind, _HEADER))


class Loading(NamedTuple):
    """The recommended arguments of torch's DataLoader, as exports write them; None: without a recommendation.

    Attributes:
        arguments: Those that are not null, `num_workers` first.
        others: Of the user's own function.
        about: What was measured with them, a sentence without a full stop.
    """

    arguments: dict[str, bool | int | str]
    others: Arguments
    about: str

    @classmethod
    def of(cls, tuned: Tuned) -> Loading | None:
        """Return those of a run; None without a recommendation for a DataLoader."""
        loader = tuned.loader
        row = None if loader is None or loader.kind != "torch" else loader.recommended_row
        if row is None or row.arguments.get("num_workers") is None:
            return None
        known = [name for name in TORCH_ARGUMENTS if row.workers or name not in _OF_WORKERS]
        arguments = {name: value for name in known if (value := row.arguments.get(name)) is not None}
        others = {name: value for name, value in row.arguments.items() if name not in TORCH_ARGUMENTS}
        return cls(arguments, others, _about(row))  # type: ignore[arg-type]

    @property
    def workers(self) -> int:
        """`num_workers`."""
        return int(self.arguments["num_workers"])

    def remarks(self, who: str = "", expresses: Collection[str] = TORCH_ARGUMENTS) -> Iterator[str]:
        """Yield what was measured, and the arguments that `who` can't express, or that are not of the DataLoader."""
        yield self.about
        beyond = {name: value for name, value in self.arguments.items() if name not in expresses}
        if named := _named({name: value for name, value in beyond.items() if _DEFAULTS.get(name) != value}):
            yield f"{who} has no setting for what else was recommended: {named}"
        if named := _named(self.others):
            yield f"Recommended besides, for the function that was tuned: {named}"

    def beside(self, workers: str = "num_workers") -> list[str]:
        """Return the arguments besides `num_workers` as Python code, which holds without workers, too."""
        written = []
        for name, value in self.arguments.items():
            if name == "persistent_workers" and value is True:
                written.append(f"{name}={workers} > 0")
            elif name in ("prefetch_factor", "multiprocessing_context"):
                written.append(f"{name}={_literal(value)} if {workers} else None")
            elif name != "num_workers":
                written.append(f"{name}={_literal(value)}")
        return written


def loading_fields(tuned: Tuned, swept_workers: int | None = None, workers: str = "num_workers") -> dict[str, Any]:
    """Return what templates of Python code say of the loader; `swept_workers` are those of a stream's sweep."""
    loading = Loading.of(tuned)
    if loading is None:
        return {"workers": swept_workers or 4, "beside": [], "loading": ()}
    remarks = list(loading.remarks())
    if swept_workers not in (None, loading.workers):
        remarks.append(
            f"The figures above are those of {swept_workers} workers, the loader's of {loading.workers}: each has "
            f"shards and a buffer of its own. `batchtune sweep-stream` with --workers {loading.workers} sweeps for them"
        )
    return {"workers": loading.workers, "beside": loading.beside(workers), "loading": remarks}


def _about(row: LoaderRow) -> str:
    waits = "" if row.idle is None else f", and a step that waits for data {format_percent(row.idle)} of the time"
    rate = f"{format_number(row.examples_per_second or row.batches_per_second or 0.0)} {row.rate_unit}"
    return (
        f"The loader's arguments are those of {LOADER_CONFIG_FILE}, as `batchtune tune-loader` measured them: "
        f"{rate}{waits}"
    )


def _named(arguments: Arguments) -> str:
    return ", ".join(f"{name}={argument_text(value)}" for name, value in arguments.items())


def _literal(value: Argument) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
