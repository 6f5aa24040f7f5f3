"""The verification as commands run it: the run folder read, a progress bar, a clean end when interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli import console

if TYPE_CHECKING:
    from batchtune.exports.sampler import SamplerConfig
    from batchtune.lengths import Lengths
    from batchtune.results import Verification
    from batchtune.tuning.verify_plan import Candidate
    from batchtune.tuning.verify_setup import Wanted
    from batchtune.tuning.verify_steps import VerifyProgress, VerifySettings

EXIT_DOES_NOT_HOLD = 3


def verify_with_progress(
    lengths: Lengths,
    folder: Path,
    settings: VerifySettings,
    wanted: Wanted,
    *,
    seed: int | None = None,
    quiet: bool,
) -> Verification:
    """Runs what the folder's `sampler.yaml` says, and writes `verify.json`.

    Args:
        lengths: The data set.
        folder: The run folder.
        settings: How much to run; its seed counts only where `seed` is given.
        wanted: What the user says of the workload.
        seed: Of the shuffles; None: that of `sampler.yaml`.
        quiet: Say nothing.

    Raises:
        ResultError: The folder holds no sampler, or of other lengths; and what `run_verify` raises.
    """
    from dataclasses import replace

    from batchtune.cli.progress import verify_bar
    from batchtune.exports.sampler import read_sampler_yaml
    from batchtune.results import PROBE_FILE, SAMPLER_FILE, Probe, read_result
    from batchtune.tuning.run_folder import lengths_of
    from batchtune.tuning.verify_setup import check_lengths, subject_of
    from batchtune.tuning.verifying import run_verify

    _check_there(folder)
    config = read_sampler_yaml(folder / SAMPLER_FILE)
    check_lengths(lengths, config.evidence.fingerprint, folder / SAMPLER_FILE, lengths_of(folder))
    probe = read_result(folder / PROBE_FILE, Probe) if (folder / PROBE_FILE).exists() else None
    if probe is not None:
        check_lengths(lengths, probe.lengths.fingerprint, folder / PROBE_FILE, probe.lengths)
    subject = subject_of(lengths, probe, wanted, folder)
    console.notes([*subject.notes, *_unlike_sampler(config)], quiet=quiet)
    last: list[VerifyProgress] = []
    try:
        with verify_bar(lengths.unit, ddp=subject.settings.ddp, quiet=quiet) as watch:

            def on_progress(progress: VerifyProgress) -> None:
                last[:] = [progress]
                watch(progress)

            return run_verify(
                lengths,
                candidate_of(config, _multiple_of(folder)),
                replace(settings, seed=config.seed if seed is None else seed),
                subject.settings,
                folder,
                probe=probe,
                limit_bytes=subject.limit_bytes,
                on_note=lambda text: console.notes([text], quiet=quiet),
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        console.note(_how_far(last))
        raise


def candidate_of(config: SamplerConfig, multiple_of: float | None = None) -> Candidate:
    """What `sampler.yaml` describes, for the verification; padded to multiples where the sweep was asked to."""
    import numpy as np

    from batchtune.batching.table import BucketTable
    from batchtune.tuning.verify_plan import Candidate

    boundaries = np.array(config.bucket_boundaries, dtype=np.float64)
    sizes = np.array(config.bucket_batch_sizes, dtype=np.int64)
    return Candidate(
        table=BucketTable(boundaries, sizes),
        max_batch_length=config.max_batch_length,
        ordering=config.batch_ordering,
        drop_last=config.drop_last,
        multiple_of=multiple_of,
    )


def _multiple_of(folder: Path) -> float | None:
    """What the sweep was told that batches are padded to a multiple of."""
    import msgspec

    from batchtune.results import SWEEP_FILE, Sweep, SweptWith, read_result

    if not (folder / SWEEP_FILE).exists():
        return None
    return msgspec.convert(read_result(folder / SWEEP_FILE, Sweep).settings, SweptWith).multiple_of


def _unlike_sampler(config: SamplerConfig) -> list[str]:
    if config.shuffle:
        return []
    return [
        "sampler.yaml says shuffle: false, but the manifest's order is not known here: batches are formed of shuffled "
        "examples, as with shuffle: true."
    ]


def _how_far(last: list[VerifyProgress]) -> str:
    """What had passed when it was interrupted."""
    from batchtune.results import VERIFY_FILE
    from batchtune.units import counted

    nothing = f"No {VERIFY_FILE} is written: that takes a whole verification."
    if not last or last[0].doing == "proposal":
        return nothing
    progress = last[0]
    what = "of the worst batches" if progress.doing == "worst" else "with shuffled batches"
    return f"{counted(progress.done, 'step')} {what} had passed. {nothing}"


def _check_there(folder: Path) -> None:
    """Raises ResultError where the run folder holds no sampler config, with what there is instead."""
    from batchtune.errors import ResultError
    from batchtune.results import SAMPLER_FILE, SWEEP_FILE, Sweep, read_result

    if (folder / SAMPLER_FILE).exists():
        return
    if (folder / SWEEP_FILE).exists() and (sweep := read_result(folder / SWEEP_FILE, Sweep)).recommended is None:
        raise ResultError(
            f"there is nothing to verify in {folder}: its sweep recommends no bucket table ({sweep.reason})",
            "Sweep more bucket counts with --num-buckets, or keep the fixed batch size.",
        )
    raise ResultError(
        f"{folder / SAMPLER_FILE} does not exist",
        "`batchtune sweep-buckets` writes it. Another run folder is named with --run, or before the manifest.",
    )
