"""What to do with a run: the commands that come next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from batchtune.reports.run import DEFAULT_FOLDER, RunResults
from batchtune.results import SAMPLER_FILE


def next_steps(results: RunResults) -> Iterator[tuple[str, str]]:
    """Pair each command, or file, with what it is for, in the order to take them."""
    sweep, verification = results.sweep, results.verification
    config = str(results.folder / SAMPLER_FILE)
    if sweep is None:
        yield _command(results, "sweep-buckets MANIFEST", flag="--run "), "find the buckets that waste least"
    elif sweep.recommended is None:
        yield _command(results, "sweep-buckets MANIFEST --num-buckets 20:60", flag="--run "), "compare more buckets"
    elif verification is not None and not verification.holds:
        # Without a proposal memory was not what failed: the reasons say what to do.
        if verification.proposal is not None and verification.proposal.verified:
            yield config, "set the safe sizes there"
        elif verification.proposal is not None:
            yield _command(results, "tune MANIFEST --workload W --force", flag="--run "), "probe anew"
        yield _command(results, "verify", f" MANIFEST{_own_workload(results)}"), "run these batches again"
    else:
        yield config, "the config, for BucketBatchSampler"
        if results.probe is None:
            yield _command(results, "probe-oom MANIFEST --workload W", flag="--run "), "measure what fits"
        elif verification is None:
            yield _command(results, "verify", f" MANIFEST{_own_workload(results)}"), "run these batches for real"
        yield _command(results, "export", " --to FRAMEWORK"), "the same for SpeechBrain, NeMo, ..."
    yield _command(results, "report", " --full"), "all tables (-o report.html: charts)"


def _command(results: RunResults, command: str, rest: str = "", *, flag: str = "") -> str:
    """The command for this run; its folder is named where it is not the usual one."""
    named = "" if results.folder == DEFAULT_FOLDER else f" {flag}{shlex.quote(str(results.folder))}"
    return f"batchtune {command}{named}{rest}"


def _own_workload(results: RunResults) -> str:
    """The flags that name the user's own training step: `verify` runs none that only a file names."""
    workload = results.probe.workload if results.probe else None
    if workload is None or workload.spec.startswith("builtin:"):
        return ""
    return f" --workload {shlex.quote(workload.spec)}{' --set ...' if workload.options else ''}"
