"""What reports say of a verification."""

import pytest
from msgspec.structs import replace
from report_records import (
    failed_verification,
    made_probe,
    made_sweep,
    made_verification,
    rule_inputs,
    with_recommended,
)
from reports.changed import page_of, run_of
from streamed_records import made_stream

from batchtune.reports.gate import judge, parse_rules
from batchtune.reports.measured import verification_section
from batchtune.reports.page import build_verification_page
from batchtune.results import WorkloadRecord

BOTH = {"probe": made_probe(), "sweep": replace(made_sweep(), warnings=[])}


def said_of(verification):
    run = run_of(**BOTH, verification=verification)
    return list(verification_section(run).sentences)


def warnings_with(**changes):
    """The warnings of a report whose verification differs in these."""
    return page_of(
        **BOTH, verification=replace(made_verification(), **changes)
    ).warnings


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
    other = with_recommended(made_sweep(), "optimal", 10)
    records = {**BOTH, "sweep": other, "verification": failed_verification()}
    page = page_of(**records)
    assert page.lead[0].startswith("Set 10 buckets")
    assert "ran other batches" in " ".join(page.warnings)
    assert "run these batches for real" in dict(page.next_steps).values()


def test_other_lengths_are_told_and_nothing_else():
    lengths = replace(made_verification().lengths, fingerprint="0" * 64)
    (warning,) = warnings_with(lengths=lengths)
    assert "used other lengths" in warning


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
    assert said in warnings_with(**changes)[0]


def test_the_verification_has_a_page_of_its_own():
    run = run_of(**BOTH, verification=made_verification())
    page = build_verification_page(run)
    assert [section.title for section in page.sections] == ["Verification", "Data"]
    assert page.summary[2:4] == [
        "Measured: builtin:conformer-ctc layers=12 precision=bf16 on NVIDIA H200, limited to 126 GiB of 140 GiB.",
        "Memory: 121 GiB in use, 125 GiB held by the allocator.",
    ]


# Of a stream


def of_stream(stream, **changes):
    row = stream.recommended_row
    ran = replace(
        made_verification(),
        algorithm=row.algorithm,
        buffer_size=row.buffer_size,
        max_padding_ratio=row.max_padding_ratio,
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
    )
    return replace(ran, **changes)


def test_a_streams_verification_says_so():
    verified = of_stream(made_stream())
    outcome, ran, *_ = said_of(verified)
    assert outcome.startswith("Verified: 500 batches of the stream without running out")
    assert "then 500 of 500 of the stream (pivot with a buffer of 4096)" in ran


def test_it_is_compared_with_the_streams_sweep_alone():
    stream = made_stream()
    for changes, outcome in (({}, "holds"), ({"buffer_size": 17}, "error")):
        records = {**BOTH, "stream": stream}
        records["verification"] = of_stream(stream, **changes)
        warnings = " ".join(page_of(**records).warnings)
        assert ("The verification ran" in warnings) == (outcome == "error")
        rules = parse_rules(["verify.holds == false"])
        (verdict,) = judge(rules, rule_inputs(**records))
        assert verdict.outcome == outcome


def test_next_is_the_streams_verification_then_the_same_again():
    stream = made_stream()
    for verified, what in (
        (None, "run these batches for real"),
        (of_stream(stream, holds=False), "run these batches again"),
    ):
        page = page_of(probe=made_probe(), stream=stream, verification=verified)
        steps = {what: step for step, what in page.next_steps}
        assert steps[what].startswith("batchtune verify --stream")
