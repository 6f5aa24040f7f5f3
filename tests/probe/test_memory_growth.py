"""Memory that creeps, and memory that only settles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from batchtune.verify.rules import Growth, growth_of

MIB = 1 << 20
LIMIT = 1000 * MIB


def grown(figures: Sequence[int | None]) -> Growth:
    growth = growth_of(figures)
    assert growth is not None
    return growth


def rising(step_bytes: float, count: int = 40) -> list[int | None]:
    return [int(500 * MIB + step_bytes * step) for step in range(count)]


def test_growth_is_given_per_step() -> None:
    growth = grown(rising(1000.0, 400))
    assert growth.per_step_bytes == pytest.approx(1000.0, rel=0.01)


@pytest.mark.parametrize(("count", "known"), [(11, False), (12, True)])
def test_growth_takes_twelve_steps(count: int, known: bool) -> None:
    assert (growth_of(rising(0, count)) is not None) == known


def test_growth_is_unknown_where_a_figure_is() -> None:
    assert growth_of([*rising(0), None]) is None


# 5% of the limit in 10,000 steps.
@pytest.mark.parametrize(("step_bytes", "found"), [(5000, False), (5500, True)])
def test_a_leak_is_what_does_harm_in_ten_thousand_steps(step_bytes: int, found: bool) -> None:
    assert grown(rising(step_bytes, 400)).leaks(LIMIT) == found


def test_a_few_pages_are_no_leak() -> None:
    """14 steps of a process whose heap grew by 14 KiB on the way: as much in 10,000 steps would do harm."""
    assert not grown(rising(2048, 14)).creeps(360 * MIB)
    assert grown(rising(2048, 140)).creeps(360 * MIB)


def filling(steps: int, full_at: float) -> list[int | None]:
    """A MiB more with each step until so large a part of the steps is done."""
    return [int(500 * MIB + min(step, full_at * steps) * MIB) for step in range(steps)]


def flattening(steps: int, settled_after: float) -> list[int | None]:
    """Growth that falls to its e-th part whenever so large a part of the steps is done."""
    return [int(500 * MIB + 200 * MIB * (1 - np.exp(-step / (settled_after * steps)))) for step in range(steps)]


@pytest.mark.parametrize("steps", [12, 60, 1001])
def test_what_grows_at_the_same_pace_to_the_end_may_be_a_leak(steps: int) -> None:
    growth = grown(rising(MIB, steps))
    assert growth.pace == pytest.approx(1)
    assert growth.leaks(LIMIT)


@pytest.mark.parametrize(("steps", "full_at"), [(60, 0.75), (1001, 0.95)])
def test_a_cache_that_was_full_at_the_end_is_no_leak(steps: int, full_at: float) -> None:
    growth = grown(filling(steps, full_at))
    assert not growth.leaks(LIMIT) and growth.creeps(LIMIT)


@pytest.mark.parametrize(("steps", "settled_after"), [(60, 0.5), (1001, 1.0)])
def test_a_cache_that_fills_ever_more_slowly_is_no_leak(steps: int, settled_after: float) -> None:
    growth = grown(flattening(steps, settled_after))
    assert not growth.leaks(LIMIT) and growth.creeps(LIMIT)


def test_a_cache_that_is_still_filling_may_be_a_leak() -> None:
    assert grown(filling(200, 1.2)).leaks(LIMIT)


def test_one_step_up_is_no_leak() -> None:
    figures: list[int | None] = [(500 if step < 25 else 600) * MIB for step in range(40)]
    assert not grown(figures).leaks(LIMIT)


def test_what_merely_varies_is_no_leak() -> None:
    random = np.random.default_rng(0)
    for _ in range(60):
        figures = [int(figure) for figure in 500 * MIB + random.normal(0, MIB, 200)]
        assert not grown(figures).leaks(LIMIT)


def test_a_leak_shows_through_noise() -> None:
    noise = np.random.default_rng(0).normal(0, MIB, 400)
    figures = [int(figure) for figure in 500 * MIB + noise + 0.1 * MIB * np.arange(400)]
    assert grown(figures).leaks(LIMIT)


def test_a_cache_that_fills_shows_through_noise() -> None:
    random = np.random.default_rng(0)
    for full_at in (0.8, 0.9):
        figures = [int(500 * MIB + min(step, 400 * full_at) * 0.1 * MIB + random.normal(0, MIB)) for step in range(400)]
        assert grown(figures).creeps(LIMIT) and not grown(figures).leaks(LIMIT)


@pytest.mark.parametrize(("share", "creeps"), [(0.019, False), (0.021, True)])
def test_the_cache_may_grow_by_two_per_cent(share: float, creeps: bool) -> None:
    assert grown(rising(share * LIMIT / 200, 400)).fragments(LIMIT) == creeps


def test_a_cache_that_has_settled_does_not_creep() -> None:
    figures: list[int | None] = [(500 if step < 15 else 700) * MIB for step in range(40)]
    assert not grown(figures).fragments(LIMIT)
