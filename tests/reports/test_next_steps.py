"""What a report proposes to do next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from report_records import (
    failed_verification,
    made_probe,
    made_sweep,
    made_verification,
    without_recommendation,
)

from batchtune.reports import RunResults
from batchtune.reports.summary import next_steps

BOTH = RunResults(name="run", probe=made_probe(), sweep=made_sweep())
LEAK = msgspec.structs.replace(failed_verification(), proposal=None)


@pytest.mark.parametrize(
    ("results", "first"),
    [
        (RunResults(name="run", probe=made_probe(), sweep=None), ["batchtune sweep-buckets MANIFEST"]),
        (
            RunResults(name="run", probe=None, sweep=without_recommendation(made_sweep())),
            ["batchtune sweep-buckets MANIFEST --num-buckets 20:60"],
        ),
        (
            RunResults(name="run", probe=None, sweep=made_sweep()),
            [
                "batchtune-run/sampler.yaml",
                "batchtune probe-oom MANIFEST --workload W",
                "batchtune export --to FRAMEWORK",
            ],
        ),
        (BOTH, ["batchtune-run/sampler.yaml", "batchtune verify MANIFEST", "batchtune export --to FRAMEWORK"]),
        (
            replace(BOTH, verification=made_verification()),
            ["batchtune-run/sampler.yaml", "batchtune export --to FRAMEWORK"],
        ),
        (
            replace(BOTH, verification=failed_verification()),
            ["batchtune-run/sampler.yaml", "batchtune verify MANIFEST"],
        ),
        (
            replace(BOTH, verification=failed_verification(verified=False)),
            ["batchtune tune MANIFEST --workload W --force", "batchtune verify MANIFEST"],
        ),
        (replace(BOTH, verification=LEAK), ["batchtune verify MANIFEST"]),
    ],
    ids=["probe", "nothing", "sweep", "both", "verified", "safe sizes", "no safe sizes", "leak"],
)
def test_what_comes_next_follows_from_what_there_is(results: RunResults, first: list[str]) -> None:
    assert [command for command, _ in next_steps(results)] == [*first, "batchtune report --full"]


def test_a_folder_other_than_the_usual_one_is_named_as_a_shell_takes_it() -> None:
    commands = [command for command, _ in next_steps(replace(BOTH, folder=Path("my run")))]
    assert commands[1] == "batchtune verify 'my run' MANIFEST"
