"""Data sets and loaders as users write them, good and bad. Example i is a clip of 100 + i samples, all of them i."""

import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

COUNT = 40


class Clips(Dataset[torch.Tensor]):
    """`bad` is the index of a clip that does `what`: raises an error, or hangs."""

    def __init__(self, count=COUNT, bad=-1, what=""):
        self.count, self.bad, self.what = count, bad, what

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            match self.what:
                case "memory":
                    raise MemoryError("no room for a clip")
                case "device memory":
                    raise RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB")
                case "file":
                    open("CUDA out of memory.txt").close()  # CUDA out of memory
                case "hang":
                    time.sleep(1000)
                case _:
                    raise ValueError("no such clip")
        return torch.full((100 + index,), float(index))


def pad(clips):
    lengths = torch.tensor([len(clip) for clip in clips])
    return {
        "wav": torch.nn.utils.rnn.pad_sequence(clips, batch_first=True),
        "lengths": lengths,
    }


def arguments(bad=-1, what="", count=COUNT, drop_last=False):
    made = Clips(count, bad, what)
    return {
        "dataset": made,
        "batch_size": 8,
        "shuffle": True,
        "drop_last": drop_last,
        "collate_fn": pad,
        "timeout": 30,
    }


def with_lengths(batch_size=None, count=COUNT):
    lengths = [(100 + index) / 10 for index in range(count)]
    return {
        "dataset": Clips(),
        "lengths": lengths,
        "collate_fn": pad,
        "batch_size": batch_size,
    }


def with_lock():
    clips = Clips()
    clips.lock = threading.Lock()
    return {"dataset": clips, "collate_fn": pad}


def half_of(clips):
    return pad(clips[::2])


def thinned():
    return {"dataset": Clips(), "batch_size": 8, "collate_fn": half_of}


def without_data():
    return {"batch_size": 4}


def misspelt():
    return {"dataset": Clips(), "batch_sise": 4}


class Batches(IterableDataset[torch.Tensor]):
    def __iter__(self):
        for number in range(6):
            yield torch.ones(3, 50 + number)


class FolderLoader(DataLoader[torch.Tensor]):
    def __init__(self, folder):
        super().__init__(Clips(), batch_size=4, collate_fn=pad)


def own_class():
    return FolderLoader("clips")


def generator():
    for number in range(5):
        yield torch.ones(3, 7 + number)


class Endless(Dataset[torch.Tensor]):
    def __getitem__(self, index):
        return torch.ones(3)


def number():
    return 3


def missing_dali():
    import nvidia.dali_that_is_not_there  # noqa: F401


def web_loader(folder, num_workers, prefetch_factor):
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
