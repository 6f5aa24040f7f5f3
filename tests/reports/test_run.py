"""Reading a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report_records import made_probe, made_sweep, proven_probe, proven_sweep

from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.reports import RunResults, load_run
from batchtune.results import Probe, Sweep, write_result


def write_run(folder: Path, probe: Probe | None = None, sweep: Sweep | None = None) -> Path:
    if probe is not None:
        write_result(folder / "probe.json", probe)
    if sweep is not None:
        write_result(folder / "sweep.json", sweep)
    return folder


def test_both_results_are_read(tmp_path: Path) -> None:
    results = load_run(write_run(tmp_path / "run", proven_probe(), proven_sweep()))
    assert (results.probe, results.sweep) == (proven_probe(), proven_sweep())


def test_the_name_is_the_folders_without_the_path_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "my-run", made_probe()))
    assert load_run(Path(".")).name == "my-run"


def test_a_probe_alone_is_a_run(tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path, probe=made_probe())).sweep is None


def test_on_several_ranks_examples_are_dealt_twice(tmp_path: Path) -> None:
    lengths = Lengths.of([1.0, 2, 3, 9, 9, 30])
    swept = sweep(
        lengths, 40, SweepSettings(strategies=("linear",), num_buckets=(1, 2), world_size=4, same_bucket=True), Costs()
    )
    assert any(row.repeated_examples for row in swept.rows)
    for index in range(len(swept.rows)):
        chosen = msgspec.structs.replace(swept, recommended=index, buckets=[])
        assert load_run(write_run(tmp_path, sweep=chosen)).sweep == chosen


def test_a_sweep_alone_is_a_run(tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path, sweep=made_sweep())).probe is None


def test_a_missing_folder_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"no run folder .*absent") as caught:
        load_run(tmp_path / "absent")
    assert "batchtune tune MANIFEST" in str(caught.value.hint)


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ResultError, match=r"sweep\.json is a file"):
        load_run(tmp_path / "sweep.json")


def test_an_empty_folder_tells_which_command_makes_which_file(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"neither probe\.json nor sweep\.json nor stream\.json") as caught:
        load_run(tmp_path)
    hint = str(caught.value.hint)
    assert all(command in hint for command in ("probe-oom", "sweep-buckets", "sweep-stream"))


def test_results_of_different_data_are_refused(tmp_path: Path) -> None:
    sweep = made_sweep()
    other = msgspec.structs.replace(sweep, lengths=msgspec.structs.replace(sweep.lengths, fingerprint="0" * 64))
    with pytest.raises(ResultError, match="different data"):
        load_run(write_run(tmp_path, made_probe(), other))


@pytest.mark.parametrize(
    ("recommended", "said"), [(66, "recommended is 66, but rows are 0 to 65"), (-1, "recommended")]
)
def test_a_recommended_row_that_is_not_there_is_damage(tmp_path: Path, recommended: int, said: str) -> None:
    damaged = msgspec.structs.replace(made_sweep(), recommended=recommended)
    with pytest.raises(ResultError, match=rf"sweep\.json is edited or damaged: .*{said}"):
        load_run(write_run(tmp_path, sweep=damaged))


def test_a_row_with_more_sizes_than_boundaries_is_damage(tmp_path: Path) -> None:
    sweep = made_sweep()
    row = msgspec.structs.replace(sweep.rows[3], batch_sizes=[1, 2])
    damaged = msgspec.structs.replace(sweep, rows=[*sweep.rows[:3], row, *sweep.rows[4:]])
    with pytest.raises(ResultError, match="rows, entry 3: it has 13 boundaries and 2 batch sizes"):
        load_run(write_run(tmp_path, sweep=damaged))


def test_results_without_probe_and_sweep_are_a_misuse() -> None:
    with pytest.raises(ValueError, match="no results"):
        RunResults(name="run", probe=None, sweep=None)
