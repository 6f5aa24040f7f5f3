"""Tunes the batches of a stream of tar shards, and reads it: SpeechBrain's function and batchtune's own stage.

    python -m pip install webdataset speechbrain torchaudio
    python examples/streams/read_stream.py

It writes shards of noise, most of it 10 to 16 s long, as read speech is; `batchtune sweep-stream` simulates how two
workers batch them; then two workers of a DataLoader read them with the settings that it recommends. Predicted and real
figures are printed next to each other. Without SpeechBrain its part is skipped.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import wave
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from batchtune import BucketedStream

try:
    import webdataset as wds
except ModuleNotFoundError:
    sys.exit("This example needs webdataset: python -m pip install webdataset")

SAMPLE_RATE = 1_000  # low, so that shards are small
SHARD_SIZE = 50  # utterances
# Of real data: what `batchtune probe-oom` measures.
MAX_BATCH_LENGTH = 120 * SAMPLE_RATE
BUFFER_SIZE = 128  # utterances that each worker holds
SEED = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes, tunes, reads and compares."""
    parser = argparse.ArgumentParser(
        description="Tunes the batches of a stream of tar shards, and reads it."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("stream-example"),
        help="folder of the shards and of the run",
    )
    parser.add_argument("--utterances", type=int, default=1_200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    shards = write_shards(options.out / "shards", options.utterances)
    stream = sweep(shards, options.workers, options.out / "run")

    print(f"\n{'':25}{'batches':>8}{'padding':>9}{'mean size':>11}{'largest':>9}")
    speechbrain = stream["rows"][stream["recommended_speechbrain"]]
    show("SpeechBrain, predicted", **speechbrain)
    # From which each worker's `random` is seeded, which SpeechBrain draws from.
    torch.manual_seed(SEED)
    try:
        loader = speechbrain_loader(shards, speechbrain, options.workers)
    except (ImportError, OSError) as error:
        print(f"SpeechBrain, skipped:    {error}")
    else:
        show(
            "SpeechBrain, read", **figures((batch.id, batch.signal) for batch in loader)
        )
        # As you train: an epoch of the same number of batches on each rank, which goes on where the last one ended.
        nominal = speechbrain["batches"]  # / ranks
        loader = speechbrain_loader(
            shards, speechbrain, options.workers, looped_nominal_epoch=nominal
        )
        print(f"{'- as a nominal epoch':25}{sum(1 for _ in loader):>8}")

    show("BucketedStream, predicted", **stream["rows"][stream["recommended"]])
    own = own_loader(shards, options.out / "run" / "stream.yaml", options.workers)
    show("BucketedStream, read", **figures(own))


def write_shards(folder: Path, utterances: int) -> str:
    """Writes noise of the lengths of read speech, in random order, and returns the pattern of the shards' names."""
    chance = random.Random(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(
        str(folder / "train-%03d.tar"), maxcount=SHARD_SIZE, verbose=0
    ) as writer:
        for number in range(utterances):
            seconds = 1.4 + 15 * chance.betavariate(4, 1)
            writer.write(
                {
                    "__key__": f"utterance{number:06}",
                    "wav": noise(chance, round(seconds * SAMPLE_RATE)),
                }
            )
    return str(folder / f"train-{{000..{(utterances - 1) // SHARD_SIZE:03}}}.tar")


def noise(chance: random.Random, samples: int) -> bytes:
    """A wav file of one channel with 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(chance.randbytes(2 * samples))
    return file.getvalue()


def sweep(shards: str, workers: int, run: Path) -> dict[str, Any]:
    """Runs `batchtune sweep-stream`, which reads the headers of the wavs, and returns what it writes."""
    command = [
        "batchtune",
        "sweep-stream",
        shards,
        "--length-key",
        "wav.num_samples",
        "--run",
        str(run),
        "--force",
    ]
    command += [
        "--max-batch-length",
        str(MAX_BATCH_LENGTH),
        "--buffer-size",
        str(BUFFER_SIZE),
    ]
    # The utterances are stored in random order: without a shuffle of samples, the shards' suffices.
    command += ["--workers", str(workers), "--shuffle-buffer", "0", "--seed", str(SEED)]
    print(*command, flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)
    stream: dict[str, Any] = json.loads((run / "stream.json").read_text())
    return stream


def utterances(shards: str) -> Any:
    """The part of the shards that each worker reads, reshuffled in each epoch."""
    return wds.WebDataset(shards, shardshuffle=100, detshuffle=True, seed=SEED).map(
        decoded
    )


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """An utterance as the training takes it."""
    with wave.open(io.BytesIO(sample["wav"])) as audio:
        signal = torch.frombuffer(
            bytearray(audio.readframes(audio.getnframes())), dtype=torch.int16
        )
    return {"id": sample["__key__"], "signal": signal / 2**15}


def speechbrain_loader(
    shards: str, row: dict[str, Any], workers: int, **options: Any
) -> Any:
    """SpeechBrain's own batches of a stream, with the parameters of the sweep."""
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import make_dataloader
    from speechbrain.dataio.iterators import dynamic_bucketed_batch

    names = (
        "target_batch_numel",
        "max_batch_numel",
        "max_batch_size",
        "max_padding_ratio",
    )
    batches = partial(
        dynamic_bucketed_batch,
        len_key="signal",
        buffersize=row["buffer_size"],
        sampler_kwargs={name: row[name] for name in names},
        collate_fn=PaddedBatch,
    )
    return make_dataloader(
        utterances(shards).compose(batches), **loader_options(workers), **options
    )


def own_loader(shards: str, config: Path, workers: int) -> Any:
    """Batches of the stage that the sweep recommends."""
    stage = BucketedStream.from_config(config, length_of=samples_of, collate_fn=padded)
    return DataLoader(utterances(shards).compose(stage), **loader_options(workers))


def loader_options(workers: int) -> dict[str, Any]:
    """The pipeline makes the batches. Workers persist: new ones would count epochs, and so shuffle, from 0 again."""
    return {
        "batch_size": None,
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }


def samples_of(utterance: dict[str, Any]) -> int:
    """The length of an utterance, in the unit that was tuned with."""
    return len(utterance["signal"])


def padded(
    examples: list[dict[str, Any]],
) -> tuple[list[str], tuple[torch.Tensor, torch.Tensor]]:
    """Names, and signals with the part of each that is no padding: as SpeechBrain's PaddedBatch has them."""
    signals = torch.nn.utils.rnn.pad_sequence(
        [example["signal"] for example in examples], batch_first=True
    )
    lengths = torch.tensor([samples_of(example) for example in examples])
    return [example["id"] for example in examples], (
        signals,
        lengths / signals.shape[1],
    )


def figures(batches: Iterable[tuple[list[str], Any]]) -> dict[str, Any]:
    """What the sweep predicts, of real batches; and the names in each."""
    names, cells, true = [], 0, 0.0
    for of_batch, (signals, parts) in batches:
        names.append(of_batch)
        cells += signals.numel()
        true += float(parts.double().sum()) * signals.shape[1]
    sizes = [len(of_batch) for of_batch in names]
    return {
        "batches": len(sizes),
        "padding_ratio": 1 - true / cells,
        "mean_batch_size": sum(sizes) / len(sizes),
        "largest_batch_size": max(sizes),
        "padded_length": cells,
        "names": names,
    }


def show(name: str, **row: Any) -> None:
    """Prints a line."""
    padding, mean = row["padding_ratio"], row["mean_batch_size"]
    print(
        f"{name:25}{row['batches']:>8}{padding:>9.1%}{mean:>11.2f}{row['largest_batch_size']:>9}",
        flush=True,
    )


if __name__ == "__main__":
    main()
