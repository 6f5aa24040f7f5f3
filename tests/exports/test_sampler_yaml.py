"""`sampler.yaml` and `stream.yaml`: written, read back, refused."""

from pathlib import Path

import pytest
import yaml
from exports.stream_runs import assert_snapshot, changed, made_stream
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from report_records import (
    made_sweep,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    without_recommendation,
)
from ruamel.yaml import YAML

from batchtune.configs import read_sampler_yaml, read_stream_yaml
from batchtune.errors import ResultError
from batchtune.exports.run_configs import (
    render_sampler_yaml,
    render_stream_yaml,
    sampler_config,
    stream_config,
)

CONFIG = sampler_config(made_sweep())
STREAM = stream_config(made_stream())
KINDS = {
    "sampler.yaml": (CONFIG, read_sampler_yaml),
    "stream.yaml": (STREAM, read_stream_yaml),
}
REFUSED = YAML(typ="safe").load(Path(__file__).with_name("refused_configs.yaml"))


def written(folder, text):
    path = folder / "sampler.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_the_file_is_as_in_its_snapshot():
    assert_snapshot("sampler.yaml", render_sampler_yaml(CONFIG))
    assert_snapshot("stream.yaml", render_stream_yaml(STREAM))


def test_the_evidence_counts_unproven_buckets_and_the_margin():
    evidence = sampler_config(partly_proven_sweep(), proven_probe()).evidence
    assert (evidence.unproven, evidence.margin_bytes) == (4, 400 * 1024**2)
    assert (CONFIG.evidence.unproven, CONFIG.evidence.margin_bytes) == (None, None)
    assert (evidence.allocator, CONFIG.evidence.allocator) == ("native", None)
    sweep = replace(proven_sweep(), proof=None)
    assert sampler_config(sweep, proven_probe()).evidence.unproven == 13


def test_a_sweep_without_recommendation_has_no_config():
    with pytest.raises(ResultError, match="recommends nothing: no table needs fewer"):
        sampler_config(without_recommendation(made_sweep()))
    nothing = replace(made_stream(), recommended=None, reason="no row fits")
    with pytest.raises(ResultError, match="recommends nothing: no row fits"):
        stream_config(nothing)


POOLS = {"sampler": "pooled", "pool_size": 20_000, "batch_overhead": 12.5}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
positive = st.floats(1e-9, 1e12)


@given(
    st.lists(positive, min_size=1, max_size=40, unique=True).map(sorted),
    st.none() | texts,
    positive,
    texts,
    st.sampled_from([{}, POOLS]),
)
def test_what_is_written_is_read_back_bit_for_bit(
    tmp_path_factory, boundaries, unit, seconds, text, pools
):
    folder = tmp_path_factory.mktemp("sampler")
    evidence = replace(CONFIG.evidence, device=text, estimated_epoch_seconds=seconds)
    sizes = list(range(len(boundaries), 0, -1))
    table = {"bucket_boundaries": boundaries, "bucket_batch_sizes": sizes}
    config = replace(
        CONFIG,
        unit=unit,
        max_batch_length=seconds,
        seed=2**63 - 1,
        max_batch_size=len(boundaries),
        num_buckets=len(boundaries),
        evidence=evidence,
        **table,
        **pools,
    )
    assert read_sampler_yaml(written(folder, render_sampler_yaml(config))) == config
    pivot = {"algorithm": "pivot", "max_padding_ratio": 0.1, "batches_per_epoch": None}
    stream = replace(STREAM, unit=unit, **pivot, **table)
    assert read_stream_yaml(written(folder, render_stream_yaml(stream))) == stream


HOSTILE_NAMES = [
    "NVIDIA\nformat: evil",
    "a: b",
    "!!python/object/apply:os.system ['true']",
    "# no comment",
    "'\"\\",
    "null",
    "123",
    "- item",
    "&anchor *alias",
    "\ttab \x1b[31m",
    "{{ x }}, ",
    "bucket_boundaries: [1.0, 2.0]\n\n",
    "word " * 100,
    "\x85 \u2028 \ufeff \ud7ff",
    "",
    "YES",
    "off",
    "12:30:45",
    "1_000",
    "2026-01-31",
]


def test_a_hostile_device_name_stays_a_string(tmp_path):
    for name in HOSTILE_NAMES:
        config = replace(CONFIG, evidence=replace(CONFIG.evidence, device=name))
        text = render_sampler_yaml(config)
        assert read_sampler_yaml(written(tmp_path, text)) == config
        assert yaml.safe_load(text)["evidence"]["device"] == name


def test_small_numbers_are_numbers_to_readers_of_yaml_1_1_too():
    evidence = replace(CONFIG.evidence, padding_ratio=1e-05)
    text = render_sampler_yaml(replace(CONFIG, evidence=evidence))
    assert "padding_ratio: 1.0e-05\n" in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just a sentence",
        "- a\n- list\n",
        "{a: b",
        "a: 1\na: 2\n",
        "when: 2024-99-99\n",
        "a: &x [*x]\n",
        "format: batchtune/sampler\nversion: !!python/object/apply:os.system ['true']\n",
        "--- 1\n--- 2\n",
        "a: " + 1500 * "[",
        "\x00",
    ],
)
def test_what_is_no_sampler_file_is_refused_without_a_traceback(tmp_path, text):
    with pytest.raises(ResultError, match=r"sampler\.yaml"):
        read_sampler_yaml(written(tmp_path, text))


def test_a_bomb_of_aliases_is_no_work(tmp_path):
    text = "a0: &a0 [lol]\n"
    for n in range(1, 24):
        text += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n"
    with pytest.raises(ResultError) as caught:
        read_sampler_yaml(written(tmp_path, f"{text}format: *a23\n"))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["message"])
def test_a_file_that_is_off_is_refused_with_the_field_named(tmp_path, case):
    path = tmp_path / case["file"]
    fields = {**case.get("fields", {}), **dict.fromkeys(case.get("without", []), ...)}
    config, read = KINDS[path.name]
    changed(path, config, **fields)
    with pytest.raises(ResultError, match=case["message"]) as caught:
        read(path)
    assert caught.value.message.startswith(str(path)) and caught.value.hint


# Of a stream


def test_if_speechbrain_is_recommended_it_is_the_best_of_our_own():
    made = made_stream(recommended="speechbrain")
    found = stream_config(made, proven_probe())
    assert (found.algorithm, found.batches_per_epoch) == ("pivot", 320)
    assert found.evidence.batches == 640
    without_epochs = stream_config(replace(made, batches_per_rank=None))
    assert without_epochs.batches_per_epoch is None
    assert found.evidence.allocator == "native"
    assert found.evidence.margin_bytes == proven_probe().margin.bytes
    unproven = [
        replace(row, unproven=int(row.algorithm == "pivot")) for row in made.rows
    ]
    assert stream_config(replace(made, rows=unproven)).algorithm == "bucket"
    alone = replace(made, rows=made.rows[-1:], recommended=0, recommended_speechbrain=0)
    why = (
        "BucketedStream can run no row of the sweep: it only runs the algorithm bucket"
    )
    with pytest.raises(ResultError, match=why):
        stream_config(alone)
