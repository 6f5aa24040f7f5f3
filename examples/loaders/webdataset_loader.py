"""Tar shards of wavs → augmented log-mel spectrograms, by a WebDataset pipeline.

    python -m pip install webdataset
    python examples/loaders/make_audio.py --out audio
    target=examples/loaders/webdataset_loader.py:make_batches
    batchtune tune-loader $target --set shards=audio/shards --step-ms 50

The features are those of `torch_loader.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch_loader
import webdataset as wds
from torch_loader import augmented, log_mel


def make_batches(
    shards: str = "audio/shards", batch_size: int = 16, seed: int = 0
) -> wds.WebDataset:
    """Batches, as `DataLoader(..., batch_size=None)` takes them; workers in excess of the shards deliver nothing."""
    paths = sorted(map(str, Path(shards).glob("*.tar")))
    if not paths:
        raise FileNotFoundError(
            f"no shards in {shards}: python examples/loaders/make_audio.py makes some"
        )
    # Without `empty_check`, a worker without a shard is no error.
    source = wds.WebDataset(
        paths, shardshuffle=len(paths), detshuffle=True, seed=seed, empty_check=False
    )
    examples = source.decode(decoded).map_dict(wav=augmented).map_dict(wav=log_mel)
    return examples.batched(batch_size, collation_fn=padded)


def decoded(key: str, content: bytes) -> torch.Tensor | None:
    """As `decode` asks for it: None where a member is no wav."""
    return torch_loader.decoded(content) if key.endswith("wav") else None


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of the features."""
    return torch_loader.padded([sample["wav"] for sample in samples])
