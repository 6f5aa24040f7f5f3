"""`batchtune sweep-buckets`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli.options import ManifestOptions, MaxBatchSize, RunOptions, SweepOptions, expand

EXAMPLE = "Example:  batchtune sweep-buckets train.csv --max-batch-length 600 --num-buckets 10:20"


@expand
def sweep_buckets(
    source: ManifestOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_length: Annotated[
        float | None,
        typer.Option(
            envvar="BATCHTUNE_MAX_BATCH_LENGTH",
            metavar="X",
            help="Largest padded length of a batch, in the unit of the lengths; what the probe found unless given.",
        ),
    ] = None,
    max_batch_size: MaxBatchSize = None,
) -> None:
    """Compare bucket tables, recommend one.

    Takes max_batch_length and costs from the run folder's probe.json where there is one; with --max-batch-length it
    needs none. Writes sweep.json and sampler.yaml. Needs no GPU.
    """
    from batchtune.cli import console
    from batchtune.cli.sweeping import sweep_and_write
    from batchtune.errors import UsageError
    from batchtune.reports import load_run
    from batchtune.reports.terminal import render_terminal
    from batchtune.results import encode

    settings = sweep.settings(max_batch_size=max_batch_size, seed=run.seed)
    if max_batch_length is not None and not 0 < max_batch_length <= 1e15:
        raise UsageError(f"--max-batch-length must be a number above 0 and at most 1e15, got {max_batch_length}")
    current = sweep.read_current()
    lengths = source.load(quiet=run.quiet)
    console.notes(console.describe(lengths), quiet=run.quiet)
    found = sweep_and_write(lengths, settings, run, max_batch_length=max_batch_length, current=current)
    if run.json:
        console.write_result(encode(found).decode(), None)
    else:
        render_terminal(load_run(run.run), console.result_console())
