"""The stages of making a batch: named as the user knows them, each with its own time."""

from __future__ import annotations

import gc
import io
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchtune.errors import LoaderError
from batchtune.loaders.stages import measure_stages

# WebDataset closes no shard.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Examples = list[dict[str, Any]]


def augment(sample: dict[str, Any], seconds: float = 0.003) -> dict[str, Any]:
    time.sleep(seconds)
    return sample


def slow_text(text: str) -> str:
    time.sleep(0.001)
    return text


def pad(examples: Examples) -> Examples:
    time.sleep(0.008)
    return examples


def broken(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"no such speaker in {sample['__key__']}")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two shards of 20 texts."""
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"{number}.tar" for number in range(2)]
    for path in paths:
        with tarfile.open(path, "w") as tar:
            for number in range(20):
                member = tarfile.TarInfo(f"{path.stem}{number:03}.txt")
                member.size = 5
                tar.addfile(member, io.BytesIO(b"words"))
    return [str(path) for path in paths]


@pytest.fixture
def wds() -> Iterator[Any]:
    yield pytest.importorskip("webdataset")
    gc.collect()  # files that it left open, while that is no error


def measured(
    dataset: Any, arguments: dict[str, Any], seconds: float = 0.1
) -> dict[str, float]:
    """Milliseconds per example of each stage."""
    stages = measure_stages(
        DataLoader(dataset, **arguments) if arguments else dataset, seconds
    )
    assert sum(stage.share for stage in stages) == pytest.approx(1)
    return {stage.name: 1000 * stage.seconds_per_example for stage in stages}


def test_stages_of_a_pipeline_have_names_and_costs(wds: Any, shards: list[str]) -> None:
    source = (
        wds.WebDataset(shards, shardshuffle=2, detshuffle=True).shuffle(10).decode()
    )
    pipeline = (
        source.map(augment)
        .rename(words="txt")
        .map_dict(words=slow_text)
        .batched(4, collation_fn=pad)
    )
    found = measured(
        pipeline,
        {"batch_size": None, "num_workers": 2, "prefetch_factor": 4},
        seconds=0.3,
    )
    assert list(found)[-7:] == [
        "check_empty",
        "shuffle",
        "Decoder",
        "augment",
        "rename",
        "slow_text",
        "pad",
    ]
    assert 3 <= found["augment"] < 12
    assert 1 <= found["slow_text"] < 4
    assert 2 <= found["pad"] < 8


def test_the_users_pipeline_stays_as_it_was(wds: Any, shards: list[str]) -> None:
    pipeline = wds.WebDataset(shards, shardshuffle=2, detshuffle=True, seed=3).batched(
        10, collation_fn=list
    )
    stages = list(pipeline.pipeline)
    measured(pipeline, {"batch_size": None}, seconds=0.02)
    assert pipeline.pipeline == stages
    fresh = wds.WebDataset(shards, shardshuffle=2, detshuffle=True, seed=3).batched(
        10, collation_fn=list
    )
    keys = [
        [[sample["__key__"] for sample in batch] for batch in epoch]
        for epoch in (pipeline, fresh)
    ]
    assert keys[0] == keys[1]


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.ones(3)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.ones(3) for _ in range(10))


@pytest.mark.parametrize(
    ("dataset", "arguments", "names"),
    [
        (
            Slow(),
            {"batch_size": 4, "shuffle": True, "collate_fn": pad},
            ["Slow.__getitem__", "collate (pad)"],
        ),
        (Slow(), {"batch_size": None}, ["Slow.__getitem__"]),
        (
            Stream(),
            {"batch_size": 4, "collate_fn": pad, "drop_last": True},
            ["Stream.__iter__", "collate (pad)"],
        ),
        (Stream(), {"batch_size": None}, ["Stream.__iter__"]),
        ([torch.ones(2)] * 5, {}, ["list.__iter__"]),
    ],
)
def test_other_loaders_show_the_stages_that_torch_knows(
    dataset: Any, arguments: dict[str, Any], names: list[str]
) -> None:
    assert list(measured(dataset, arguments, seconds=0.02)) == names


def test_an_error_names_its_stage(wds: Any, shards: list[str]) -> None:
    source = wds.WebDataset(shards, shardshuffle=False)
    with pytest.raises(
        LoaderError, match=r"stage broken: ValueError: no such speaker in 0000"
    ) as raised:
        measure_stages(source.map(broken).batched(2), 0.1)
    assert 'raise ValueError(f"no such speaker' in str(raised.value.traceback)
    with pytest.raises(LoaderError, match="no batch"):
        measure_stages(source.select(lambda sample: False), 0.1)
