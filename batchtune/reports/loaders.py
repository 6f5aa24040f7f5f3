"""The section on a data loader: what to set, whether the step waits for it, what is slow, what failed."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from batchtune.loaders import kind_of
from batchtune.reports.rows import batches_words, speed
from batchtune.reports.section import Section, settings_facts
from batchtune.reports.table import UNKNOWN, Fact, Table, clean, known, make_table, shown_of, spread
from batchtune.results import (
    BUSY_IDLE,
    LOADER_CONFIG_FILE,
    Arguments,
    LoaderRow,
    LoaderStage,
    LoaderTuning,
    argument_text,
)
from batchtune.units import counted, format_number, format_percent, format_seconds, format_size, with_full_stop

# A sentence quotes no more of an error, or of a name.
_QUOTED = 120
_EQUAL = "≈"
_MAX_ROWS = 500
_MAX_FAILED = 20
# Arguments whose own name is too wide for a column.
_TITLES = {"multiprocessing_context": "context"}
_OUTCOMES = {
    "error": "an error",
    "timeout": "no batch within the time limit",
    "crash": "a process died",
    "oom": "out of memory",
    "shared_memory": "/dev/shm is too small",
    "empty": "no batch",
    "repeats": "workers repeat each other",
}


class LoaderSection(Section[LoaderTuning]):
    """The section on `loader.json`."""

    title = "Loader"

    def _headline(self) -> str:
        """Say what to set, and whether it keeps the step busy, or that the loader is the bottleneck and why."""
        loader = self.result
        row = loader.recommended_row
        if row is None:
            return f"Loader: {with_full_stop(loader.reason) or 'no setting is recommended.'}"
        if row.gpu_idle is None:
            return self._rate_headline(row)
        name = setting_name(loader, row)
        waits = format_percent(row.gpu_idle)
        if row.gpu_idle <= BUSY_IDLE:
            busy = f"{_capitalized(name)} keeps the step busy: it waits for data {waits} of the time."
            return f"{busy} {self._rates('The loader', row)}"
        if loader.keeps_up:
            waiting = f"With {name}, the step still waits for data {waits} of the time."
            return f"{waiting} {self._rates('The loader', row)}"
        best = f"with {name}"
        if len(loader.rows) > 1:
            best = f"with the best setting, {name}"
        if not loader.is_bottleneck:
            fastest = max(loader.working_rows, key=lambda row: row.rate)
            waiting = f"{_capitalized(best)}, the step waits for data {waits} of the time."
            return f"{waiting} {self._rates(_capitalized(setting_name(loader, fastest)), fastest)}"
        slow = f"; {self._stage}" if self._stage else ""
        return f"The loader is the bottleneck: {best}, the step waits for data {waits} of the time{slow}."

    def _rates(self, subject: str, row: LoaderRow) -> str:
        """Say how much a row delivers, and how much the step takes."""
        rate = f"{subject} makes {row.rate_words}"
        if self.result.demanded is None:
            return f"{rate}."
        return f"{rate}; the step takes {format_number(self.result.demanded)}."

    def _rate_headline(self, row: LoaderRow) -> str:
        """Say what to set, and how fast that is."""
        loader = self.result
        rate = row.rate_words
        name = setting_name(loader, row)
        if not row.arguments or _is_alone(loader):
            headline = f"{_capitalized(name)} makes {rate}"
        else:
            headline = f"Set {name} for the loader: {rate}"
        alone = without_workers(loader)
        if alone is None or alone is row or not alone.examples_per_second or not row.examples_per_second:
            return f"{headline}."
        times = speed(1 / row.examples_per_second, 1 / alone.examples_per_second)
        return f"{headline}, {times} {setting_name(loader, alone)}."

    @property
    def _stage(self) -> str:
        """The stage that takes most of making a batch; empty if stages were not measured."""
        if not self.result.stages:
            return ""
        slowest = max(self.result.stages, key=lambda stage: stage.share)
        return f"{quoted(slowest.name)} takes {format_percent(slowest.share)} of the time to make a batch"

    def sentences(self) -> Iterator[str]:
        """Say what to set, and whether it keeps the step busy, then what it takes."""
        yield self._headline()
        loader = self.result
        row = loader.recommended_row
        if row is None:
            return
        if _is_alone(loader):
            yield "Only this setting was measured, so it is not known to be the best."
        if row.estimated_epoch_seconds is not None:
            what = "with the step" if loader.demand is not None else "of the loader alone"
            yield f"An epoch {what} is estimated at {format_seconds(row.estimated_epoch_seconds)}."
        if self._stage and not loader.is_bottleneck:  # else the headline says so
            yield f"The slowest stage: {self._stage}."
        if loader.reproducible and loader.reproduced is not None:
            same = batches_words(loader.reproduced.batches)
            yield f"Reproducible: two epochs from one seed gave the same {same}, bit for bit."
        if loader.reason and loader.demand is None:  # else the headline says so
            yield f"Why: {with_full_stop(loader.reason)}"
        if row.examples_per_second_spread is not None and row.trials > 1:
            differ = format_percent(row.examples_per_second_spread)
            yield f"Its rate is the median of {row.trials} trials, which differ by {differ}."

    def facts(self) -> Iterator[Fact]:
        """As for every section."""
        loader = self.result
        yield "Loader", f"{loader.target.words} ({loader.kind})"
        batch = "" if loader.batch is None else f"{loader.batch}; "
        yield "Batches", f"{batch}delivered to {loader.device_name}"
        if loader.epoch_batches is not None:
            epoch = f"{format_number(loader.epoch_batches)} batches"
            if loader.epoch_examples is not None:
                epoch += f", {counted(loader.epoch_examples, 'example')}"
            yield "Epoch", epoch
        if loader.demand is not None:
            yield "Step", _demand_words(loader)
        if "processors" in loader.settings:
            processors = str(loader.measured_with.processors)
            ranks = loader.measured_with.ranks_per_node
            yield "Processors", f"{processors}, shared by {ranks} ranks" if ranks > 1 else processors

    def tables(self) -> Iterator[Table]:
        """Lay out the comparison, all rows, those that failed with their messages, and the stages."""
        loader = self.result
        if loader.recommended_row is not None:
            yield self._comparison(loader.recommended_row)
        if loader.rows:
            yield _rows_table(loader)
        failed = failed_settings(loader)
        messages = [
            {"settings": setting_name(loader, row), "outcome": outcome_words(row), "message": row.error or UNKNOWN}
            for row in failed[:_MAX_FAILED]
        ]
        if messages:
            notes = shown_of(len(messages), len(failed), "", "loader.json")
            yield make_table("Settings that failed", messages, notes, names=["settings", "outcome"], texts=["message"])
        if loader.stages:
            yield _stages_table(loader.stages)

    def _comparison(self, chosen: LoaderRow) -> Table:
        """Compare the recommended row with the fastest one, and with the training process making its own batches."""
        loader = self.result
        lines = [("measured" if _is_alone(loader) else "recommended", chosen)]
        fastest = max(loader.working_rows, key=lambda row: row.rate)
        if fastest is not chosen:
            lines.append(("fastest, equal" if fastest.equal_to_best and chosen.equal_to_best else "fastest", fastest))
        alone = without_workers(loader)
        if alone is not None and alone is not chosen and alone is not fastest:
            lines.append((f"without {workers_words(loader)}", alone))
        rows = []
        for name, row in lines:
            cells = row_cells(row)
            rows.append(
                {
                    "": name,
                    workers_words(loader): format_number(row.workers),
                    "examples/s": cells["examples/s"],
                    "step waits": cells["step waits"],
                    "wait p99": cells["wait p99"],
                    "first batch": cells["first batch"],
                    "memory": cells["memory"],
                }
            )
        marked = None if _is_alone(loader) else 0
        return make_table("The loader's rate", rows, marked=marked, names=[""], brief=True)

    def warnings(self) -> Iterator[str]:
        """Yield what differs between two epochs, the settings that failed, and the tuning's own warnings."""
        loader = self.result
        reproduced = loader.reproduced
        if loader.interrupted:
            measured = counted(len(loader.rows), "setting")
            yield f"The tuning was interrupted after {measured}: another may be better. Run the same command again."
        if reproduced is not None and reproduced.first_difference is not None:
            how = f": {quoted(reproduced.what)}" if reproduced.what else ""
            yield with_full_stop(
                f"Not reproducible: two epochs from one seed differ from batch {reproduced.first_difference} on{how}"
            )
        # Of repetition the tuning warns itself.
        failed = [row for row in failed_settings(loader) if row.outcome != "repeats"]
        if failed:
            first = failed[0]
            why = quoted(first.error) if first.error else outcome_words(first)
            yield (
                f"{len(failed)} of {counted(len(loader.rows), 'setting')} of the loader failed; "
                f"{setting_name(loader, first)}: {with_full_stop(why)}"
            )
        yield from map(with_full_stop, loader.warnings)

    def steps(self) -> Iterator[Fact]:
        """As for every section."""
        row = self.result.recommended_row
        again = f"batchtune tune-loader TARGET{self.run.as_option}"
        if row is None:
            yield again, "measure again, with the error fixed"
            return
        if self.result.interrupted:
            yield again, "measure the settings that are missing, too"
            return
        yield str(self.run.folder / LOADER_CONFIG_FILE), "the arguments, for the loader"
        if self.result.demand is None:
            yield f"{again} --step-ms MS", "hold it against the step"
        elif row.gpu_idle is not None and row.gpu_idle > BUSY_IDLE and not self.result.stages:
            yield f"{again} --stages", "find the slow stage"

    def settings(self) -> dict[str, list[Fact]]:
        """As for every section."""
        loader = self.result
        return {"Loader": [("target", loader.target.words), ("kind", loader.kind), *settings_facts(loader.settings)]}


def _capitalized(text: str) -> str:
    """Begin a sentence with a text; names of arguments keep their case."""
    if text.startswith(("the ", "with ")):
        return text[0].upper() + text[1:]
    return text


def varied_arguments(loader: LoaderTuning) -> list[str]:
    """Return the names of the arguments that rows differ in, in their order."""
    values: dict[str, set[str]] = {}
    for row in loader.rows:
        values |= {name: set() for name in row.arguments if name not in values}
    for name, texts in values.items():
        texts.update(argument_of(row, name) for row in loader.rows)
    varied = [name for name in values if len(values[name] - {UNKNOWN}) > 1]
    # A row without workers has no prefetch_factor: that tells it apart only where nothing else does.
    told_apart = {tuple(argument_of(row, name) for name in varied) for row in loader.rows}
    if len(told_apart) == len(loader.rows):
        return varied
    return [name for name in values if len(values[name]) > 1]


def argument_of(row: LoaderRow, name: str) -> str:
    """Return a row's value of an argument, as the command line writes it; a dash if it has none."""
    return argument_text(row.arguments[name]) if name in row.arguments else UNKNOWN


def setting_name(loader: LoaderTuning, row: LoaderRow) -> str:
    """Return which row it is, by the arguments that rows differ in, short enough for a sentence."""
    kind = kind_of(loader.kind)
    varied = varied_arguments(loader)
    told = {}
    for name, value in row.arguments.items():
        is_default = name != kind.WORKERS and name in kind.DEFAULTS and kind.DEFAULTS[name] is value
        if name in varied and not is_default:
            told[name] = value
    return quoted((replace(row, arguments=told) if told else row).name)


def quoted(text: str) -> str:
    """Return the first line of a text from a file, short enough for a sentence."""
    line = clean((text.strip().splitlines() or [""])[0])
    return line if len(line) <= _QUOTED else f"{line[: _QUOTED - 1]}…"


def without_workers(loader: LoaderTuning) -> LoaderRow | None:
    """Return the fastest row in which the training process makes the batches itself; None if none was measured."""
    alone = [row for row in loader.working_rows if not row.workers]
    return max(alone, key=lambda row: row.rate, default=None)


def failed_settings(loader: LoaderTuning) -> list[LoaderRow]:
    """Return the rows that failed."""
    return [row for row in loader.rows if row.outcome != "ok"]


def outcome_words(row: LoaderRow) -> str:
    """Say how a row's measurement ended."""
    return _OUTCOMES.get(row.outcome, row.outcome)


def workers_words(loader: LoaderTuning) -> str:
    """Return what makes the loader's batches: workers, or reader threads."""
    return kind_of(loader.kind).WORKERS_ARE


def _is_alone(loader: LoaderTuning) -> bool:
    """Whether a single setting was measured, which is not recommended over any other."""
    return len(loader.rows) == 1


def _demand_words(loader: LoaderTuning) -> str:
    """Say in a phrase how long the step takes, and how that is known."""
    demand = loader.demand
    assert demand is not None
    words = f"{format_seconds(demand.step_seconds)} for a batch on average, "
    if demand.source != "probe":
        words += "by --step-ms"
    elif demand.device_name:
        words += f"by the probe on {demand.device_name}"
    else:
        words += "by the probe"
    if loader.demanded is not None:
        words += f", which is {format_number(loader.demanded)} examples/s"
    return words


def _rows_table(loader: LoaderTuning) -> Table:
    shown = spread(range(len(loader.rows)), _MAX_ROWS, [loader.recommended])
    varied = varied_arguments(loader)
    has_failed = bool(failed_settings(loader))
    rows = []
    for index in shown:
        row = loader.rows[index]
        cells = row_cells(row)
        if has_failed:
            cells["outcome"] = row.outcome.replace("_", " ")
        arguments: dict[str, str | None] = {}
        for name in varied:
            title = _TITLES.get(name, name).replace("_", " ")  # which narrow terminals can set in lines
            if not title or title in cells or title in arguments:
                title = f"{name}="
            arguments[title] = argument_of(row, name)
        rows.append({**(arguments or {"settings": row.name}), **cells})
    marked = None if loader.recommended is None or _is_alone(loader) else shown.index(loader.recommended)
    notes = [*shown_of(len(shown), len(loader.rows), " settings", "loader.json"), *_notes(loader, varied)]
    return make_table("Settings of the loader", rows, notes, marked, names=["settings", "outcome"])


def row_cells(row: LoaderRow) -> dict[str, str | None]:
    """Return what tables and charts show of a row, by the titles of the columns."""
    equal = _EQUAL if row.equal_to_best and row.gpu_idle is None else ""
    return {
        "examples/s": known(row.examples_per_second, lambda rate: f"{format_number(rate)}{equal}"),
        "step waits": known(row.gpu_idle, format_percent),
        "wait p99": known(row.wait_p99_seconds, format_seconds),
        "first batch": known(row.first_batch_seconds, format_seconds),
        "processors": known(row.processors, lambda count: f"{count:.1f}"),
        "memory": known(row.memory_bytes, format_size),
    }


def _notes(loader: LoaderTuning, varied: list[str]) -> Iterator[str]:
    if loader.recommended is not None and not _is_alone(loader):
        yield "▶ marks the recommended row."
    fixed: Arguments = {}
    for row in loader.rows:
        fixed |= {name: value for name, value in row.arguments.items() if name not in varied}
    if varied and fixed:
        same = " ".join(f"{name}={argument_text(value)}" for name, value in fixed.items())
        yield f"The same for all that take it: {same}."
    if any(row.gpu_idle is not None for row in loader.rows):
        yield (
            "“Step waits” is the share of training that the step waits for batches, measured for the best settings "
            "with a consumer that takes as long as the step."
        )
    elif any(row.equal_to_best for row in loader.rows):
        yield f"{_EQUAL} marks settings that can't be told from the fastest: the trials differ by as much."
    if any(row.wait_p99_seconds is not None for row in loader.rows):
        yield (
            "“Wait p99” is for one batch, of a consumer that takes batches as fast as they come (99 "
            "in 100 are shorter), without the first of each epoch."
        )
    if len({row.rounds for row in loader.rows}) > 1:
        yield "Settings that were slow in a first, short round were not measured again."


def _stages_table(stages: list[LoaderStage]) -> Table:
    rows = [
        {
            "stage": stage.name,
            "time per example": format_seconds(stage.seconds_per_example),
            "share": format_percent(stage.share),
        }
        for stage in stages
    ]
    slowest = max(range(len(stages)), key=lambda index: stages[index].share)
    notes = ["Each measured alone, in one process, without the stages before."]
    return make_table("Stages of making a batch", rows, notes, marked=slowest, names=["stage"])
