"""Real manifests give the numbers that are known of them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths

_RATE = Fraction(1, 16000)
_DERIVED = "derived-librispeech-formats"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("librispeech-wav2vec-tsv/train.tsv", {"length_scale": _RATE}, (28539, 1.41, 24.525, "s")),
        ("librispeech-wav2vec-tsv/valid.tsv", {"length_scale": _RATE}, (2703, 1.445, 32.645, "s")),
        ("librispeech-wav2vec-tsv/train.tsv", {}, (28539, 22560, 392400, "samples")),
        ("nemo-manifest-librispeech/train_manifest.json", {}, (567, 2.19, 16.91, "s")),
        ("commonvoice-id/clip_durations.tsv.gz", {}, (58741, 1116, 15156, "ms")),
        ("commonvoice-id/clip_durations.tsv.gz", {"unit": "s"}, (58741, 1.116, 15.156, "s")),
        ("code-file-lengths/code_file_lengths.tsv.gz", {"skip_invalid": True}, (13601, 1, 960976, "bytes")),
        ("mooncake-fast25/conversation_trace.jsonl.gz", {}, (12031, 891, 126195, "tokens")),
        ("mooncake-fast25/synthetic_trace.jsonl.gz", {}, (3993, 13, 191378, "tokens")),
        ("speechbrain-samples/ASR_train.json", {"length_key": "length"}, (8, 1.76, 3.15, "s")),
        ("speechbrain-samples/ASR_train.json", {"length_key": "duration"}, (8, 1.76, 3.15, "s")),
        ("speechbrain-samples/ASR_train.csv", {}, (2, 2.87, 3.15, "s")),
        ("speechbrain-samples/ASR_test_librispeech_clean.csv", {}, (16, 2.02, 7.405, "s")),
        ("speechbrain-samples/dev-clean.csv", {}, (99, 1.775, 19.915, "s")),
        ("speechbrain-samples/Diarization_train.json", {}, (4, 1.02, 2.87, "s")),
        ("lhotse-fixtures/mini_librispeech/utt2dur", {}, (38, 2.26, 19.89, "s")),
        ("lhotse-fixtures/mini_librispeech/utt2num_frames", {}, (38, 224, 1987, "frames")),
    ],
)
def test_count_ends_and_unit(data, name: str, options: dict[str, object], expected: tuple[object, ...]) -> None:
    lengths = load_lengths(data(name), ReadOptions(**options))  # type: ignore[arg-type]
    assert (lengths.count, lengths.shortest, lengths.longest, lengths.unit) == expected


@pytest.mark.parametrize(
    ("name", "longest", "longest_target"),
    [
        ("sharegpt-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", 8141, 1024),
        ("vidur-traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", 4054, None),
    ],
)
def test_prefill_and_decode_are_length_and_target(data, name: str, longest: int, longest_target: int | None) -> None:
    options = ReadOptions(length_key="num_prefill_tokens", target_key="num_decode_tokens")
    lengths = load_lengths(data(name), options)
    assert lengths.longest == longest
    assert longest_target is None or lengths.targets.max() == longest_target


def test_librispeech_has_the_total_that_its_batch_bound_comes_from(data) -> None:
    lengths = load_lengths(data("librispeech-wav2vec-tsv/train.tsv"), ReadOptions(length_scale=_RATE))
    assert int(np.ceil(lengths.total / 600)) == 604


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (f"{_DERIVED}/nemo_manifest.jsonl.gz", ReadOptions()),
        (f"{_DERIVED}/speechbrain.csv.gz", ReadOptions()),
        (f"{_DERIVED}/espnet/utt2num_samples.gz", ReadOptions(length_scale=_RATE)),
        (f"{_DERIVED}/espnet/speech_shape.gz", ReadOptions(length_scale=_RATE, unit="s")),
    ],
)
def test_the_same_lengths_have_one_fingerprint_in_every_format(data, name: str, options: ReadOptions) -> None:
    original = load_lengths(data("librispeech-wav2vec-tsv/train.tsv"), ReadOptions(length_scale=_RATE))
    assert load_lengths(data(name), options).fingerprint == original.fingerprint


def test_kaldis_six_digits_are_the_same_lengths_but_for_their_rounding(data) -> None:
    original = load_lengths(data(f"{_DERIVED}/nemo_manifest.jsonl.gz"))
    rounded = load_lengths(data(f"{_DERIVED}/kaldi/utt2dur.gz"))
    assert np.abs(original.values - rounded.values).max() < 5e-5


def test_code_files_have_247_of_length_zero(data) -> None:
    lengths = load_lengths(data("code-file-lengths/code_file_lengths.tsv.gz"), ReadOptions(skip_invalid=True))
    assert lengths.left_out == {"invalid length (zero)": 247}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("code-file-lengths/code_file_lengths.tsv.gz", "247 of 13,848 rows are invalid"),
        ("commonvoice-id/train.tsv.gz", "up_votes \\(numeric\\)"),
        ("sharegpt-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", "3 columns that may hold"),
        ("speechbrain-samples/ASR_dev.json", "2 columns that may hold"),
        ("librispeechmix-jsonl/dev-clean-2mix.jsonl.gz", "\\[5.855, 10.43\\] \\(a list\\)"),
        ("gsm8k-parquet/test.parquet", "it is a Parquet file"),
    ],
)
def test_what_can_not_be_read_says_why(data, name: str, message: str) -> None:
    path: Path = data(name)
    with pytest.raises(ManifestError, match=message):
        load_lengths(path)
