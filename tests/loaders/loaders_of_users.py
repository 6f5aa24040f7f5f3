"""Data sets and loaders as users write them, good and bad. Example i is a clip of 100 + i samples, all of them i."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

COUNT = 40


class Clips(Dataset[torch.Tensor]):
    """`bad` is the index of a clip that does `what`: raises, or gets its worker a signal."""

    def __init__(self, count: int = COUNT, bad: int = -1, what: str = "") -> None:
        self.count, self.bad, self.what = count, bad, what

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            match self.what:
                case "memory":
                    raise MemoryError("no room for a clip")
                case "device memory":
                    raise RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB")
                case "file":
                    open("CUDA out of memory.txt").close()  # CUDA out of memory
                case "exit":
                    os._exit(3)
                case "hang":
                    time.sleep(1000)
                case "":
                    raise ValueError("no such clip")
                case name:
                    os.kill(os.getpid(), getattr(signal, name))
        return torch.full((100 + index,), float(index))


def pad(clips: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(clip) for clip in clips])
    return {
        "wav": torch.nn.utils.rnn.pad_sequence(clips, batch_first=True),
        "lengths": lengths,
    }


def arguments(
    bad: int = -1, what: str = "", count: int = COUNT, drop_last: bool = False
) -> dict[str, Any]:
    made = Clips(count, bad, what)
    return {
        "dataset": made,
        "batch_size": 8,
        "shuffle": True,
        "drop_last": drop_last,
        "collate_fn": pad,
        "timeout": 30,
    }


def with_lengths(batch_size: int | None = None, count: int = COUNT) -> dict[str, Any]:
    lengths = [(100 + index) / 10 for index in range(count)]
    return {
        "dataset": Clips(),
        "lengths": lengths,
        "collate_fn": pad,
        "batch_size": batch_size,
    }


def with_lock() -> dict[str, Any]:
    clips = Clips()
    clips.lock = threading.Lock()  # type: ignore[attr-defined]
    return {"dataset": clips, "collate_fn": pad}


def half_of(clips: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return pad(clips[::2])


def thinned() -> dict[str, Any]:
    return {"dataset": Clips(), "batch_size": 8, "collate_fn": half_of}


def without_data() -> dict[str, Any]:
    return {"batch_size": 4}


def misspelt() -> dict[str, Any]:
    return {"dataset": Clips(), "batch_sise": 4}


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(6):
            yield torch.ones(3, 50 + number)


class FolderLoader(DataLoader[torch.Tensor]):
    def __init__(self, folder: str) -> None:
        super().__init__(Clips(), batch_size=4, collate_fn=pad)


def own_class() -> DataLoader[torch.Tensor]:
    return FolderLoader("clips")


def generator() -> Iterator[torch.Tensor]:
    for number in range(5):
        yield torch.ones(3, 7 + number)


class Endless(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


def number() -> int:
    return 3


def missing_dali() -> None:
    import nvidia.dali_that_is_not_there  # noqa: F401


def web_loader(folder: str, num_workers: int, prefetch_factor: int | None) -> Any:
    import webdataset as wds  # slow to import: only where it is used

    names = [f"{folder}/{number}.tar" for number in range(2)]
    for number, name in enumerate(names):
        with wds.TarWriter(name) as writer:
            for index in range(10):
                writer.write(
                    {
                        "__key__": f"{number}{index:03d}",
                        "clip.npy": Clips()[index].numpy(),
                    }
                )
    clips = wds.WebDataset(names, shardshuffle=False).decode().to_tuple("clip.npy")
    batches = clips.batched(
        5, collation_fn=lambda made: pad([torch.as_tensor(clip) for (clip,) in made])
    )
    return wds.WebLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
    )
