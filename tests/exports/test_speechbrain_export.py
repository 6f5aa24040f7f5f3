"""The SpeechBrain export, read by hyperpyyaml and run by SpeechBrain's own sampler."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from epochs.conftest import load_speechbrain
from hypothesis import given, settings
from hypothesis import strategies as st
from real_lengths import librispeech_seconds
from report_records import made_sweep

from batchtune import sampler_from_config
from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.exports import export_of
from batchtune.exports.base import Tuned
from batchtune.exports.run_configs import render_sampler_yaml, sampler_config
from batchtune.exports.text import flow_list, number
from batchtune.lengths import Lengths
from batchtune.results import Row, Sweep

EXPORT = export_of("speechbrain")


@pytest.fixture(scope="module")
def librispeech() -> np.ndarray:
    return librispeech_seconds()


def loaded(text: str) -> dict[str, Any]:
    """The file as a recipe's train.py gets it."""
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(hyperpyyaml.load_hyperpyyaml(text))


def render(result: Sweep) -> str:
    return EXPORT.render(Tuned(sweep=result))


def batches(sampler: Any, values: Sequence[float] | np.ndarray, block: dict[str, Any]) -> int:
    return len(sampler([None] * len(values), lengths_list=list(values), **block))


def recommended(result: Sweep) -> Row:
    assert result.recommended_row is not None
    return result.recommended_row


@pytest.mark.parametrize("most", [None, 40])
def test_speechbrain_makes_the_rows_number_of_batches(sampler: Any, librispeech: np.ndarray, most: int | None) -> None:
    # The optimal boundaries make use of the cap so that it need not be written.
    strategy = "optimal" if most is None else "quantile"
    tried = SweepSettings(num_buckets=(10, 15), strategies=("speechbrain", strategy), max_batch_size=most)
    result = sweep(Lengths.of(librispeech, unit="s"), 600, tried, Costs())
    block = loaded(render(result))["dynamic_batch_sampler"]
    assert block.get("max_batch_ex") == most
    assert batches(sampler, librispeech, block) == recommended(result).batches


def test_lengths_in_other_units_keep_their_unit(sampler: Any, librispeech: np.ndarray) -> None:
    samples = np.round(librispeech * 16_000)
    chosen = SweepSettings(strategies=("optimal",), num_buckets=(10,))
    result = sweep(Lengths.of(samples, unit="samples"), 9_600_000, chosen, Costs())
    text = render(result)
    block = loaded(text)["dynamic_batch_sampler"]
    assert "length_func must return samples" in text
    assert block["max_batch_length"] == 9_600_000
    assert all(isinstance(boundary, int) for boundary in block["bucket_boundaries"])
    assert batches(sampler, samples, block) == recommended(result).batches


def test_the_block_has_the_recommended_table() -> None:
    block = loaded(render(made_sweep()))["dynamic_batch_sampler"]
    row = recommended(made_sweep())
    assert list(block["bucket_boundaries"]) == row.boundaries
    assert (block["max_batch_length"], block["shuffle"], block["batch_ordering"]) == (600, True, "random")
    assert "max_batch_ex" not in block


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(min_value=1e-7, max_value=1e18), min_size=1, max_size=12))
def test_numbers_survive_hyperpyyaml_exactly(values: list[float]) -> None:
    found = loaded(f"a: {{b: {flow_list(values)}, c: {number(values[0])}}}\n")["a"]
    assert (list(found["b"]), found["c"]) == (values, values[0])


# Pools, which SpeechBrain runs through batchtune's sampler: the lines for train.py in the block's last comment.

POOLED = np.random.default_rng(0).integers(1, 31, 300).astype(np.float64)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "sampler.yaml"


@pytest.fixture
def for_train_py(config: Path) -> list[str]:
    """The lines for train.py."""
    result = sweep(Lengths.of(POOLED, unit="s"), 60, SweepSettings(pool_sizes=(100,)), Costs())
    table = min((row for row in result.rows if row.pool_size is None), key=lambda row: row.batches)
    pools = next(index for index, row in enumerate(result.rows) if row.pool_size is not None)
    pooled = msgspec.structs.replace(result, recommended=pools, recommended_table=result.rows.index(table))
    config.write_text(render_sampler_yaml(sampler_config(pooled)), encoding="utf-8")
    text = EXPORT.render(Tuned(sweep=pooled, config=str(config)))
    assert list(loaded(text)["dynamic_batch_sampler"]["bucket_boundaries"]) == table.boundaries
    return [line[6:] for line in text[text.index("To run pools") :].splitlines() if line.startswith("#     ")]


def examples() -> dict[str, dict[str, float]]:
    return {f"utt{index}": {"duration": value, "number": index} for index, value in enumerate(POOLED.tolist())}


def test_speechbrains_loader_runs_the_pools(sampler: Any, config: Path, for_train_py: list[str]) -> None:
    _, dataset, dataloader, _ = load_speechbrain()
    names: dict[str, Any] = {"train_data": dataset.DynamicItemDataset(examples(), output_keys=["number"])}
    exec("\n".join(line for line in for_train_py if "asr_brain" not in line), names)
    loader = dataloader.make_dataloader(names["train_data"], batch_sampler=names["sampler"])
    expected = sampler_from_config(config, POOLED)
    for _ in range(2):
        seen = [batch.number.tolist() for batch in loader]
        assert seen == list(expected)
        assert len(seen) == len(loader)
        assert sorted(index for batch in seen for index in batch) == list(range(POOLED.size))


BRAIN = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
try:
    import torchaudio
except (ImportError, OSError):
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
import torch, speechbrain
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter

folder, stop = sys.argv[1], int(sys.argv[2])
train_data = speechbrain.dataio.dataset.DynamicItemDataset(json.load(sys.stdin), output_keys=["number"])
seen = []

class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        seen.append(batch.number.tolist())
        return self.modules.layer(batch.number[:, None] / 1e5)

    def compute_objectives(self, predictions, batch, stage):
        if len(seen) == stop:
            self.checkpointer.save_checkpoint(end_of_epoch=False)
            print(json.dumps(seen))
            sys.exit()
        return predictions.mean()

layer, counter = torch.nn.Linear(1, 1), EpochCounter(3)
asr_brain = Brain(
    {"layer": layer},
    opt_class=lambda parameters: torch.optim.SGD(parameters, 1e-3),
    checkpointer=Checkpointer(folder, {"layer": layer, "counter": counter}),
    run_opts={"device": "cpu"},
)
"""


@pytest.mark.slow
def test_speechbrains_brain_trains_and_resumes_on_the_pools(
    sampler: Any, config: Path, for_train_py: list[str], tmp_path: Path
) -> None:
    code = BRAIN + "\n".join(for_train_py).replace("asr_brain.fit(...", "asr_brain.fit(counter, train_data")
    code = code.replace('"num_workers": 4}', '"num_workers": 0}, progressbar=False') + "\nprint(json.dumps(seen))\n"

    def ran(stop: int) -> list[list[int]]:
        command = [sys.executable, "-c", code, str(tmp_path / "checkpoints"), str(stop)]
        done = subprocess.run(command, input=json.dumps(examples()), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]))

    expected = sampler_from_config(config, POOLED, epoch=1)  # SpeechBrain counts from 1
    batches = len(expected)
    first, resumed = ran(batches + 5), ran(-1)
    assert first + resumed == [*expected, *expected, *expected]
