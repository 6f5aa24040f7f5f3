"""What reports say of a verification."""

import dataclasses

import msgspec
import pytest
from report_records import (
    failed_verification,
    made_probe,
    made_sweep,
    made_verification,
    rule_inputs,
    with_recommended,
)
from streamed_records import made_stream

from batchtune.reports import RunResults
from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.measured import verification_section
from batchtune.reports.page import build_page, build_verification_page
from batchtune.results import (
    WorkloadRecord,
)

replace = msgspec.structs.replace
SWEEP = replace(made_sweep(), warnings=[])


def run_with(verification, probe=None, sweep=SWEEP):
    return RunResults(
        name="run",
        probe=probe or made_probe(),
        sweep=sweep,
        verification=verification,
    )


def said_of(verification):
    return list(verification_section(run_with(verification)).sentences)


def test_emptied_caches_and_a_time_without_estimate_are_told():
    untimed = replace(
        made_verification(),
        alloc_retries=3,
        estimated_epoch_seconds=None,
        time_ratio=None,
    )
    assert said_of(untimed)[0].endswith(
        "without running out of memory, but the allocator emptied its cache 3 times to go on; an epoch takes 3 min 24 "
        "s measured, and no estimate is known."
    )


def test_what_was_verified_before_says_nothing_of_new_batches():
    other = with_recommended(SWEEP, "optimal", 10)
    page = build_page(run_with(failed_verification(), sweep=other))
    assert page.lead[0].startswith("Set 10 buckets")
    assert any("ran other batches" in warning for warning in page.warnings)
    assert "run these batches for real" in [purpose for _, purpose in page.next_steps]


def test_other_lengths_are_told_and_nothing_else():
    lengths = replace(made_verification().lengths, fingerprint="0" * 64)
    warnings = build_page(
        run_with(replace(made_verification(), lengths=lengths))
    ).warnings
    assert len(warnings) == 1 and "used other lengths" in warnings[0]


DEVICE = made_verification().device
OTHER = WorkloadRecord(spec="mine.py:Step", options={})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"workload": OTHER},
            "The verification ran mine.py:Step, the probe builtin:conformer",
        ),
        (
            {"device": replace(DEVICE, name="NVIDIA A100")},
            "ran NVIDIA A100, limited to",
        ),
        (
            {"device": replace(DEVICE, limit_bytes=1 << 30)},
            "limited to 1 GiB of 140 GiB, the probe NVIDIA H200, limited to 126 GiB",
        ),
        (
            {"device": replace(DEVICE, torch="2.99")},
            "PyTorch was 2.13.0, and 2.99 later",
        ),
    ],
    ids=["workload", "device", "limit", "torch"],
)
def test_another_subject_than_the_probes_is_told(changes, said):
    assert (
        said
        in build_page(run_with(replace(made_verification(), **changes))).warnings[0]
    )


def test_the_verification_has_a_page_of_its_own():
    page = build_verification_page(run_with(made_verification()))
    assert [section.title for section in page.sections] == ["Verification", "Data"]
    assert page.summary[2:4] == [
        "Measured: builtin:conformer-ctc layers=12 precision=bf16 on NVIDIA H200, limited to 126 GiB of 140 GiB.",
        "Memory: 121 GiB in use, 125 GiB held by the allocator.",
    ]


# Of a stream


def of_stream(stream, **changes):
    row = stream.recommended_row
    ran = {
        "algorithm": row.algorithm,
        "buffer_size": row.buffer_size,
        "max_padding_ratio": row.max_padding_ratio,
        "bucket_boundaries": row.boundaries,
        "bucket_batch_sizes": row.batch_sizes,
    }
    return replace(made_verification(), **{**ran, **changes})


def test_a_streams_verification_says_so():
    verified = of_stream(made_stream())
    outcome, ran, *_ = said_of(verified)
    assert outcome.startswith("Verified: 500 batches of the stream without running out")
    assert "then 500 of 500 of the stream (pivot with a buffer of 4096)" in ran


def test_it_is_compared_with_the_streams_sweep_alone():
    stream = made_stream()
    for changes, said in (({}, False), ({"buffer_size": 17}, True)):
        verified = of_stream(stream, **changes)
        results = dataclasses.replace(run_with(verified), stream=stream)
        assert (
            any(
                "The verification ran" in warning
                for warning in build_page(results).warnings
            )
            == said
        )
        inputs = rule_inputs(sweep=SWEEP, stream=stream, verification=verified)
        (verdict,) = judge(parse_rules(["verify.holds == false"]), inputs)
        assert verdict.outcome == ("error" if said else "holds")


def test_next_is_the_streams_verification_then_the_same_again():
    stream = made_stream()
    for verified, what in (
        (None, "run these batches for real"),
        (of_stream(stream, holds=False), "run these batches again"),
    ):
        results = dataclasses.replace(
            run_with(made_verification()),
            sweep=None,
            stream=stream,
            verification=verified,
        )
        steps = {what: step for step, what in build_page(results).next_steps}
        assert steps[what].startswith("batchtune verify --stream")
