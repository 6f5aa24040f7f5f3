"""`batchtune sweep-buckets` and `batchtune sweep-stream`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.cli.options import (
    ManifestOptions,
    MaxBatchLength,
    RunOptions,
    StreamOptions,
    SweepOptions,
    expand,
)
from batchtune.errors import UsageError
from batchtune.units import format_length

if TYPE_CHECKING:
    from batchtune.buckets.current import Current
    from batchtune.lengths import Lengths
    from batchtune.results import Probe, StreamSweep, Sweep, SweepSettings

EXAMPLES = {
    "sweep-buckets": """
batchtune sweep-buckets train.csv
batchtune sweep-buckets train.csv --max-batch-length 600 --num-buckets 10:20
batchtune sweep-buckets train.csv --current max_batch_length=600,num_buckets=200
batchtune sweep-buckets train.csv --strategy optimal --strategy speechbrain --json | jq .reason
""",
    "sweep-stream": """
batchtune sweep-stream 'shards/train-{000..127}.tar' --workers 4 --max-batch-length 600
batchtune sweep-stream 'shards/train-{000..127}.tar' --workers 4 --world-size 8 --shuffle-buffer 5000
batchtune sweep-stream train.csv --shard-size 1000 --buffer-size 1024,4096
batchtune sweep-stream shards/ --current target_batch_numel=450,max_batch_numel=600,buffersize=1024
""",
}


@expand
def sweep_buckets(
    source: ManifestOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_length: MaxBatchLength = None,
) -> None:
    """Compare bucket tables and recommend one.

    Computes exactly what one epoch costs with each strategy and number of buckets. Needs no GPU, and no torch.

    Reads the manifest, and max_batch_length and costs from the run folder's probe.json; with --max-batch-length, no
    probe is needed. Options with which the run read its manifest, such as --max-length, are taken from there and shown,
    unless --force starts over. Writes sweep.json and sampler.yaml there.
    """
    settings = sweep.settings(run)
    current = sweep.current_settings()
    lengths = source.load(quiet=run.quiet, as_in=run.continued)
    _check_limit(max_batch_length, lengths, quiet=run.quiet)
    _show(
        sweep_and_write(
            lengths, settings, current, run, max_batch_length=max_batch_length
        ),
        run,
    )


@expand
def sweep_stream(
    source: ManifestOptions,
    stream: StreamOptions,
    run: RunOptions,
    max_batch_length: MaxBatchLength = None,
) -> None:
    """Tune the batches of a stream of tar shards.

    Simulates what each worker of each rank reads, as WebDataset splits and shuffles shards, and compares SpeechBrain's
    dynamic_bucketed_batch with batchtune's own BucketedStream at the same buffer size. Needs no GPU.

    Reads tar shards (only their headers), or any manifest in the order of the stream. max_batch_length and costs come
    from the run folder's probe.json, or from --max-batch-length. Writes stream.json and stream.yaml there.
    """
    from batchtune.cli.progress import progress
    from batchtune.exports.run_configs import render_stream_yaml, stream_config
    from batchtune.results import STREAM_CONFIG_FILE
    from batchtune.streams.stream_settings import stream_current
    from batchtune.streams.stream_sweep import run_stream_sweep

    settings = stream.settings(run)
    found = source.load_stream(quiet=run.quiet, as_in=run.continued)
    _check_limit(max_batch_length, found.lengths, quiet=run.quiet)
    current = None
    if stream.current is not None:
        current = stream_current(stream.current, found.lengths)
    with progress("Sweeping", quiet=run.quiet) as bar:
        swept = run_stream_sweep(
            found,
            settings,
            run.run,
            max_batch_length=max_batch_length,
            current=current,
            force=run.force,
            on_row=bar.row,
        )
    config = run.run / STREAM_CONFIG_FILE
    _write_config(
        swept, config, lambda probe: render_stream_yaml(stream_config(swept, probe))
    )
    _show(swept, run)


def sweep_and_write(
    lengths: Lengths,
    settings: SweepSettings,
    current: Current | None,
    run: RunOptions,
    *,
    max_batch_length: float | None = None,
) -> Sweep:
    """Sweep with a progress bar, and write `sweep.json` and `sampler.yaml`, or remove an earlier one."""
    from batchtune.buckets.sweep import run_sweep
    from batchtune.cli.progress import progress
    from batchtune.exports.run_configs import render_sampler_yaml, sampler_config
    from batchtune.results import SAMPLER_FILE

    with progress("Sweeping", quiet=run.quiet) as bar:
        swept = run_sweep(
            lengths,
            settings,
            run.run,
            max_batch_length=max_batch_length,
            current=current,
            force=run.force,
            on_row=bar.row,
        )
    _write_config(
        swept,
        run.run / SAMPLER_FILE,
        lambda probe: render_sampler_yaml(sampler_config(swept, probe)),
    )
    return swept


def _write_config(
    swept: Sweep | StreamSweep, config: Path, render: Callable[[Probe | None], str]
) -> None:
    """Write the recommendation as a config, with what the folder's probe proves, or remove an earlier one."""
    from batchtune.files import write_whole
    from batchtune.results import PROBE_FILE, Probe, read_result

    if swept.recommended is not None:
        path = config.with_name(PROBE_FILE)
        probe = read_result(path, Probe) if path.exists() else None
        write_whole(config, render(probe), follow=False)
    elif config.exists():
        config.unlink()
        console.note(
            f"Removed {config}: it was written by an earlier sweep, and this one recommends nothing."
        )


def _show(swept: Sweep | StreamSweep, run: RunOptions) -> None:
    from batchtune.reports import load_run

    if run.json:
        console.write_json(swept)
    else:
        console.show(load_run(run.run), full=run.full)


def _check_limit(
    max_batch_length: float | None, lengths: Lengths, *, quiet: bool
) -> None:
    """Warn if --max-batch-length seems to be in another unit; raise UsageError if batches would hold one example."""
    from batchtune.buckets.advice import limit_unit_hint

    if max_batch_length is None:
        return
    if max_batch_length < lengths.shortest:
        raise UsageError(
            f"--max-batch-length {format_length(max_batch_length, lengths.unit)} is shorter than the shortest example "
            f"({format_length(lengths.shortest, lengths.unit)}): every batch would hold one example",
            "Give it in the unit of the lengths.",
        )
    hint = limit_unit_hint(lengths, max_batch_length)
    if hint is not None:
        console.note(f"Warning: {hint}.", quiet=quiet)
