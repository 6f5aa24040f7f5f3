"""`sampler.yaml`: written, read back, refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from exports.stream_runs import assert_snapshot, changed
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from report_records import (
    made_sweep,
    partly_proven_sweep,
    proven_probe,
    proven_sweep,
    without_recommendation,
)

from batchtune.errors import ResultError
from batchtune.exports.run_configs import (
    read_sampler_yaml,
    render_sampler_yaml,
    sampler_config,
)
from batchtune.results import SamplerConfig, SamplerEvidence

CONFIG = sampler_config(made_sweep())


def written(folder: Path, text: str) -> Path:
    path = folder / "sampler.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_the_file_is_as_in_its_snapshot() -> None:
    assert_snapshot("sampler.yaml", render_sampler_yaml(CONFIG))


def test_the_evidence_counts_unproven_buckets_and_the_margin() -> None:
    evidence = sampler_config(partly_proven_sweep(), proven_probe()).evidence
    assert (evidence.unproven, evidence.margin_bytes) == (4, 400 * 1024**2)
    assert (CONFIG.evidence.unproven, CONFIG.evidence.margin_bytes) == (None, None)
    assert (evidence.allocator, CONFIG.evidence.allocator) == ("native", None)
    sweep = replace(proven_sweep(), proof=None)
    assert sampler_config(sweep, proven_probe()).evidence.unproven == 13


def test_a_sweep_without_recommendation_has_no_config() -> None:
    with pytest.raises(ResultError, match="recommends nothing: no table needs fewer"):
        sampler_config(without_recommendation(made_sweep()))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
positive = st.floats(1e-9, 1e12)
ratios = st.floats(0, 1)


@st.composite
def configs(draw: st.DrawFn) -> SamplerConfig:
    boundaries = sorted(draw(st.sets(positive, min_size=1, max_size=40)))
    sizes = draw(
        st.lists(
            st.integers(1, 10**6), min_size=len(boundaries), max_size=len(boundaries)
        )
    )
    return replace(
        CONFIG,
        unit=draw(st.none() | texts),
        max_batch_length=draw(positive),
        max_batch_size=max(sizes),
        num_buckets=len(boundaries),
        bucket_boundaries=boundaries,
        bucket_batch_sizes=sizes,
        seed=draw(st.integers(0, 2**63 - 1)),
        evidence=SamplerEvidence(
            fingerprint=draw(texts),
            device=draw(st.none() | texts),
            batches=draw(st.integers(0, 10**12)),
            padding_ratio=draw(ratios),
            estimated_epoch_seconds=draw(st.none() | positive),
        ),
    )


@given(configs())
@settings(deadline=None, max_examples=25)
def test_what_is_written_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, config: SamplerConfig
) -> None:
    folder = tmp_path_factory.mktemp("sampler")
    assert read_sampler_yaml(written(folder, render_sampler_yaml(config))) == config


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


def test_a_hostile_device_name_stays_a_string(tmp_path: Path) -> None:
    for name in HOSTILE_NAMES:
        config = replace(CONFIG, evidence=replace(CONFIG.evidence, device=name))
        text = render_sampler_yaml(config)
        assert read_sampler_yaml(written(tmp_path, text)) == config
        assert yaml.safe_load(text)["evidence"]["device"] == name


def test_small_numbers_are_numbers_to_readers_of_yaml_1_1_too() -> None:
    evidence = replace(CONFIG.evidence, padding_ratio=1e-05)
    text = render_sampler_yaml(replace(CONFIG, evidence=evidence))
    assert "padding_ratio: 1.0e-05\n" in text


POOLED = {"sampler": "pooled", "pool_size": 20_000, "batch_overhead": 12.5}


def test_pools_are_read_back(tmp_path: Path) -> None:
    row = replace(
        made_sweep().rows[0], strategy="pooled", pool_size=20_000, batch_overhead=12.5
    )
    config = sampler_config(replace(made_sweep(), rows=[row], recommended=0))
    text = render_sampler_yaml(config)
    assert text.endswith("sampler: pooled\npool_size: 20000\nbatch_overhead: 12.5\n")
    assert read_sampler_yaml(written(tmp_path, text)) == config


def table_of_two(**fields: Any) -> dict[str, Any]:
    return {
        "num_buckets": 2,
        "bucket_batch_sizes": [60, 30],
        "max_batch_size": 60,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "batchtune/sweep"}, "has the format 'batchtune/sweep'"),
        ({"format": ...}, "has the format None"),
        ({"version": 2}, "has version 2"),
        ({"seed": ...}, "seed"),
        ({"drop_lats": True}, "drop_lats"),
        ({"batch_ordering": "sideways"}, r"\$\.batch_ordering"),
        ({"bucket_batch_sizes": [1.5] * 13}, r"\$\.bucket_batch_sizes"),
        ({"bucket_boundaries": []}, "boundaries must be"),
        ({"bucket_boundaries": [1.0, 2.0]}, "13 .*for 2"),
        ({"num_buckets": 12}, "num_buckets is 12, but the table's is 13"),
        (
            {"bucket_boundaries": [2.0, 1.0], **table_of_two()},
            "boundaries must .*ascend",
        ),
        (
            {"bucket_boundaries": [0.0, 2.0], **table_of_two()},
            r"\$\.bucket_boundaries\[",
        ),
        (
            {"bucket_boundaries": [1.0, float("inf")], **table_of_two()},
            r"\$\.bucket_boundaries\[",
        ),
        (
            {
                "bucket_boundaries": [1.0, 2.0],
                **table_of_two(bucket_batch_sizes=[60, 0]),
            },
            r"bucket_batch_sizes\[1\]",
        ),
        ({"max_batch_size": 5}, "max_batch_size is 5, but the table's is"),
        ({"sampler": "other"}, r"Invalid enum value 'other' - at `\$\.sampler`"),
        ({**POOLED, "pool_size": ...}, "sampler is pooled, but pool_size is None"),
        ({**POOLED, "pool_size": 0}, r"\$\.pool_size"),
        ({**POOLED, "pool_size": 2.5}, r"\$\.pool_size"),
        ({**POOLED, "batch_overhead": -1.0}, r"\$\.batch_overhead"),
        ({**POOLED, "sampler": "bucket"}, "sampler is bucket, but pool_size is 20000"),
        (
            {"batch_overhead": 3.0},
            "batch_overhead belongs to the sampler pooled, but sampler is bucket",
        ),
    ],
)
def test_a_file_that_is_off_is_refused_with_the_field_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResultError, match=message) as caught:
        read_sampler_yaml(changed(tmp_path / "sampler.yaml", CONFIG, **fields))
    assert "sampler.yaml" in caught.value.message and caught.value.hint


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
        "[" * 150,
        "format: batchtune/sampler\nversion: !!python/object/apply:os.system ['true']\n",
        "--- 1\n--- 2\n",
        "\x00",
    ],
)
def test_what_is_no_sampler_file_is_refused_without_a_traceback(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ResultError, match=r"sampler\.yaml"):
        read_sampler_yaml(written(tmp_path, text))


@pytest.mark.parametrize("bracket", "[{")
def test_deep_brackets_are_refused_before_they_are_parsed(
    tmp_path: Path, bracket: str
) -> None:
    with pytest.raises(ResultError, match="is nested too deeply"):
        read_sampler_yaml(written(tmp_path, "a: [b]\n" * 300 + bracket * 1500))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sampler.yaml").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ResultError, match="not UTF-8 text"):
        read_sampler_yaml(tmp_path / "sampler.yaml")


def test_a_missing_file_is_named_with_the_command_that_writes_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(ResultError, match="does not exist") as caught:
        read_sampler_yaml(tmp_path / "sampler.yaml")
    assert "sweep-buckets" in str(caught.value.hint)


def test_what_never_ends_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for endless in (pipe, Path("/dev/zero")):
        with pytest.raises(ResultError, match="not an ordinary file"):
            read_sampler_yaml(endless)


@pytest.mark.parametrize(
    ("first", "more", "end"),
    [
        ("a0: &a0 {x: 1}\n", "a{n}: &a{n}\n  <<: [{before}]\n", ""),
        ("a0: &a0 [lol]\n", "a{n}: &a{n} [{before}]\n", "format: *a23\n"),
    ],
    ids=["merges", "lists"],
)
def test_a_bomb_is_no_work(tmp_path: Path, first: str, more: str, end: str) -> None:
    text = first
    for n in range(1, 24):
        before = ", ".join([f"*a{n - 1}"] * 9)
        text += more.format(n=n, before=before)
    with pytest.raises(ResultError) as caught:
        read_sampler_yaml(written(tmp_path, text + end))
    assert len(str(caught.value)) < 1000
