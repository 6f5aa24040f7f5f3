"""The sweep as commands run it: with a progress bar, and its config written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.cli.options import RunOptions

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.results import Sweep
    from batchtune.tuning.current import Current
    from batchtune.tuning.sweep_settings import SweepSettings


def sweep_and_write(
    lengths: Lengths,
    settings: SweepSettings,
    run: RunOptions,
    *,
    max_batch_length: float | None = None,
    current: Current | None = None,
) -> Sweep:
    """Sweeps and writes `sweep.json` and `sampler.yaml`.

    Where no row is recommended there is no config: one of an earlier sweep is removed, and that is said.
    """
    from batchtune.cli.progress import row_counter
    from batchtune.exports.sampler import render_sampler_yaml, sampler_config
    from batchtune.files import write_whole
    from batchtune.results import PROBE_FILE, SAMPLER_FILE, Probe, read_result
    from batchtune.tuning.sweep import run_sweep

    with row_counter(settings, quiet=run.quiet) as on_row:
        found = run_sweep(
            lengths,
            settings,
            run.run,
            max_batch_length=max_batch_length,
            force=run.force,
            on_row=on_row,
            current=current,
        )
    config = run.run / SAMPLER_FILE
    if found.recommended is not None:
        probe = read_result(run.run / PROBE_FILE, Probe) if (run.run / PROBE_FILE).exists() else None
        write_whole(config, render_sampler_yaml(sampler_config(found, probe)), follow=False)
    elif config.exists():
        config.unlink()
        console.note(f"{config} was removed: it was of an earlier sweep, and this one recommends nothing.")
    return found
