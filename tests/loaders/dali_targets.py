"""What the tests of DALI loaders measure: functions and classes as users write them."""

from pathlib import Path

import nvidia.dali.experimental.dynamic as ndd


def reader_of(folder, files=None, **options):
    paths = sorted(map(str, Path(folder).glob("*.wav")))[:files]
    return ndd.readers.File(files=paths, labels=list(range(len(paths))), **options)


def log_mel(encoded, rng=None):
    samples, _ = ndd.decoders.audio(encoded, dtype=ndd.float32, downmix=True)
    loudness = ndd.random.uniform(
        batch_size=samples.batch_size, range=(0.5, 1.0), rng=rng
    )
    power = ndd.spectrogram(
        samples * loudness, nfft=64, window_length=64, window_step=32
    )
    return ndd.to_decibels(
        ndd.mel_filter_bank(power, nfilter=8, sample_rate=1000.0), cutoff_db=-80
    )


def mels(
    folder,
    batch_size=4,
    shard_id=0,
    num_shards=1,
    rng=None,
    seed=0,
):
    reader = reader_of(
        folder,
        random_shuffle=True,
        initial_fill=8,
        shard_id=shard_id,
        num_shards=num_shards,
        stick_to_shard=True,
        seed=seed,
    )
    for encoded, labels in reader.next_epoch(batch_size=batch_size):
        yield {"mel": log_mel(encoded, rng), "label": labels}


class Labels:
    """Only reads, and keeps its reader."""

    def __init__(
        self,
        folder,
        batch_size,
        files,
        shard_id,
        num_shards,
        stick,
        pad,
    ):
        self.batch_size = batch_size
        self.reader = reader_of(
            folder,
            files,
            shard_id=shard_id,
            num_shards=num_shards,
            stick_to_shard=stick,
            pad_last_batch=pad,
        )

    def __iter__(self):
        for _, labels in self.reader.next_epoch(batch_size=self.batch_size):
            yield labels


def fails(folder, shard_id=0, num_shards=1):
    reader = reader_of(folder, shard_id=shard_id, num_shards=num_shards)
    for number, (encoded, _) in enumerate(reader.next_epoch(batch_size=2)):
        mel = log_mel(encoded)
        if number == 1 and shard_id == num_shards - 1:
            mel = ndd.slice(mel, start=[999], shape=[5], axes=[1])  # out of bounds
        yield mel


def decodes(folder):
    """Decodes what is no audio."""
    for encoded, _ in reader_of(folder).next_epoch(batch_size=2):
        yield log_mel(encoded).torch(pad=True)


def a_number():
    return 7


def where(folder, device="cpu", shard_id=0, num_shards=1):
    """On the GPU, if it is asked for; with the stream that the operators run on."""
    reader = reader_of(
        folder, shard_id=shard_id, num_shards=num_shards, stick_to_shard=True
    )
    for encoded, _ in reader.next_epoch(batch_size=4):
        samples, _ = ndd.decoders.audio(encoded, dtype=ndd.float32, downmix=True)
        samples = samples.gpu() if device == "gpu" else samples
        stream = ndd.get_current_stream()
        yield {
            "power": ndd.spectrogram(
                samples, nfft=64, window_length=64, window_step=32
            ),
            "stream": stream and stream.handle,
        }
