"""Tunes a data loader: measures its settings, holds them against the step, recommends one, and writes `loader.json`."""

from __future__ import annotations

import time
from pathlib import Path

from batchtune.errors import ResultError
from batchtune.loaders import read_tuning
from batchtune.loaders.demand import StepModel, steps_of_run
from batchtune.loaders.runner import LoaderRunner
from batchtune.loaders.settings import LoaderSettings
from batchtune.loaders.tuner import LoaderProgress, OnProgress, Tuner
from batchtune.results import LOADER_FILE, LoaderTuning, write_result
from batchtune.run_folder import alone_in


def run_loader_tuning(
    settings: LoaderSettings, folder: Path, *, force: bool = False, on_progress: OnProgress = lambda progress: None
) -> LoaderTuning:
    """Tune the loader against the step of a run folder, and write `loader.json` there.

    Interrupted, it writes what it has measured so far.

    Raises:
        LoaderError: The target can't be imported, is no loader, or every setting fails alike.
        OptionError: The target has no such option as one of `settings.options`, or needs another.
        ResultError: The folder holds the tuning of another loader, and `force` is not set; or can't be read or written.
        UsageError: `settings.sweep` names an unknown argument.
    """
    _check_folder(folder, settings, force=force)
    began = time.monotonic()
    steps, missing = steps_of_run(folder, settings.step_seconds)
    with alone_in(folder), LoaderRunner(settings) as runner:
        on_progress(LoaderProgress(doing="opening"))
        opened = runner.inspect()
        tuner = Tuner(settings, runner, StepModel(steps, opened), on_progress, began)
        try:
            tuner.tune()
        except KeyboardInterrupt:
            if tuner.rows:
                write_result(folder / LOADER_FILE, tuner.result([], interrupted=True))
            raise
        tuning = tuner.result([missing] if missing else [])
        write_result(folder / LOADER_FILE, tuning)
    return tuning


def _check_folder(folder: Path, settings: LoaderSettings, *, force: bool) -> None:
    """Raise ResultError if the folder can't hold the tuning, or holds that of another loader, unless `force` is set."""
    if folder.exists() and not folder.is_dir():
        raise ResultError(f"{folder} is not a folder, and a run needs one", "Give another with --run.")
    path = folder / LOADER_FILE
    if path.exists() and not force:
        tuned = read_tuning(path).target
        if tuned != settings.target_record:
            raise ResultError(
                f"{path} is of another loader: {tuned.words}",
                "Give another folder with --run, or --force to replace it.",
            )
