"""The CI gate on each kind of result: what rules can name, and why something is not known."""

import pytest
from loader_records import all_failed, bottleneck, made_dali, made_iterable, made_loader
from msgspec.structs import replace
from pooled_records import pooled_sweep
from report_records import (
    failed_verification,
    made_drift,
    made_sweep,
    made_verification,
    partly_proven_sweep,
    proven_sweep,
    rule_inputs,
    whole_sweep,
)
from reports.changed import with_row
from streamed_records import made_stream, whole_stream

from batchtune.reports.gate import judge, parse_rules

POOLS = {"sweep": pooled_sweep()}
STREAM = {"sweep": None, "stream": whole_stream()}
BARE_STREAM = {"sweep": None, "stream": made_stream()}
LOADER = {"sweep": None, "loader": made_loader()}
BETTER_LOADER = {**LOADER, "baseline_loader": bottleneck()}
TABLE = {"sweep": made_sweep()}
WHOLE = {"sweep": whole_sweep()}
UNFIT = {"sweep": replace(whole_sweep(), current_fits=False)}
FITS = {"sweep": replace(whole_sweep(), current_fits=True)}
PARTLY = {"sweep": partly_proven_sweep(), "baseline": proven_sweep()}
PROVEN = {"sweep": proven_sweep(), "baseline": proven_sweep()}
VERIFIED = {**TABLE, "verification": made_verification()}
FAILED = {**TABLE, "verification": failed_verification()}
DRIFT = {**TABLE, "drift": made_drift()}


def verdict_of(rule, **records):
    (verdict,) = judge(parse_rules([rule]), rule_inputs(**records))
    return verdict


@pytest.mark.parametrize(
    ("records", "rule", "expected"),
    [
        (TABLE, "batches > 6.34e2", "holds"),
        (TABLE, "batches>+6e2", "fails"),
        (WHOLE, "current.batches > 600", "fails"),
        (WHOLE, "bound.batches > 600", "fails"),
        (WHOLE, "ranks.independent_epoch_seconds > 1", "fails"),
        (FITS, "current.fits == false", "holds"),
        (UNFIT, "current.fits == false", "fails"),
        (PROVEN, "unproven worse 0%", "holds"),
        (PARTLY, "unproven worse 0%", "fails"),
        (VERIFIED, "verify.holds == false", "holds"),
        (FAILED, "verify.holds == false", "fails"),
        (VERIFIED, "verify.time_ratio > 102%", "holds"),
        (VERIFIED, "verify.device.limit_bytes > 0", "fails"),
        (DRIFT, "beyond > 0", "fails"),
        (DRIFT, "changed == true", "fails"),
        (DRIFT, "changed != TRUE", "holds"),
        (DRIFT, "stale > 2%", "fails"),
        (POOLS, "mates_again > 20%", "holds"),
        (POOLS, "mates_again >= 20%", "fails"),
        (POOLS, "randomness <= 80%", "fails"),
        (POOLS, "current.randomness < 99%", "holds"),
        (POOLS, "pool_size > 9999", "fails"),
        (POOLS, "length_correlation > 99%", "fails"),
        (POOLS, "epoch_seconds_deviation > 0.3", "fails"),
        (POOLS, "max_batch_length < 601", "fails"),
        (STREAM, "stream.batches > 631", "fails"),
        (STREAM, "stream.randomness < 90%", "holds"),
        (STREAM, "stream.unproven > 0", "holds"),
        (STREAM, "stream.equal_to_best == false", "holds"),
        (STREAM, "stream.current.randomness < 0.9", "holds"),
        (STREAM, "stream.batches_per_rank != 316", "holds"),
        (STREAM, "shards.sorted == true", "fails"),
        (STREAM, "shards.advice.shards > 63", "fails"),
        (STREAM, "probe.unfinished == true", "holds"),
        (LOADER, "gpu_idle > 0.05", "holds"),
        (LOADER, "gpu_idle > 0.5%", "fails"),
        (LOADER, "loader.gpu_idle > 0.6%", "holds"),
        (LOADER, "loader.workers > 4", "holds"),
        (LOADER, "loader.wait_p99_seconds > 0.1", "fails"),
        (LOADER, "loader.reproducible == false", "holds"),
        (BETTER_LOADER, "gpu_idle worse 10%", "holds"),
        (BETTER_LOADER, "loader.examples_per_second worse 20%", "fails"),
        (BETTER_LOADER, "loader.examples_per_second worse 30%", "holds"),
        (
            {**BARE_STREAM, "baseline_stream": with_row(made_stream(), batches=620)},
            "stream.batches worse 2%",
            "holds",
        ),
        (
            {**BARE_STREAM, "baseline_stream": with_row(made_stream(), batches=620)},
            "stream.batches worse 1%",
            "fails",
        ),
        (
            {**BARE_STREAM, "baseline_stream": with_row(made_stream(), mixing=0.5)},
            "stream.mixing worse 10%",
            "fails",
        ),
    ],
)
def test_every_result_is_held_to_rules(records, rule, expected):
    assert verdict_of(rule, **records).outcome == expected


@pytest.mark.parametrize(
    ("records", "rule", "why"),
    [
        (
            TABLE,
            "pool_size > 0",
            "only pools have it, and this is a bucket table",
        ),
        (
            POOLS,
            "randomness > 80",
            "randomness is from 0 to 1, and 80 is not: write 8% or 0.08",
        ),
        (STREAM, "stream.padding > 8%", "did you mean stream.padding_ratio?"),
        (
            STREAM,
            "batches > 3",
            "fields of the stream begin with stream., such as stream.batches",
        ),
        (
            {"sweep": None},
            "stream.batches > 3",
            "the run has no stream.json: run `batchtune sweep-stream`",
        ),
        (
            BARE_STREAM,
            "stream.current.batches > 3",
            "`batchtune sweep-stream` with --current",
        ),
        (
            BARE_STREAM,
            "stream.max_batch_numel > 0",
            "stream.max_batch_numel is not known (null)",
        ),
        (
            BARE_STREAM,
            "shards.advice.maxcount > 0",
            "(null): the shards do as they are",
        ),
        (
            BARE_STREAM,
            "stream.mixing worse 2%",
            "no other run to compare with is given: use --baseline",
        ),
        (
            {**BARE_STREAM, "baseline": made_sweep()},
            "stream.batches worse 2%",
            "the baseline has no stream.json",
        ),
        (
            {"sweep": made_sweep(), "baseline_stream": made_stream()},
            "batches worse 2%",
            "the baseline has no sweep.json",
        ),
        (
            {"sweep": None, "loader": made_dali()},
            "gpu_idle > 5%",
            "no step times are known: give --step-ms, or probe",
        ),
        (
            {"sweep": None, "loader": all_failed()},
            "gpu_idle > 5%",
            "the tuning of the loader recommends no row: Nothing",
        ),
        (
            {"sweep": None, "loader": made_iterable()},
            "loader.reproducible == true",
            "with --check-reproducible",
        ),
        (
            {**LOADER, "baseline": made_sweep()},
            "gpu_idle worse 2%",
            "the baseline has no loader.json",
        ),
        (BETTER_LOADER, "loader.rounds worse 5%", "can't be worse"),
    ],
)
def test_what_is_not_known_says_why(records, rule, why):
    verdict = verdict_of(rule, **records)
    assert verdict.outcome == "error" and why in verdict.message


def test_rows_of_tables_and_streams_do_not_mix():
    both = {"sweep": made_sweep(), "stream": made_stream()}
    assert verdict_of("batches > 633", **both).value == 634
    assert verdict_of("stream.batches > 633", **both).value == 632


@pytest.mark.parametrize(
    ("allowed", "expected"), [("11.2%", "holds"), ("11.1%", "fails")]
)
def test_less_randomness_is_worse(allowed, expected):
    less = pooled_sweep()
    more = replace(
        less,
        rows=[
            replace(row, mates_again=0.1) if row.pool_size else row for row in less.rows
        ],
    )
    assert (
        verdict_of(f"randomness worse {allowed}", sweep=less, baseline=more).outcome
        == expected
    )
    assert (
        verdict_of("randomness worse 0%", sweep=more, baseline=less).outcome == "holds"
    )


@pytest.mark.parametrize("size", [10_000, None, 4000])
def test_a_verification_of_other_pools_judges_nothing(size):
    row = pooled_sweep().recommended_row
    verification = replace(
        made_verification(),
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        pool_size=size,
    )
    verdict = verdict_of("verify.holds == false", **POOLS, verification=verification)
    assert verdict.outcome == ("holds" if size == 10_000 else "error")
    assert (
        size == 10_000
        or "ran other batches than the sweep recommends" in verdict.message
    )
