"""`batchtune tune-loader`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    FULL,
    JSON,
    QUIET,
    LoaderOptions,
    expand,
    option,
)

EXAMPLES = {
    "tune-loader": """
batchtune tune-loader train.py:make_dataset
batchtune tune-loader train.py:make_loader_arguments --sweep num_workers=0:8 --ranks-per-node 4
batchtune tune-loader shards.py:make_batches --step-ms 45
batchtune tune-loader augment.py:mel_batches --kind dali --sweep eval_mode=eager,sync_cpu
"""
}


@expand
def tune_loader(
    loader: LoaderOptions,
    run: Path = option(
        "Run folder: its probe says how long steps take; loader.json and loader.yaml go there.",
        "DIR",
        default=DEFAULT_RUN_FOLDER,
    ),
    force: bool = option(
        "If the folder holds the tuning of another loader, replace it.",
        variable=None,
        default=False,
    ),
    quiet: bool = QUIET,
    json: bool = JSON,
    full: bool = FULL,
) -> None:
    """Measure a data loader, and recommend its arguments.

    Each setting runs in fresh processes: num_workers, prefetch_factor, ... of a DataLoader; threads and evaluation
    modes of DALI. Interleaved runs compare the best ones. With the run folder's step times, or --step-ms, it says what
    share of the time the training step waits for batches. It recommends the fewest workers that keep the step busy, or
    the fastest setting. Writes loader.json and loader.yaml.
    """
    from batchtune.errors import LoaderError
    from batchtune.exports.run_configs import render_loader_yaml
    from batchtune.files import check_writable, write_whole
    from batchtune.loaders.tuner import run_loader_tuning
    from batchtune.reports import load_run
    from batchtune.results import LOADER_CONFIG_FILE

    check_writable(run)
    settings = loader.settings(run)
    with console.progress("Building the loader", quiet=quiet) as bar:
        tuning = run_loader_tuning(settings, run, force=force, on_progress=bar.loader)
    config = run / LOADER_CONFIG_FILE
    if tuning.recommended_row is None:
        config.unlink(missing_ok=True)
    else:
        write_whole(config, render_loader_yaml(tuning), follow=False)
    if json:
        console.write_json(tuning)
    else:
        # `report` shows the rest of the run.
        console.show(
            replace(
                load_run(run), probe=None, sweep=None, stream=None, verification=None
            ),
            full=full,
        )
    if tuning.recommended_row is None:
        raise LoaderError(
            f"{loader.target}: no setting of the loader works",
            "The report shows why; fix that, and run it again.",
        )
