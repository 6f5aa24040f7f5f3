"""`batchtune probe-oom`."""

from __future__ import annotations

from batchtune.cli.options import ManifestOptions, MaxBatchSize, ProbeOptions, RunOptions, expand

EXAMPLE = """Examples:
batchtune probe-oom train.csv --workload train.py:MyStep --set layers=12
batchtune probe-oom train.csv --workload builtin:conformer-ctc --set size=base --set dtype=bf16
batchtune probe-oom train.csv --workload train.py:MyStep --device cuda:1 --memory 20GiB --reserve 1GiB
"""


@expand
def probe_oom(
    source: ManifestOptions, probe: ProbeOptions, run: RunOptions, max_batch_size: MaxBatchSize = None
) -> None:
    """Find the largest batches that fit.

    Sorts the lengths in descending order, runs real training steps in a process of their own, and bisects, guided by
    a model of the memory, between what fits and what runs out of memory.

    Reads the manifest. Writes run.json, trials.jsonl and probe.json into the run folder. Interrupted, the same command
    goes on from where it was.
    """
    from batchtune.cli import console
    from batchtune.cli.progress import probe_with_progress
    from batchtune.reports import RunResults
    from batchtune.reports.terminal import render_terminal
    from batchtune.results import encode

    lengths = source.load(quiet=run.quiet)
    console.notes(console.describe(lengths), quiet=run.quiet)
    settings = probe.settings(lengths, max_batch_size=max_batch_size, seed=run.seed)
    found = probe_with_progress(lengths, settings, run, default_workload=probe.workload is None)
    if run.json:
        console.write_result(encode(found).decode(), None)
    else:
        results = RunResults(name=run.run.name, probe=found, sweep=None, folder=run.run)
        render_terminal(results, console.result_console(), full=run.full)
