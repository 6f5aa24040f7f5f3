"""How reports name the rows of a sweep, of tables or of a stream, and compare what their epochs cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchtune.batching.strategies import STRATEGIES
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
    kinds = {row.pool_size is not None for row in sweep.rows}
    return "tables and pools" if len(kinds) > 1 else "pools" if True in kinds else "tables"


def best_table(sweep: Sweep) -> Row | None:
    """Return the best bucket table, for frameworks that can't make pools; None if no table is recommended."""
    return None if sweep.recommended_table is None else sweep.rows[sweep.recommended_table]


def mates_again(sweep: Sweep, one: Row | Baseline | LowerBound) -> float | None:
    """Return the probability that two examples of one batch are mates again in the next epoch; None if not known."""
    if isinstance(one, LowerBound):
        return None
    if isinstance(one, Row):
        return one.mates_again
    count = sweep.lengths.count
    # Drawn at random, any other example is as likely a mate.
    return (min(one.batch_size, count) - 1) / max(1, count - 1) if one.name == FIXED_BASELINE else None


def format_share(share: float) -> str:
    """Return a share, which may be small, as per cent with 3 significant digits: `12.9%`, `0.0946%`."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{100 * share:.3g}%"


def format_correlation(correlation: float) -> str:
    """Return a correlation with 3 digits, without a minus before 0."""
    return f"{round(correlation, 3) + 0.0:.3f}"


def compared(sweep: Sweep) -> list[tuple[str, Row | Baseline]]:
    """Name the alternatives to the recommended row: the user's config or today's practice, and a fixed batch size.

    Today's practice is SpeechBrain's for speech, and length-grouped batches for all else.
    """
    others: list[tuple[str, Row | Baseline]] = []
    if sweep.current is not None and sweep.current_fits is not False:
        others.append((CURRENT, sweep.current))
    elif sweep.lengths.unit in SPEECH_UNITS:
        if (today := today_row(sweep)) is not None and today[1] is not sweep.recommended_row:
            others.append(today)
    elif (grouped := _baseline(sweep, _LENGTH_GROUPED)) is not None:
        others.append((f"Transformers' group_by_length (batch size {format_number(grouped.batch_size)})", grouped))
    if (fixed := fixed_baseline(sweep)) is not None:
        others.append((f"a fixed batch size of {format_number(fixed.batch_size)}", fixed))
    return others


def today_row(sweep: Sweep) -> tuple[str, Row] | None:
    """Return name and row of today's practice, with the most buckets that were swept; None if none was."""
    known = [
        (STRATEGIES[row.strategy].practice(row.num_buckets), row) for row in sweep.rows if row.strategy in STRATEGIES
    ]
    named = [(name, row) for name, row in known if name is not None]
    return max(named, key=lambda one: one[1].num_buckets, default=None)


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


def speed(our_seconds: float, their_seconds: float) -> str:
    """Return `1.34 times faster than`."""
    if our_seconds == 0 or format_ratio(their_seconds / our_seconds) == "1.00":
        return _AS_FAST
    if our_seconds < their_seconds:
        return f"{format_ratio(their_seconds / our_seconds)} times faster than"
    return f"{format_ratio(our_seconds / their_seconds)} times slower than"


def advantage(row: Row | StreamRow, others: Sequence[tuple[str, Costed]]) -> str:
    """Say how a row compares with the first of the others: `: 1.34 times faster than NAME`; empty without any."""
    if not others:
        return ""
    (name, other), *_ = others
    ours, theirs = row.estimated_epoch_seconds, other.estimated_epoch_seconds
    if ours is not None and theirs:
        faster, also = speed(ours, theirs), ""
        if faster != _AS_FAST and type(other) is type(row) and row.equal_to_best and other.equal_to_best:
            also = ", but the estimates may be off by as much"
        return f": {faster} {name}{also}"
    return f": {_fewer(row.batches, other.batches)} than with {name}" if other.batches else ""


def is_better(one: Costed, other: Costed) -> bool:
    """Return whether one costs less, in time where both are known, else in batches."""
    timed = one.estimated_epoch_seconds is not None and other.estimated_epoch_seconds is not None
    return (cost_of(one, timed=timed) or 0.0) < (cost_of(other, timed=timed) or 0.0)


def padding(row: Row | StreamRow, others: Sequence[tuple[str, Row | StreamRow | Baseline]]) -> str:
    """Say how much is padding, and how much with the others."""
    against = [f"{format_percent(other.padding_ratio)} with {name}" for name, other in others]
    return _joined(f"Padding is {format_percent(row.padding_ratio)} of all cells", ", against ", against)


def time_error(row: Row | StreamRow, besides: str = "") -> Iterator[str]:
    """Say how exact the estimated time is, if it is known; `besides` ends the sentence."""
    if row.estimated_epoch_seconds and row.estimated_epoch_error_seconds is not None:
        error = format_percent(2 * row.estimated_epoch_error_seconds / row.estimated_epoch_seconds)
        yield f"The measured steps give the time to within {error} (two standard errors){besides}."


def batch_sizes(row: Row | StreamRow) -> str:
    """Say how the batch size varies, without a full stop."""
    return (
        f"Batches hold {format_number(row.smallest_batch_size)} to {format_number(row.largest_batch_size)} examples, "
        f"{format_number(row.mean_batch_size)} on average (coefficient of variation {row.batch_size_variation:.2f})"
    )


def savings(
    sweep: Sweep | StreamSweep, row: Row | StreamRow, others: Sequence[tuple[str, Costed]], kinds: str
) -> list[str]:
    """Say what an epoch needs with the recommended row, and how much less that is than with the others, by name.

    `kinds` of rows were compared, such as `tables`.
    """
    source, ranks = (sweep.current_settings or {}).get("source"), sweep.world_size
    named = {CURRENT: f"{CURRENT} ({source})"} if source and source != "--current" else {}
    needs = [f"{named.get(name, name)} needs {format_number(other.batches)}" for name, other in others]
    seconds = row.estimated_epoch_seconds
    if seconds is None:
        cost = without_times(kinds)
        saved = [f"{_fewer(row.batches, other.batches)} than with {name}" for name, other in others if other.batches]
    else:
        cost = f"One epoch is estimated at {format_seconds(seconds)}"
        times = [(name, other.estimated_epoch_seconds) for name, other in others]
        saved = [f"{speed(seconds, time)} {name} ({format_seconds(time)})" for name, time in times if time]
    on_ranks = f" on {format_number(ranks)} ranks" if ranks > 1 else ""
    return [_joined(f"An epoch{on_ranks} needs {batches_words(row.batches)}", "; ", needs), _joined(cost, ": ", saved)]


def without_times(kinds: str) -> str:
    """Say that only batches are compared, without a full stop."""
    return f"Step times are not known, so {kinds} are compared by batches"


def _fewer(ours: int, theirs: int) -> str:
    if ours == theirs:
        return "no fewer batches"
    return f"{format_percent(abs(1 - ours / theirs))} {'fewer' if ours < theirs else 'more'} batches"


def _joined(start: str, joint: str, others: Sequence[str]) -> str:
    *first, last = others or [""]
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"{start}{joint if others else ''}{listed}."
