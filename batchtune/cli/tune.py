"""`batchtune tune`, and its parts: `probe-oom` and `sweep-buckets`; `sweep-stream` for streams, `tune-loader`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    BUCKETS,
    DEFAULT_RUN_FOLDER,
    FULL,
    JSON,
    MAX_BATCH_LENGTH,
    QUIET,
    TIME_TOLERANCE,
    LoaderOptions,
    ManifestOptions,
    ProbeOptions,
    RunOptions,
    StreamOptions,
    SweepOptions,
    expand,
    option,
)
from batchtune.cli.ranks import other_nodes, refuse_to_be_a_rank
from batchtune.cli.verify import EXIT_DOES_NOT_HOLD, run_with_progress
from batchtune.errors import UsageError
from batchtune.units import format_length

if TYPE_CHECKING:
    from batchtune.buckets.current import Current
    from batchtune.lengths import Lengths
    from batchtune.probe.flow import SizesOf
    from batchtune.probe.nodes import Nodes
    from batchtune.results import AnySweep, Probe, Sweep, SweepSettings

EXAMPLES = {
    "tune": """
batchtune tune train.csv -- python train.py --config base.yaml
batchtune tune --memory 20GiB --verify -- torchrun --nproc-per-node 8 train.py
batchtune tune train.csv --workload train.py:MyStep
batchtune tune train.csv --workload train.py:MyStep --set layers=12 --memory-fraction 0.95 --verify
batchtune tune train.tsv --length-scale 1/16000 --workload builtin:conformer-ctc --current train.yaml
batchtune tune examples/stdlib_lengths.csv --workload examples/custom_workload.py:TinyTagger --memory 1GiB
""",
    "probe-oom": """
batchtune probe-oom train.csv --length-key duration --per-unit 16000 -- python train.py
batchtune probe-oom train.csv --workload train.py:MyStep --set layers=12
batchtune probe-oom train.csv --workload builtin:conformer-ctc --set size=base --set dtype=bf16
batchtune probe-oom train.csv --workload train.py:MyStep --device cuda:1 --memory 20GiB --reserve 1GiB
batchtune probe-oom train.csv --workload train.py:Step --nnodes 2 --nproc-per-node 8 --rdzv-endpoint a:29500
""",
    "sweep-buckets": """
batchtune sweep-buckets train.csv
batchtune sweep-buckets train.csv --max-batch-length 600 --num-buckets 10:20
batchtune sweep-buckets train.csv --current max_batch_length=600,num_buckets=200
batchtune sweep-buckets train.csv --from-training
batchtune sweep-buckets train.csv --max-tokens 8192
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
def tune(
    source: ManifestOptions,
    probe: ProbeOptions,
    sweep: SweepOptions,
    run: RunOptions,
    verify: bool = option(
        "Run the recommended batches at the end, like `batchtune verify`.",
        default=False,
    ),
    verify_steps: int | None = option(
        "With --verify: number of shuffled batches (default: an epoch, at most 200 or a minute).",
        "N",
        min=1,
    ),
    time_tolerance: float = TIME_TOLERANCE,
) -> None:
    """Probe, sweep, prove and report, all in one.

    Runs `batchtune probe-oom`, `batchtune sweep-buckets` and `batchtune report`: from a manifest to
    a recommended sampler config. Before the report, the recommended batches run as in training,
    shuffled and in fresh processes. On a GPU, their memory requests are replayed in other orders
    (thousands of steps that compute nothing), because one shape may not fit into the memory that
    another leaves behind; on CUDA's native allocator pairs of shapes run, too. A batch that fails
    is ruled out, and this proof starts again with smaller batches. It takes about a third of the
    probe's time. Batches that could not be proven in time are marked as unproven.

    After --, give the command of your training script, which runs unchanged: its loop gets the batches to measure from
    its own DataLoader. Trackers are turned off, and no epoch ends. The script can't overwrite or delete a file of
    yours: all that it writes, anywhere, lands in a scratch folder that is removed at the end. Where Linux allows only
    Landlock, as in most containers, it works in a copy of the working folder, and can't write to other folders. Where
    neither is possible, tune refuses; --scratch none lets the script run in the working folder itself.

    Without MANIFEST, the lengths are those of the script's data set.

    For a workload that packs, the probe finds the token budget, and the sweep compares packers. If your training cuts
    sequences, cut them here with --truncate, before the probe.

    Reads the manifest. Writes run.json, trials.jsonl, probe.json, sweep.json, sampler.yaml and, with --verify,
    verify.json into the run folder. If interrupted, the same command continues where it stopped.
    """
    started = time.monotonic()
    from batchtune.buckets.micro_batches import known_sizes
    from batchtune.epochs import RankSplit
    from batchtune.epochs.measured_costs import Costs
    from batchtune.epochs.pricing import check_min_steps
    from batchtune.reports import load_run, render
    from batchtune.results import checked
    from batchtune.verify import SHARE_OF_THE_PROBE, Prover
    from batchtune.verify.plan import VerifySettings

    refuse_to_be_a_rank()
    if verify_steps is not None and not verify:
        raise UsageError(
            "--verify-steps says how many steps --verify runs, which is not given",
            "Add --verify, or leave it out: the table is proven anyway.",
        )
    verify_settings = checked(
        VerifySettings,
        {
            "steps": verify_steps,
            "time_tolerance": time_tolerance,
            "step_timeout_seconds": probe.trial_timeout,
        },
    )
    sweep_settings = sweep.settings(run)
    current = sweep.current_settings()
    source = _with_own_lengths(source, probe, run)
    # The proof learns what the probe has learned of a script: it is said once.
    note = cache(partial(console.note, quiet=run.quiet))
    with other_nodes(probe, quiet=run.quiet) as nodes:
        lengths = source.load(quiet=run.quiet)
        if sweep_settings.min_steps is not None:
            # Before the probe, which takes minutes; its ranks may allow even fewer.
            check_min_steps(
                sweep_settings.min_steps,
                lengths,
                RankSplit.of(sweep_settings, Costs()),
            )
        prover = Prover(
            folder=run.run,
            lengths=lengths,
            asked=probe.asked(source, lengths),
            probe=partial(
                _probe,
                source,
                lengths,
                probe,
                run,
                sweep_settings,
                nodes,
                note,
                partial(known_sizes, lengths, sweep_settings, current, run.run),
                0.0 if verify else SHARE_OF_THE_PROBE,
            ),
            sweep=partial(
                sweep_and_write,
                lengths,
                sweep_settings,
                current,
                run,
            ),
            run=partial(
                run_with_progress,
                folder=run.run,
                nodes=nodes,
                quiet=run.quiet,
                on_note=note,
            ),
            on_note=note,
            verify=verify_settings if verify else None,
        )
        swept, verification = prover.tune(started, probe.minutes)
        if verify and verification is None:
            why = "nothing is recommended"
            if swept.packed is not None:
                why = "packed micro-batches are only proven"
            console.note(f"Warning: nothing to verify, because {why}.")
    results = replace(load_run(run.run), manifest=source.in_words, step=probe.in_words)
    if run.json:
        console.write_result(render("json", results), None)
    else:
        console.show(results, full=run.full)
    if verify and verification is not None and not verification.holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)


@expand
def probe_oom(source: ManifestOptions, probe: ProbeOptions, run: RunOptions) -> None:
    """Find the largest batches that fit.

    Sorts the lengths in descending order, runs real training steps in a separate process, and bisects between batches
    that fit and batches that run out of memory, guided by a memory model.

    After --, give the command of your training script, which runs unchanged, as `batchtune tune --help` describes.

    Reads the manifest. Writes run.json, trials.jsonl and probe.json into the run folder. If interrupted, the same
    command continues where it stopped.
    """
    from batchtune.reports import RunResults

    refuse_to_be_a_rank()
    source = _with_own_lengths(source, probe, run)
    with other_nodes(probe, quiet=run.quiet) as nodes:
        lengths = source.load(quiet=run.quiet)
        note = partial(console.note, quiet=run.quiet)
        probed = _probe(
            source, lengths, probe, run, None, nodes, note, None, 0.0, probe.minutes
        )
    if run.json:
        console.write_json(probed)
    else:
        console.show(
            RunResults(
                name=run.run.name,
                probe=probed,
                folder=run.run,
                manifest=source.in_words,
                step=probe.in_words,
            ),
            full=run.full,
        )


def _with_own_lengths(
    source: ManifestOptions, probe: ProbeOptions, run: RunOptions
) -> ManifestOptions:
    """Return the source of the lengths; without one, a file in the run folder with those of the script's data set."""
    if source.manifest or probe.command is None:
        return source
    from batchtune.scripts.own_lengths import keep_own_lengths

    asked = probe.asked(source)
    path, note = keep_own_lengths(
        run.run,
        asked["command"],
        asked["options"],
        probe.setup_timeout,
        asked.get("scratch"),
        force=run.force,
    )
    console.note(note, quiet=run.quiet)
    return replace(source, manifest=[str(path)])


def _probe(
    source: ManifestOptions,
    lengths: Lengths,
    probe: ProbeOptions,
    run: RunOptions,
    sweep_settings: SweepSettings | None,
    nodes: Nodes | None,
    note: Callable[[str], None],
    sizes_of: SizesOf | None,
    proof_share: float,
    minutes: float | None,
    goes_on: bool = False,
) -> Probe:
    """Run the probe with a line for each trial and a bar below, for at most that many minutes; or go on with it."""
    from batchtune.probe.devices import law
    from batchtune.probe.flow import run_probe
    from batchtune.probe.messages import ProbeHooks
    from batchtune.run_folder import holds_other_lengths

    settings = replace(probe, minutes=minutes).settings(lengths, run, source)
    force = run.force and not goes_on
    holds_other_lengths(lengths, run.run, force=force)
    if law.is_law(settings.device):
        note("Nothing is run: the device is made by a law.")
    elif probe.workload is None and settings.command is None:
        note(
            f"Workload: {settings.workload}, the built-in for lengths in {lengths.unit}; --workload names yours."
        )
    with console.worker_bar(lengths.unit, settings, quiet=run.quiet) as bar:
        return run_probe(
            lengths,
            settings,
            run.run,
            force=force,
            sweep_settings=sweep_settings,
            sizes_of=sizes_of,
            hooks=ProbeHooks(
                on_progress=bar.probing,
                on_note=note,
                nodes=nodes,
                goes_on=goes_on,
                proof_share=proof_share,
            ),
        )


@expand
def sweep_buckets(
    source: ManifestOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_length: float | None = MAX_BATCH_LENGTH,
    from_training: bool = option(
        "Take costs from the last recorded training in the run folder, instead of a probe: times, and the largest "
        "padded length of its batches.",
        default=False,
    ),
    max_tokens: int | None = option(
        "Your training packs: the most tokens of a packed batch (default: what a probe of packed batches proved). "
        "Packers are compared, too.",
        "N",
        rich_help_panel=BUCKETS,
    ),
    cut_at: int | None = option(
        "With a token budget: your training cuts longer sequences at this length. Cut tokens are counted; "
        "--truncate instead clips the lengths as they are read, also for the probe.",
        "N",
        rich_help_panel=BUCKETS,
    ),
) -> None:
    """Compare bucket tables and recommend one.

    If the training packs (its probe packed, or you give --max-tokens), compares packers with padded
    batches and recommends one.

    Computes exactly what one epoch costs with each strategy and number of buckets. Needs no GPU,
    and no torch.

    Reads the manifest, and max_batch_length and costs from the run folder's probe.json; with
    --max-batch-length or --from-training, no probe is needed. Takes the options for reading the
    manifest, such as --max-length, from the run and shows them, unless --force starts over. Writes
    sweep.json and sampler.yaml into the run folder.
    """
    from batchtune.buckets.micro_batches import Packing

    settings = sweep.settings(run)
    packing = Packing(max_tokens=max_tokens, cut_at=cut_at)
    current = sweep.current_settings()
    lengths = source.load(quiet=run.quiet, as_in=run.continued)
    _check_limit(max_batch_length, lengths, quiet=run.quiet)
    _show(
        sweep_and_write(
            lengths,
            settings,
            current,
            run,
            max_batch_length=max_batch_length,
            from_training=from_training,
            packing=packing,
        ),
        source,
        run,
    )


@expand
def sweep_stream(
    source: ManifestOptions,
    stream: StreamOptions,
    run: RunOptions,
    max_batch_length: float | None = MAX_BATCH_LENGTH,
) -> None:
    """Tune the batches of a stream of tar shards.

    Simulates what each worker of each rank reads, as WebDataset splits and shuffles shards, and compares SpeechBrain's
    dynamic_bucketed_batch with batchtune's own BucketedStream at the same buffer size. Needs no GPU.

    Reads tar shards (only their headers), or any manifest in the order of the stream.
    max_batch_length and costs come from the run folder's probe.json, or from --max-batch-length.
    Writes stream.json and stream.yaml into the run folder.
    """
    from batchtune.streams.simulated import stream_current
    from batchtune.streams.sweep import run_stream_sweep

    settings = stream.settings(run)
    stored = source.load_stream(quiet=run.quiet, as_in=run.continued)
    _check_limit(max_batch_length, stored.lengths, quiet=run.quiet)
    current = None
    if stream.current is not None:
        current = stream_current(stream.current, stored.lengths)
    with console.progress("Sweeping", quiet=run.quiet) as bar:
        swept = run_stream_sweep(
            stored,
            settings,
            run.run,
            max_batch_length=max_batch_length,
            current=current,
            force=run.force,
            on_row=bar.row,
        )
    _write_config(swept, run.run)
    _show(swept, source, run)


def sweep_and_write(
    lengths: Lengths,
    settings: SweepSettings,
    current: Current | None,
    run: RunOptions,
    refuted: Collection[str] = (),
    **arguments: Any,
) -> Sweep:
    """Sweep with a progress bar, and write `sweep.json` and `sampler.yaml`, or remove an earlier one.

    `refuted` and further arguments as for `run_sweep`.
    """
    from batchtune.buckets.sweep import run_sweep

    with console.progress("Sweeping", quiet=run.quiet) as bar:
        swept = run_sweep(
            lengths,
            settings,
            run.run,
            current=current,
            force=run.force,
            refuted=refuted,
            on_row=bar.row,
            **arguments,
        )
    _write_config(swept, run.run)
    return swept


def _write_config(swept: AnySweep, folder: Path) -> None:
    """Write the recommendation as a config, or remove an earlier one."""
    from batchtune.exports.run_configs import write_config

    removed = write_config(swept, folder)
    if removed is not None:
        console.note(
            f"Removed {removed}: it was written by an earlier sweep, and this one recommends nothing."
        )


def _show(swept: AnySweep, source: ManifestOptions, run: RunOptions) -> None:
    from batchtune.reports import load_run

    if run.json:
        console.write_json(swept)
    else:
        console.show(
            replace(load_run(run.run), manifest=source.in_words), full=run.full
        )


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


EXAMPLES |= {
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
