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


# Of every file: what must be said of it, then count, min, max, total (to a thousandth) and unit.
READ: dict[str, tuple[dict[str, object], tuple[int, float, float, float, str | None]]] = {
    "code-file-lengths/code_file_lengths.tsv.gz": (
        {"skip_invalid": True},
        (13601, 1, 960976, 117495591, "bytes"),
    ),
    "commonvoice-id/clip_durations.tsv.gz": ({}, (58741, 1116, 15156, 234762780, "ms")),
    f"{_DERIVED}/espnet/speech_shape.gz": ({}, (28539, 22560, 392400, 5794034668, None)),
    f"{_DERIVED}/espnet/speech_shape_fbank80.gz": ({}, (28539, 139, 2451, 36162482, "frames")),
    f"{_DERIVED}/espnet/utt2num_samples.gz": ({}, (28539, 22560, 392400, 5794034668, "samples")),
    f"{_DERIVED}/kaldi/utt2dur.gz": ({}, (28539, 1.41, 24.525, 362127.168, "s")),
    f"{_DERIVED}/lengths.parquet": ({}, (28539, 22560, 392400, 5794034668, "samples")),
    f"{_DERIVED}/lhotse_cuts.jsonl.gz": ({}, (28539, 1.41, 24.525, 362127.167, "s")),
    f"{_DERIVED}/nemo_manifest.jsonl.gz": ({}, (28539, 1.41, 24.525, 362127.167, "s")),
    f"{_DERIVED}/speechbrain.csv.gz": ({}, (28539, 1.41, 24.525, 362127.167, "s")),
    "gsm8k-parquet/test.parquet": (
        {"length_key": "extra_info.question"},
        (1319, 73, 848, 316390, "characters"),
    ),
    "gsm8k-parquet/test.parquet#prompt": (
        {"length_key": "prompt[0].content"},
        (1319, 73, 848, 316390, "characters"),
    ),
    "lhotse-fixtures/ami/cuts.json": ({}, (1, 6, 6, 6, "s")),
    "lhotse-fixtures/libri/cuts.json": ({}, (1, 10, 10, 10, "s")),
    "lhotse-fixtures/libri/cuts_multi.json": ({}, (1, 10, 10, 10, "s")),
    "lhotse-fixtures/libri/cuts_no_feats.json": ({}, (1, 10, 10, 10, "s")),
    "lhotse-fixtures/libri/cuts_no_recording.json": ({}, (1, 10, 10, 10, "s")),
    "lhotse-fixtures/ljspeech/cuts.json": ({}, (2, 1.5396371882086168, 1.5976870748299319, 3.137, "s")),
    "lhotse-fixtures/lsmix/cuts.000000.jsonl.gz": ({}, (2, 9.8545, 22.3800625, 32.235, "s")),
    "lhotse-fixtures/mini_librispeech": ({}, (38, 2.26, 19.89, 299.01, "s")),
    "lhotse-fixtures/mini_librispeech/reco2dur": ({}, (38, 2.259999990463257, 19.889999389648438, 299.01, "s")),
    "lhotse-fixtures/mini_librispeech/segments": ({}, (38, 2.26, 19.89, 299.01, "s")),
    "lhotse-fixtures/mini_librispeech/utt2dur": ({}, (38, 2.26, 19.89, 299.01, "s")),
    "lhotse-fixtures/mini_librispeech/utt2num_frames": ({}, (38, 224, 1987, 29832, "frames")),
    "lhotse-fixtures/mini_librispeech2/reco2dur": ({}, (3, 6.949999809265137, 19.889999389648438, 36.55, "s")),
    "lhotse-fixtures/mini_librispeech2/segments": ({}, (3, 6.95, 19.89, 36.55, "s")),
    "lhotse-fixtures/mini_librispeech2/utt2dur": ({}, (3, 6.95, 19.89, 36.55, "s")),
    "lhotse-fixtures/mini_librispeech2/utt2num_frames": ({}, (3, 693, 1987, 3649, "frames")),
    "librispeech-wav2vec-tsv/train.tsv": ({"length_scale": _RATE}, (28539, 1.41, 24.525, 362127.167, "s")),
    "librispeech-wav2vec-tsv/valid.tsv": ({"length_scale": _RATE}, (2703, 1.445, 32.645, 19396.121, "s")),
    "librispeech-wav2vec-tsv/valid.ltr": (
        {"format": "text", "measure": "words"},
        (2703, 4, 517, 291159, "words"),
    ),
    "librispeechmix-jsonl/dev-clean-2mix.jsonl.gz": ({}, (2703, 2.34, 41.1012076829463, 30971.348, "s")),
    "librispeechmix-jsonl/dev-clean-3mix.jsonl.gz": ({}, (2703, 3.77, 54.559328285225114, 42378.484, "s")),
    "mooncake-fast25/conversation_trace.jsonl.gz": ({}, (12031, 891, 126195, 144793823, "tokens")),
    "mooncake-fast25/synthetic_trace.jsonl.gz": ({}, (3993, 13, 191378, 61194628, "tokens")),
    "nemo-manifest-librispeech/train_manifest.json": ({}, (567, 2.19, 16.91, 7188.41, "s")),
    "sharegpt-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv": (
        {"length_key": "num_prefill_tokens"},
        (30731, 1, 8141, 71911571, "tokens"),
    ),
    "speechbrain-samples/ASR_dev.json": ({"length_key": "duration"}, (2, 1.98, 2.6, 4.58, "s")),
    "speechbrain-samples/ASR_test_librispeech_clean.csv": ({}, (16, 2.02, 7.405, 70.69, "s")),
    "speechbrain-samples/ASR_train.csv": ({}, (2, 2.87, 3.15, 6.02, "s")),
    "speechbrain-samples/ASR_train.json": ({"length_key": "length"}, (8, 1.76, 3.15, 18.96, "s")),
    "speechbrain-samples/ASR_train_39p.json": ({"length_key": "duration"}, (8, 1.76, 3.15, 18.96, "s")),
    "speechbrain-samples/Diarization_train.json": ({}, (4, 1.02, 2.87, 7.93, "s")),
    "speechbrain-samples/TTS_train.json": ({}, (1, 7.58, 7.58, 7.58, "s")),
    "speechbrain-samples/dev-clean.csv": ({}, (99, 1.775, 19.915, 824.805, "s")),
    "vidur-traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": (
        {"length_key": "num_prefill_tokens"},
        (28257, 1, 4054, 73131321, "tokens"),
    ),
}

# What is no manifest, or not without a word of the user's, and what is said of it.
_LHOTSE = "lhotse-fixtures/mini_librispeech"
REFUSED = {
    "code-file-lengths/code_file_lengths.tsv.gz": "247 of 13,848 rows are invalid",
    "commonvoice-id/dev.tsv.gz": "no column that is known to hold lengths",
    "commonvoice-id/test.tsv.gz": "no column that is known to hold lengths",
    "commonvoice-id/train.tsv.gz": r"no column that is known to hold lengths.* up_votes \(numeric\)",
    "gsm8k-parquet/test.parquet": r"no column that is known to hold lengths.* extra_info\.question",
    "lhotse-fixtures/ami/ES2011a_sups.jsonl.gz": "holds Lhotse's supervisions, no cuts",
    f"{_LHOTSE}/lhotse/recordings.jsonl.gz": "holds Lhotse's recordings, no cuts",
    f"{_LHOTSE}/lhotse/supervisions.jsonl.gz": "holds Lhotse's supervisions, no cuts",
    f"{_LHOTSE}/lhotse-b/recordings.jsonl.gz": "holds Lhotse's recordings, no cuts",
    f"{_LHOTSE}/lhotse-b/supervisions.jsonl.gz": "holds Lhotse's supervisions, no cuts",
    f"{_LHOTSE}2/lhotse/recordings.jsonl.gz": "holds Lhotse's recordings, no cuts",
    f"{_LHOTSE}2/lhotse/supervisions.jsonl.gz": "holds Lhotse's supervisions, no cuts",
    f"{_LHOTSE}2/lhotse/features.jsonl.gz": "holds Lhotse's features, no cuts",
    f"{_LHOTSE}/text": "fits no known manifest format",
    f"{_LHOTSE}/utt2spk": "fits no known manifest format",
    f"{_LHOTSE}2/text": "fits no known manifest format",
    f"{_LHOTSE}2/utt2spk": "fits no known manifest format",
    "librispeech-wav2vec-tsv/valid.ltr": "fits no known manifest format",
    "sharegpt-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv": "3 columns that may hold",
    "speechbrain-samples/ASR_dev.json": "2 columns that may hold",
    "speechbrain-samples/ASR_train.json": "2 columns that may hold",
    "speechbrain-samples/ASR_train_39p.json": "2 columns that may hold",
    "vidur-traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv": "3 columns that may hold",
}


@pytest.mark.parametrize("name", READ)
def test_count_ends_total_and_unit(data, name: str) -> None:
    options, expected = READ[name]
    found = load_lengths(data(name.partition("#")[0]), ReadOptions(**options))  # type: ignore[arg-type]
    summary = (found.count, found.shortest, found.longest, pytest.approx(found.total, abs=6e-4), found.unit)
    assert summary == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_read_says_why(data, name: str) -> None:
    with pytest.raises(ManifestError, match=REFUSED[name]) as caught:
        load_lengths(data(name))
    assert caught.value.hint


def test_every_file_there_is_read_or_refused(data) -> None:
    root: Path = data("README.md").parent
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {"README.md"}
    assert there <= {*READ, *REFUSED}


def test_common_voice_is_converted_to_seconds(data) -> None:
    found = load_lengths(data("commonvoice-id/clip_durations.tsv.gz"), ReadOptions(unit="s"))
    assert (found.shortest, found.longest, found.unit) == (1.116, 15.156, "s")


def test_the_letters_of_a_transcript_are_the_targets(data) -> None:
    letters = str(data("librispeech-wav2vec-tsv/valid.ltr"))
    found = load_lengths(data("librispeech-wav2vec-tsv/valid.tsv"), ReadOptions(target_file=letters))
    assert (found.targets.min(), found.targets.max(), found.targets.sum()) == (4, 517, 291159)


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


def test_librispeech_has_the_total_behind_its_batch_bound(data) -> None:
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


def test_kaldis_six_digits_differ_only_by_rounding(data) -> None:
    original = load_lengths(data(f"{_DERIVED}/nemo_manifest.jsonl.gz"))
    rounded = load_lengths(data(f"{_DERIVED}/kaldi/utt2dur.gz"))
    assert np.abs(original.values - rounded.values).max() < 5e-5


def test_code_files_have_247_of_length_zero(data) -> None:
    lengths = load_lengths(data("code-file-lengths/code_file_lengths.tsv.gz"), ReadOptions(skip_invalid=True))
    assert lengths.left_out == {"invalid length (zero)": 247}
