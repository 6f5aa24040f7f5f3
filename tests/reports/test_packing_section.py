"""What a report says about packing."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_records import packed_row, with_packing
from report_records import made_sweep

from batchtune.reports import RunResults, render
from batchtune.reports.packing import packing_section
from batchtune.reports.section import Section
from batchtune.results import PackedRow, Sweep


def section_of(sweep: Sweep) -> Section:
    run = RunResults(name="run", folder=Path("run"), sweep=sweep)
    assert sweep.packed is not None
    return packing_section(run, sweep, sweep.packed)


def with_current(current: PackedRow) -> Sweep:
    settings = {"describe": "verl, cap=8192", "source": "--current"}
    return with_packing(made_sweep(), current=current, current_settings=settings)


def test_learning_is_one_line_with_both_numbers() -> None:
    text = " ".join(section_of(with_packing(made_sweep())).sentences)
    assert "Learning: 160 optimizer steps an epoch, 634 with the best padded" in text
    assert "the tokens of a step vary by ±2.0%" in text
    assert "loss_agg_mode=token-mean in verl" in text
    text = " ".join(section_of(with_current(packed_row("verl", steps=99))).sentences)
    assert "160 optimizer steps an epoch, 99 with your current config" in text


def test_what_changing_saves_is_said_at_the_same_budget_alone() -> None:
    current = packed_row("verl", batches=800, slowest_rank=1.2)
    text = " ".join(section_of(with_current(current)).sentences)
    assert "Your current config is verl, cap=8192 (--current)." in text
    assert "makes 20.0% fewer micro-batches of the same tokens" in text
    assert "1.0% longer than the mean instead of 20.0%" in text
    text = " ".join(
        section_of(with_current(packed_row("verl", max_tokens=4096))).sentences
    )
    assert "its micro-batches do not compare with those of 8,192" in text
    assert "of the same tokens" not in text


@pytest.mark.parametrize("text", ["\x1b[31m", "<script>", "a\nb|c"])
def test_names_of_strangers_are_harmless(text: str) -> None:
    run = RunResults(
        name="run", folder=Path("run"), sweep=with_packing(made_sweep(), text)
    )
    for name in ("terminal", "markdown", "html"):
        shown = render(name, run)
        assert "\x1b[31m" not in shown
        assert name != "html" or "max_tokens = 8,192 with <script>" not in shown
