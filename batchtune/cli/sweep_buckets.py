"""`batchtune sweep-buckets`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from batchtune.cli.options import BUCKETS, ManifestOptions, MaxBatchSize, RunOptions, SweepOptions, expand, option

if TYPE_CHECKING:
    from batchtune.lengths import Lengths

EXAMPLE = """Examples:
batchtune sweep-buckets train.csv
batchtune sweep-buckets train.csv --max-batch-length 600 --num-buckets 10:20
batchtune sweep-buckets train.csv --current max_batch_length=600,num_buckets=200
batchtune sweep-buckets train.csv --strategy optimal --strategy speechbrain --json | jq .reason
"""


@expand
def sweep_buckets(
    source: ManifestOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_length: Annotated[
        float | None,
        option(
            "Largest padded length of a batch, in the unit of the lengths; what the probe found unless given.",
            name="MAX_BATCH_LENGTH",
            metavar="X",
            panel=BUCKETS,
        ),
    ] = None,
    max_batch_size: MaxBatchSize = None,
) -> None:
    """Compare bucket tables, recommend one.

    Works out, exactly, what one epoch costs with each strategy and number of buckets. Needs no GPU, and no torch.

    Reads the manifest, and max_batch_length and costs from the run folder's probe.json where there is one; with
    --max-batch-length it needs none. Options for reading the manifest that the run was made with, such as
    --max-length, are taken from there and told, unless --force starts over. Writes sweep.json and sampler.yaml there.
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
    lengths = source.load(quiet=run.quiet) if run.force else source.load_as_in(run.run, quiet=run.quiet)
    console.notes(console.describe(lengths), quiet=run.quiet)
    if max_batch_length is not None:
        _check_unit(lengths, max_batch_length, quiet=run.quiet)
    found = sweep_and_write(lengths, settings, run, max_batch_length=max_batch_length, current=current)
    if run.json:
        console.write_result(encode(found).decode(), None)
    else:
        render_terminal(load_run(run.run), console.result_console(), full=run.full)


def _check_unit(lengths: Lengths, max_batch_length: float, *, quiet: bool) -> None:
    """Warns where --max-batch-length looks like another unit's.

    Raises:
        UsageError: It is shorter than every example, so that nothing can come of it.
    """
    from batchtune.cli import console
    from batchtune.errors import UsageError
    from batchtune.tuning.unit_hints import limit_unit_hint
    from batchtune.units import format_length

    hint = limit_unit_hint(lengths, max_batch_length)
    if max_batch_length < lengths.shortest:
        raise UsageError(
            f"--max-batch-length {format_length(max_batch_length, lengths.unit)} is shorter than the shortest example "
            f"({format_length(lengths.shortest, lengths.unit)}): every batch would hold one example",
            f"{hint}." if hint else "Give it in the unit of the lengths.",
        )
    if hint:
        console.notes([f"Warning: {hint}."], quiet=quiet)
