"""Reading a run folder."""

from pathlib import Path

import pytest
from loader_records import made_iterable, made_loader
from msgspec.structs import replace
from report_records import (
    made_probe,
    made_sweep,
    made_verification,
    proven_probe,
    proven_sweep,
    whole_sweep,
)
from reports.changed import with_row
from streamed_records import made_stream, whole_stream

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import ResultError
from batchtune.lengths import Lengths
from batchtune.reports import load_run
from batchtune.results import SweepSettings, write_result


def write_run(folder, **results):
    for name, result in results.items():
        write_result(folder / f"{name}.json", result)
    return folder


@pytest.mark.parametrize(
    ("main", "results"),
    [
        ("probe", {"probe": made_probe()}),
        ("sweep", {"sweep": made_sweep()}),
        ("sweep", {"probe": proven_probe(), "sweep": proven_sweep()}),
        ("stream", {"stream": whole_stream()}),
        ("stream", {"probe": made_probe(), "stream": whole_stream()}),
        ("sweep", {"sweep": whole_sweep(), "stream": whole_stream()}),
        ("loader", {"loader": made_loader()}),
        ("probe", {"probe": made_probe(), "loader": made_iterable()}),
    ],
)
def test_any_result_is_a_run_alone_and_beside_others(tmp_path, main, results):
    run = load_run(write_run(tmp_path, **results, verify=made_verification()))
    assert {name: getattr(run, name) for name in results} == results
    assert run.main is getattr(run, main)
    assert run.verification == made_verification()
    assert run.lengths == results[main].lengths


def test_the_name_is_the_folders_without_the_path_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "my-run", probe=made_probe()))
    assert load_run(Path(".")).name == "my-run"


def test_on_several_ranks_examples_are_dealt_twice(tmp_path):
    settings = SweepSettings(
        strategies=("linear",), num_buckets=(1, 2), world_size=4, same_bucket=True
    )
    swept = sweep(Lengths.of([1.0, 2, 3, 9, 9, 30]), 40, settings, Costs())
    assert any(row.repeated_examples for row in swept.rows)
    for index in range(len(swept.rows)):
        chosen = replace(swept, recommended=index, buckets=[])
        assert load_run(write_run(tmp_path, sweep=chosen)).sweep == chosen


def test_a_folder_without_results_tells_what_makes_them(tmp_path):
    with pytest.raises(ResultError, match=r"Run folder .*absent does not exist"):
        load_run(tmp_path / "absent")
    with pytest.raises(ResultError, match="is not a folder, and a run needs one"):
        load_run(Path(__file__))
    with pytest.raises(ResultError, match="holds no results") as caught:
        load_run(tmp_path)
    commands = ("probe-oom", "sweep-buckets", "sweep-stream", "tune-loader", "record")
    for command in (*commands, "tune`"):
        assert f"batchtune {command}" in caught.value.hint


def name_of(result):
    return result.FORMAT.removeprefix("batchtune/")


@pytest.mark.parametrize(
    "result", [made_sweep(), made_stream(), made_loader()], ids=name_of
)
def test_results_of_different_data_are_refused(tmp_path, result):
    lengths = replace(result.lengths, fingerprint="0" * 64)
    other = {name_of(result): replace(result, lengths=lengths)}
    why = r"probe\.json and .*\.json are of different data: 28,539"
    with pytest.raises(ResultError, match=why):
        load_run(write_run(tmp_path, probe=made_probe(), **other))


DAMAGED = [
    (replace(made_sweep(), recommended=66), "recommended is 66, but rows are 0 to 65"),
    (
        with_row(
            made_sweep(),
            3,
            batch_sizes=[1, 2],
        ),
        "rows, entry 3: it has 13 boundaries and 2 batch sizes",
    ),
    (
        with_row(made_sweep(), 3, boundaries=[2.0] * 13),
        "rows, entry 3: boundaries do not ascend",
    ),
    (with_row(made_sweep(), 3, batches=0), r"rows\[3\]\.batches: must be"),
    (with_row(made_sweep(), 47, batches=300), "row 47: batches is 300"),
    (with_row(made_sweep(), 47, padding_ratio=0.01), "row 47: padding_ratio is 0.01"),
    (
        with_row(proven_sweep(), 47, batch_sizes=[10**9] * 13),
        "row 47: batch_sizes are not those of its buckets",
    ),
    (
        replace(
            proven_probe(),
            frontier=[replace(proven_probe().frontier[0], batch_size=10**12)],
        ),
        "frontier: batch_size is 1000000000000, but trial 12 ran a smaller batch",
    ),
    (
        with_row(
            made_loader(),
            5,
            arguments={"num_workers": -1},
        ),
        "arguments: num_workers: Expected `int` >= 0",
    ),
    (
        replace(made_loader(), recommended=10),
        "recommended is 10, whose outcome is shared_memory",
    ),
    (
        replace(made_verification(), bucket_batch_sizes=[1]),
        "it has 13 boundaries and 1 batch sizes",
    ),
]


@pytest.mark.parametrize(("damaged", "said"), DAMAGED)
def test_what_can_not_be_is_damage_and_named(tmp_path, damaged, said):
    name = name_of(damaged)
    why = rf"{name}\.json is edited or damaged: .*{said}.*\n.*(again|verify`)"
    with pytest.raises(ResultError, match=why):
        load_run(write_run(tmp_path, **{"sweep": made_sweep(), name: damaged}))
