"""`batchtune sweep-stream`."""

from __future__ import annotations

from dataclasses import replace

from batchtune.cli import console
from batchtune.cli.options import ManifestOptions, MaxBatchLength, RunOptions, StreamOptions, expand
from batchtune.cli.sweep_buckets import check_limit, write_config

EXAMPLES = """
batchtune sweep-stream 'shards/train-{000..127}.tar' --workers 4 --max-batch-length 600
batchtune sweep-stream 'shards/train-{000..127}.tar' --workers 4 --world-size 8 --shuffle-buffer 5000
batchtune sweep-stream train.csv --shard-size 1000 --buffer-size 1024,4096
batchtune sweep-stream shards/ --current target_batch_numel=450,max_batch_numel=600,buffersize=1024
"""


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
    from batchtune.cli.progress import stream_bar
    from batchtune.exports.run_configs import render_stream_yaml, stream_config
    from batchtune.reports import load_run
    from batchtune.results import STREAM_CONFIG_FILE
    from batchtune.streams.current import stream_current
    from batchtune.streams.stream_sweep import run_stream_sweep

    settings = stream.settings(run)
    check_limit(max_batch_length)
    found = source.load_stream(quiet=run.quiet, as_in=None if run.force else run.run)
    console.describe(found.lengths, quiet=run.quiet)
    check_limit(max_batch_length, found.lengths, quiet=run.quiet)
    if stream.current is not None:
        settings = replace(settings, current=stream_current(stream.current, found.lengths))
    with stream_bar(quiet=run.quiet) as on_row:
        limit = max_batch_length
        force = run.force
        swept = run_stream_sweep(found, settings, run.run, max_batch_length=limit, force=force, on_row=on_row)
    config = run.run / STREAM_CONFIG_FILE
    write_config(swept, config, lambda probe: render_stream_yaml(stream_config(swept, probe)))
    if run.json:
        console.write_json(swept)
    else:
        console.show(load_run(run.run), full=run.full)
