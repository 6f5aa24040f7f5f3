"""Results → terminal, Markdown, HTML, JSON: a run folder, read and checked here, and one module per format.

A module for each kind of result makes its `Section`, and `page` puts the sections together. A format knows nothing
else.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from batchtune.configs import read_sampler_yaml
from batchtune.errors import ResultError
from batchtune.files import read_regular
from batchtune.loaders import read_tuning
from batchtune.results import (
    LARGEST_BYTES,
    LOADER_FILE,
    OWN_LENGTHS_FILE,
    PROBE_FILE,
    SAMPLER_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    TRAINING_FILE,
    TRIALS_FILE,
    VERIFY_FILE,
    AnySweep,
    Drift,
    LengthsSummary,
    LoaderTuning,
    Probe,
    ProbedWith,
    SamplerConfig,
    StreamSweep,
    Sweep,
    Training,
    Verdict,
    Verification,
    read_if_written,
    read_result,
)
from batchtune.run_folder import check_is_folder

if TYPE_CHECKING:
    import pandas as pd

# Format → the module that renders it, imported on first use: jinja2 and rich are slow to start.
FORMATS = {
    "terminal": "batchtune.reports.terminal",
    "markdown": "batchtune.reports.markdown",
    "html": "batchtune.reports.html",
    "json": "batchtune.reports.page",
}
NextStep: TypeAlias = tuple[str, str]
"""A command, or a file, and its purpose."""
# Where the command line puts files unless the user names another folder; commands that are proposed need not name it.
DEFAULT_FOLDER = Path("batchtune-run")


class Kind(NamedTuple):
    """A kind of result: its record, file, command and what sentences call it."""

    record: type[Probe | Sweep | StreamSweep | LoaderTuning]
    file: str
    command: str
    words: str


# Field of `RunResults` → the kind of result that it holds.
KINDS = {
    "probe": Kind(Probe, PROBE_FILE, "probe-oom", "the probe"),
    "sweep": Kind(Sweep, SWEEP_FILE, "sweep-buckets", "the sweep"),
    "stream": Kind(
        StreamSweep,
        STREAM_FILE,
        "sweep-stream",
        "the sweep of the stream",
    ),
    "loader": Kind(
        LoaderTuning,
        LOADER_FILE,
        "tune-loader",
        "the tuning of the loader",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """The results of one run: a probe, a sweep, a stream's sweep, a loader's tuning, or several of them.

    None: the file does not exist. A notebook shows the report.

    Attributes:
        name: Name of the run folder, without the path to it.
        verdicts: One for each rule that the run was held to.
        drift: How far other lengths are from the run's.
        folder: The folder as the user named it; only commands that are proposed name it.
        manifest: The lengths in proposed commands: as the user named them, the file that holds a script's own, or else
            a word that stands for them.
        step: The training step in proposed commands, as the user named it (` -- python train.py`, ` --workload W`);
            None: the user named none here.
        config: sampler.yaml of padded batches as it is now, perhaps edited; None: unknown.
        left_out: How many lines of trials.jsonl came after the trials of probe.json, or were cut short.
    """

    name: str
    probe: Probe | None = None
    sweep: Sweep | None = None
    verification: Verification | None = None
    verdicts: tuple[Verdict, ...] = ()
    drift: Drift | None = None
    folder: Path = DEFAULT_FOLDER
    manifest: str = "MANIFEST"
    step: str | None = None
    left_out: int = 0
    stream: StreamSweep | None = None
    loader: LoaderTuning | None = None
    training: Training | None = None
    config: SamplerConfig | None = None

    @property
    def main(self) -> Sweep | StreamSweep | Probe | LoaderTuning | None:
        """The sweep, or that of a stream, or the probe, or a loader's tuning, if any: they agree on the lengths."""
        return self.sweep or self.stream or self.probe or self.loader

    @property
    def is_of_script(self) -> bool:
        """Whether an unchanged training script was probed."""
        return self.probe is not None and self.probe.workload.command is not None

    @property
    def as_argument(self) -> str:
        """The folder as the argument of a proposed command, with a space before it; empty for the default one."""
        if self.folder == DEFAULT_FOLDER:
            return ""
        return f" {shlex.quote(str(self.folder))}"

    @property
    def as_option(self) -> str:
        """The same as an option: ` --run FOLDER`."""
        return f" --run{self.as_argument}" if self.as_argument else ""

    @property
    def workload_flags(self) -> str:
        """The flags that name the user's own training step, which `verify` runs only if the user names it.

        A result file from a stranger may name any function: only a Python file's name is repeated.
        """
        if self.step is not None:
            return self.step
        if self.probe is None or self.probe.workload.spec.startswith("builtin:"):
            return ""
        if self.is_of_script:
            return " -- COMMAND"
        spec = "W"
        if ".py:" in self.probe.workload.spec:
            spec = shlex.quote(self.probe.workload.spec)
        options = " --set ..." if self.probe.workload.options else ""
        return f" --workload {spec}{options}"

    def steps_after_sweep(
        self, verify: str, config: NextStep, *, of_stream: bool
    ) -> Iterator[NextStep]:
        """Yield what to do with recommended batches, by command: verify them, use their config, export it."""
        from batchtune.reports.measured import is_current

        verified = self.verification
        if verified is not None and (
            verified.of_stream != of_stream or not is_current(self, verified)
        ):
            verified = None
        if verified is not None and not verified.holds:
            if verified.failures and not of_stream:  # otherwise the reasons say it
                tune = [f"batchtune tune {self.manifest}{self.as_option}"]
                step = self.workload_flags
                if self.probe is not None:
                    settings = msgspec.convert(self.probe.settings, ProbedWith)
                    # A step's examples may have bounded it.
                    tune += structs.replace(settings, max_batch_size=None).flags
                    if not step:  # a built-in, which `verify` knows from the run
                        workload = self.probe.workload
                        step = f" --workload {shlex.quote(workload.spec)}"
                        step += " --set ..." if workload.options else ""
                yield f"{' '.join(tune)}{step}", "rule out what failed, and go on"
            yield verify, "run these batches again"
            return
        yield config
        if self.probe is not None and verified is None:
            yield verify, "run these batches for real"
        if of_stream and self.sweep is not None:  # the sweep's own steps say the rest
            return
        script = self.probe and self.probe.device.script
        if script and script.streams:
            yield (
                f"batchtune sweep-stream {self.manifest}{self.as_option}",
                "batches for the script's stream",
            )
        elif self.is_of_script:
            yield (
                f"batchtune run {self.manifest}{self.as_option}{self.workload_flags}",
                "train the script with these batches",
            )
        if self.probe is None:
            yield (
                f"batchtune probe-oom {self.manifest}{self.as_option} --workload W",
                "measure what fits",
            )
        yield (
            f"batchtune export{self.as_argument} --to FRAMEWORK",
            "what SpeechBrain, NeMo, ... can take",
        )

    @property
    def lengths(self) -> LengthsSummary | None:
        """The data set that the results are about; None for a loader's tuning, or training of unknown lengths."""
        if self.main is None:
            return None
        return self.main.lengths

    @property
    def trials(self) -> pd.DataFrame:
        """The probe's trials as they ran: a row for each, a column for each field of `results.Trial`."""
        return _frame(self.probe, "trials")

    @property
    def frontier(self) -> pd.DataFrame:
        """The largest batch that fits at each length: a column for each field of `results.FrontierPoint`."""
        return _frame(self.probe, "frontier")

    @property
    def rows(self) -> pd.DataFrame:
        """The bucket tables compared: a column for each field of `results.Row`, or of a stream's `StreamRow`."""
        return _frame(self.sweep or self.stream, "rows")

    def __repr__(self) -> str:
        from batchtune.reports.page import build_page

        return build_page(self).lead[0]

    def _repr_html_(self) -> str:
        from batchtune.reports.html import render_for_notebook

        return render_for_notebook(self)


def _frame(result: Probe | AnySweep | None, table: str) -> pd.DataFrame:
    import pandas as pd

    if result is None:
        raise ResultError(
            f"this run has no {table}",
            "A probe makes trials and the frontier, a sweep the rows.",
        )
    frame: pd.DataFrame = pd.DataFrame(msgspec.to_builtins(getattr(result, table)))
    return frame


def load_run(folder: Path) -> RunResults:
    """Read the results in a run folder.

    Raises:
        ResultError: The folder is missing or holds none of `probe.json`, `sweep.json`, `stream.json`, `loader.json`
            and `training.jsonl`; one of them can't be read, or is edited or damaged; or they are of different data.
    """
    commands = ", ".join(
        f"`batchtune {kind.command}` writes {kind.file}" for kind in KINDS.values()
    )
    hint = (
        f"With --run {folder}, {commands}, `batchtune record` writes {TRAINING_FILE}, and `batchtune tune` the first "
        "two."
    )
    check_is_folder(folder)
    if not folder.is_dir():
        raise ResultError(f"Run folder {folder} does not exist", hint)
    results: dict[str, Any] = {}
    for name, kind in KINDS.items():
        path = folder / kind.file
        if path.exists():
            results[name] = (
                read_tuning(path)
                if name == "loader"
                else read_result(path, kind.record)
            )
    training = folder / TRAINING_FILE
    if not results and not training.exists():
        raise ResultError(f"{folder} holds no results", hint)
    lengths_by_file = {
        KINDS[name].file: result.lengths
        for name, result in results.items()
        if result.lengths is not None
    }
    for (file, lengths), (other_file, other) in itertools.pairwise(
        lengths_by_file.items()
    ):
        if lengths.fingerprint != other.fingerprint:
            raise ResultError(
                f"{folder / file} and {folder / other_file} are of different data: "
                f"{_described(lengths)} and {_described(other)}",
                "Create the older one again, from the same manifest and with the same filters.",
            )
    journal = folder / TRIALS_FILE
    if "probe" in results and journal.is_file():
        lines = len(read_regular(journal, LARGEST_BYTES, None).splitlines())
        results["left_out"] = lines - len(results["probe"].trials)
    own_lengths = folder / OWN_LENGTHS_FILE
    manifest = "MANIFEST"
    if own_lengths.exists():
        manifest = shlex.quote(str(own_lengths))
    config = None
    with contextlib.suppress(ResultError):  # the command warns of a damaged one
        config = read_sampler_yaml(folder / SAMPLER_FILE)
    run = RunResults(
        name=folder.resolve().name or "run",
        config=config,
        folder=folder,
        manifest=manifest,
        verification=read_if_written(folder / VERIFY_FILE, Verification),
        **results,
    )
    if not training.exists():
        return run
    recording = import_module("batchtune.reports.measured").read_recording
    return replace(run, training=recording(training, run.probe, run.lengths))


def _described(lengths: LengthsSummary) -> str:
    return f"{lengths.count:,} examples (fingerprint {lengths.fingerprint[:12]})"


def render(report_format: str, results: RunResults) -> str:
    """Return a run's report in one of the `FORMATS`; `terminal` gives plain text, 80 columns wide."""
    return str(import_module(FORMATS[report_format]).render(results))
