"""How reports name the rows of a sweep, of tables or of a stream, and compare what their epochs cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.buckets.strategies import STRATEGIES
from batchtune.lengths import SPEECH_UNITS
from batchtune.results import Baseline, Costed, LengthsSummary, LowerBound, Row, StreamRow, StreamSweep, Sweep, cost_of
from batchtune.units import format_length, format_number, format_percent, format_ratio, format_seconds

FIXED_BASELINE = "fixed-random"
_LENGTH_GROUPED = "length-grouped"
CURRENT = "your current config"
DOES_NOT_FIT = "does not fit"
# Marks rows with batches that are not proven to fit.
UNPROVEN = "*"
_AS_FAST = "as fast as"


def series_name(row: Row) -> str:
    """Return what tables and charts call a row's strategy and sizing: `optimal (frontier)`."""
    return row.strategy if row.sizing == "length" else f"{row.strategy} ({row.sizing})"


def current_name(sweep: Sweep | StreamSweep, name: str = "current") -> str:
    """Return what tables and charts call the user's own config; it says so if its batches do not fit."""
    return f"{name} ({DOES_NOT_FIT})" if sweep.current_fits is False else name


def current_words(sweep: Sweep | StreamSweep) -> list[str]:
    """Return what was read as the user's own config, and where."""
    settings = sweep.current_settings or {}
    described = settings.get("describe")
    if not isinstance(described, str):
        return []
    place = [str(settings[name]) for name in ("source", "key_path") if settings.get(name)]
    return [f"{described} ({', '.join(place)})" if place else described]


def swept_kinds(sweep: Sweep) -> str:
    """Return what was swept: `tables`, `pools`, or `tables and pools`."""
    count = sum(row.pool_size is not None for row in sweep.rows)
    if not count:
        return "tables"
    return "pools" if count == len(sweep.rows) else "tables and pools"


def best_table(sweep: Sweep) -> Row | None:
    """Return the best bucket table, for frameworks that can't make pools; None if no table is recommended."""
    return None if sweep.recommended_table is None else sweep.rows[sweep.recommended_table]


def mates_again(sweep: Sweep, costed: Row | Baseline | LowerBound) -> float | None:
    """Return the probability that two examples of one batch are mates again in the next epoch; None if not known."""
    if isinstance(costed, Row):
        return costed.mates_again
    if isinstance(costed, LowerBound) or costed.name != FIXED_BASELINE:
        return None
    # Drawn at random, any other example is as likely a mate.
    count = sweep.lengths.count
    return (min(costed.batch_size, count) - 1) / max(1, count - 1)


def format_share(share: float) -> str:
    """Return a share, which may be small, as per cent with 3 significant digits: `12.9%`, `0.0946%`."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{100 * share:.3g}%"


def format_correlation(correlation: float) -> str:
    """Return a correlation with 3 digits, without a minus before 0."""
    return f"{round(correlation, 3) + 0.0:.3f}"


def compared(sweep: Sweep) -> list[tuple[str, Row | Baseline]]:
    """Name the alternatives to the recommended row: the user's config if it fits, and a fixed batch size.

    Without the user's config today's practice takes its place: SpeechBrain's for speech, length-grouped batches for all
    else.
    """
    alternatives: list[tuple[str, Row | Baseline]] = []
    today = today_row(sweep)
    grouped = _baseline(sweep, _LENGTH_GROUPED)
    is_speech = sweep.lengths.unit in SPEECH_UNITS
    if sweep.current is not None:
        if sweep.current_fits is not False:
            alternatives.append((CURRENT, sweep.current))
    elif is_speech and today is not None and today[1] is not sweep.recommended_row:
        alternatives.append(today)
    elif not is_speech and grouped is not None:
        name = f"Transformers' group_by_length (batch size {format_number(grouped.batch_size)})"
        alternatives.append((name, grouped))
    fixed = fixed_baseline(sweep)
    if fixed is not None:
        alternatives.append((f"a fixed batch size of {format_number(fixed.batch_size)}", fixed))
    return alternatives


def today_row(sweep: Sweep) -> tuple[str, Row] | None:
    """Return name and row of today's practice, with the most buckets that were swept; None if none was."""
    named = []
    for row in sweep.rows:
        name = STRATEGIES[row.strategy].practice(row.num_buckets) if row.strategy in STRATEGIES else None
        if name is not None:
            named.append((name, row))
    return max(named, key=lambda pair: pair[1].num_buckets, default=None)


def fixed_baseline(sweep: Sweep) -> Baseline | None:
    """Return the largest fixed batch size, its batches drawn at random; None if it was not computed."""
    return _baseline(sweep, FIXED_BASELINE)


def _baseline(sweep: Sweep, name: str) -> Baseline | None:
    return next((baseline for baseline in sweep.baselines if baseline.name == name), None)


def truncated_words(lengths: LengthsSummary) -> str:
    """Say how many examples were truncated, without a full stop; empty if none were."""
    if not lengths.truncated:
        return ""
    longest = format_length(lengths.max, lengths.unit)
    if lengths.truncated == 1:
        return f"1 example is longer than {longest} (--truncate), and counts as that long"
    return f"{lengths.truncated:,} examples are longer than {longest} (--truncate), and count as that long"


def batches_words(count: int) -> str:
    """Return `1 batch`, `634 batches`."""
    return "1 batch" if count == 1 else f"{format_number(count)} batches"


def speed(seconds: float, other_seconds: float) -> str:
    """Return `1.34 times faster than`."""
    if seconds == 0 or format_ratio(other_seconds / seconds) == "1.00":
        return _AS_FAST
    if seconds < other_seconds:
        return f"{format_ratio(other_seconds / seconds)} times faster than"
    return f"{format_ratio(seconds / other_seconds)} times slower than"


def advantage(row: Row | StreamRow, alternatives: Sequence[tuple[str, Costed]], *, timed: bool) -> str:
    """Say how a row compares with the first alternative: `: 1.34 times faster than NAME`; empty without any."""
    if not alternatives:
        return ""
    name, other = alternatives[0]
    seconds = row.estimated_epoch_seconds
    if not timed or seconds is None or not other.estimated_epoch_seconds:
        return f": {fewer_batches(row, other)} than with {name}" if other.batches else ""
    faster = speed(seconds, other.estimated_epoch_seconds)
    if faster != _AS_FAST and isinstance(other, (Row, StreamRow)) and row.equal_to_best and other.equal_to_best:
        return f": {faster} {name}, but the estimates may be off by as much"
    return f": {faster} {name}"


def is_better(costed: Costed, other: Costed, *, timed: bool) -> bool:
    """Return whether one costs less, in time if `timed` and both are known, else in batches."""
    timed = timed and costed.estimated_epoch_seconds is not None and other.estimated_epoch_seconds is not None
    return (cost_of(costed, timed=timed) or 0.0) < (cost_of(other, timed=timed) or 0.0)


def padding(row: Row | StreamRow, alternatives: Sequence[tuple[str, Row | StreamRow | Baseline]]) -> str:
    """Say how much is padding, and how much with the alternatives."""
    against = [f"{format_percent(other.padding_ratio)} with {name}" for name, other in alternatives]
    return _joined(f"Padding is {format_percent(row.padding_ratio)} of all cells", ", against ", against)


def time_error(row: Row | StreamRow) -> float | None:
    """Return the relative error of the estimated time, of two standard errors; None if it is unknown."""
    if not row.estimated_epoch_seconds or row.estimated_epoch_error_seconds is None:
        return None
    return 2 * row.estimated_epoch_error_seconds / row.estimated_epoch_seconds


def time_error_sentence(row: Row | StreamRow) -> Iterator[str]:
    """Say how exact the estimated time is, if it is known."""
    error = time_error(row)
    if error is not None:
        yield f"The measured steps give the time to within {format_percent(error)} (two standard errors)."


def batch_sizes(row: Row | StreamRow) -> str:
    """Say how the batch size varies, without a full stop."""
    return (
        f"Batches hold {format_number(row.smallest_batch_size)} to {format_number(row.largest_batch_size)} examples, "
        f"{format_number(row.mean_batch_size)} on average (coefficient of variation {row.batch_size_variation:.2f})"
    )


def savings(
    sweep: Sweep | StreamSweep, row: Row | StreamRow, alternatives: Sequence[tuple[str, Costed]], *, timed: bool
) -> Iterator[str]:
    """Say what an epoch needs with the recommended row, and how much less that is than with the alternatives."""
    source = (sweep.current_settings or {}).get("source")
    needs = []
    times = []
    for name, other in alternatives:
        full_name = f"{name} ({source})" if name == CURRENT and source and source != "--current" else name
        needs.append(f"{full_name} needs {format_number(other.batches)}")
        seconds = other.estimated_epoch_seconds
        if seconds and row.estimated_epoch_seconds is not None:
            times.append(f"{speed(row.estimated_epoch_seconds, seconds)} {name} ({format_seconds(seconds)})")
    on_ranks = f" on {format_number(sweep.world_size)} ranks" if sweep.world_size > 1 else ""
    yield _joined(f"An epoch{on_ranks} needs {batches_words(row.batches)}", "; ", needs)
    if timed and row.estimated_epoch_seconds is not None:
        yield _joined(f"One epoch is estimated at {format_seconds(row.estimated_epoch_seconds)}", ": ", times)


def fewer_batches(row: Costed, other: Costed) -> str:
    """Return `37.9% fewer batches`."""
    if row.batches == other.batches:
        return "no fewer batches"
    change = format_percent(abs(1 - row.batches / other.batches))
    return f"{change} {'fewer' if row.batches < other.batches else 'more'} batches"


def _joined(start: str, joint: str, parts: Sequence[str]) -> str:
    if not parts:
        return f"{start}."
    if len(parts) == 1:
        return f"{start}{joint}{parts[0]}."
    return f"{start}{joint}{', '.join(parts[:-1])} and {parts[-1]}."
