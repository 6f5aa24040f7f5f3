"""Wavs → augmented log-mel spectrograms, by NVIDIA DALI's dynamic mode, on the CPU or on the GPU.

    python -m pip install nvidia-dali-cuda120
    python examples/loaders/make_audio.py --out audio
    batchtune tune-loader examples/loaders/dali_loader.py:make_batches --set folder=audio/wavs --step-ms 50

The batches are those of `torch_loader.py`, other random numbers apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nvidia.dali.experimental.dynamic as ndd
import torch

SAMPLE_RATE = 16_000
WINDOW = 400  # samples: 25 ms
FFT = 512
HOP = 160  # 10 ms
MELS = 80
FLOOR_DB = -100.0
EPSILON = 1e-5  # added to a variance before it divides
GAINS_DB = (-6.0, 6.0)
NOISE = 0.005


def make_batches(
    folder: str = "audio/wavs",
    batch_size: int = 16,
    *,
    shard_id: int = 0,
    num_shards: int = 1,
    seed: int = 0,
    rng: ndd.random.RNG | None = None,
    device: str = "cpu",
) -> Batches:
    """Batches of this shard of the wavs in a folder.

    Each thread that reads has a shard and random numbers of its own. The seed of the shuffling is the same for all.
    """
    paths = sorted(map(str, Path(folder).glob("*.wav")))
    if not paths:
        raise FileNotFoundError(
            f"no wavs in {folder}: python examples/loaders/make_audio.py makes some"
        )
    reader = ndd.readers.File(
        files=paths,
        random_shuffle=True,
        seed=seed,
        shard_id=shard_id,
        num_shards=num_shards,
        stick_to_shard=True,
    )
    return Batches(reader, batch_size, rng, device)


class Batches:
    """The batches of a reader: it is kept, since one that is made for each epoch would shuffle them all alike."""

    def __init__(
        self,
        reader: ndd.readers.File,
        batch_size: int,
        rng: ndd.random.RNG | None,
        device: str,
    ) -> None:
        self.reader, self.batch_size, self.rng, self.device = (
            reader,
            batch_size,
            rng,
            device,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """One epoch. The last batch is filled up with the first clips of the next one."""
        for encoded, _ in self.reader.next_epoch(batch_size=self.batch_size):
            samples, _ = ndd.decoders.audio(
                encoded, dtype=ndd.float32, downmix=True, sample_rate=SAMPLE_RATE
            )
            if self.device == "gpu":
                samples = samples.gpu()
            yield padded(log_mel(augmented(samples, self.rng)))


def augmented(samples: ndd.Batch, rng: ndd.random.RNG | None) -> ndd.Batch:
    """Louder or quieter, and noise."""
    decibels = ndd.random.uniform(
        batch_size=samples.batch_size,
        range=GAINS_DB,
        rng=rng,
        device=samples.device.device_type,
    )
    return ndd.noise.gaussian(
        samples * 10.0 ** (decibels / 20.0), stddev=NOISE, rng=rng
    )


def log_mel(samples: ndd.Batch) -> ndd.Batch:
    """Frames × mels in dB, each mel with mean 0 and variance 1 over the clip."""
    power = ndd.spectrogram(
        samples,
        nfft=FFT,
        window_length=WINDOW,
        window_step=HOP,
        window_fn=torch.hann_window(WINDOW).tolist(),
    )
    mels = ndd.mel_filter_bank(power, nfilter=MELS, sample_rate=float(SAMPLE_RATE))
    decibels = ndd.to_decibels(mels, multiplier=10.0, reference=1.0, cutoff_db=FLOOR_DB)
    return ndd.transpose(
        ndd.normalize(decibels, axes=[1], epsilon=EPSILON), perm=[1, 0]
    )


def padded(features: ndd.Batch) -> dict[str, torch.Tensor]:
    """A batch: clips × frames × mels, and the frames of each clip that are no padding."""
    frames = torch.tensor([frames for frames, _ in features.shape])
    return {"log_mel": features.torch(pad=True), "frames": frames}
