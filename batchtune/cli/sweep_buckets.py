"""`batchtune sweep-buckets`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.cli.options import ManifestOptions, MaxBatchLength, RunOptions, SweepOptions, expand
from batchtune.errors import UsageError
from batchtune.units import format_length

if TYPE_CHECKING:
    from batchtune.buckets.current import Current
    from batchtune.buckets.sweep_settings import SweepSettings
    from batchtune.lengths import Lengths
    from batchtune.results import Probe, StreamSweep, Sweep

EXAMPLES = """
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
    max_batch_length: MaxBatchLength = None,
) -> None:
    """Compare bucket tables and recommend one.

    Computes exactly what one epoch costs with each strategy and number of buckets. Needs no GPU, and no torch.

    Reads the manifest, and max_batch_length and costs from the run folder's probe.json; with --max-batch-length, no
    probe is needed. Options with which the run read its manifest, such as --max-length, are taken from there and shown,
    unless --force starts over. Writes sweep.json and sampler.yaml there.
    """
    from batchtune.reports import load_run

    settings = sweep.settings(run)
    current = sweep.current_settings()
    check_limit(max_batch_length)
    lengths = source.load(quiet=run.quiet, as_in=None if run.force else run.run)
    console.describe(lengths, quiet=run.quiet)
    check_limit(max_batch_length, lengths, quiet=run.quiet)
    found = sweep_and_write(lengths, settings, current, run, max_batch_length=max_batch_length)
    if run.json:
        console.write_json(found)
    else:
        console.show(load_run(run.run), full=run.full)


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
    from batchtune.cli.progress import sweep_bar
    from batchtune.exports.run_configs import render_sampler_yaml, sampler_config
    from batchtune.results import SAMPLER_FILE

    with sweep_bar(settings, quiet=run.quiet) as on_row:
        found = run_sweep(
            lengths,
            settings,
            run.run,
            max_batch_length=max_batch_length,
            current=current,
            force=run.force,
            on_row=on_row,
        )
    write_config(found, run.run / SAMPLER_FILE, lambda probe: render_sampler_yaml(sampler_config(found, probe)))
    return found


def write_config(found: Sweep | StreamSweep, config: Path, render: Callable[[Probe | None], str]) -> None:
    """Write the recommendation as a config, with what the folder's probe proves, or remove an earlier one."""
    from batchtune.files import write_whole
    from batchtune.results import PROBE_FILE, Probe, read_result

    if found.recommended is not None:
        path = config.with_name(PROBE_FILE)
        write_whole(config, render(read_result(path, Probe) if path.exists() else None), follow=False)
    elif config.exists():
        config.unlink()
        console.note(f"Removed {config}: it was written by an earlier sweep, and this one recommends nothing.")


def check_limit(max_batch_length: float | None, lengths: Lengths | None = None, *, quiet: bool = False) -> None:
    """Warn if --max-batch-length seems to be in another unit than the lengths, once they are known.

    Raises UsageError if it is out of range, or every batch would hold one example.
    """
    if max_batch_length is None:
        return
    if not 0 < max_batch_length <= 1e15:
        raise UsageError(f"--max-batch-length must be above 0 and at most 1e15, got {max_batch_length}")
    if lengths is None:
        return
    from batchtune.buckets.cautions import limit_unit_hint

    hint = limit_unit_hint(lengths, max_batch_length)
    if max_batch_length < lengths.shortest:
        raise UsageError(
            f"--max-batch-length {format_length(max_batch_length, lengths.unit)} is shorter than the shortest example "
            f"({format_length(lengths.shortest, lengths.unit)}): every batch would hold one example",
            f"{hint}." if hint else "Give it in the unit of the lengths.",
        )
    if hint:
        console.note(f"Warning: {hint}.", quiet=quiet)
