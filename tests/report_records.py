"""Made records for the tests of reports and exports: LibriSpeech train-clean-100 on a large GPU.

`made_probe` was interrupted before its batches ran in turns, and `made_sweep` knows of no proofs; `proven_probe` and
`proven_sweep` do.
"""

from functools import cache
from statistics import NormalDist

from msgspec.structs import replace

from batchtune.reports import RunResults
from batchtune.reports.gate import RuleInputs
from batchtune.reports.page import build_page
from batchtune.results import (
    Baseline,
    BatchShape,
    BucketUse,
    CostModel,
    Device,
    Drift,
    FrontierPoint,
    LearningRate,
    LengthsSummary,
    LowerBound,
    Margin,
    Meta,
    Models,
    Probe,
    Proof,
    RankTimes,
    Row,
    Script,
    Sweep,
    SweepSettings,
    Trial,
    Twin,
    TwoDimensionalRow,
    Verification,
    VerifyFailure,
    WorkloadRecord,
)

COUNT = 28_539
TOTAL_SECONDS = 362_127.1
MAX_BATCH_LENGTH = 600.0
GIB = 1024**3
MIB = 1024**2

_OPTIMAL = (641, 638, 636, 634, 632, 631, 630, 630, 629, 628, 628)
OPTIMAL_BATCHES = dict(zip(range(10, 21), _OPTIMAL, strict=True))
OTHER_BATCHES = {"quantile": 660, "linear": 645, "exponential": 665}


def made_meta(kind):
    return Meta(format=f"batchtune/{kind}", version=1, batchtune="0.1.0")


def made_lengths(unit="s"):
    return LengthsSummary(
        count=COUNT,
        total=TOTAL_SECONDS,
        min=1.41,
        max=24.525,
        unit=unit,
        fingerprint="424c05e7" * 8,
    )


def made_probe(unit="s"):
    lengths = (1.41, 3.5, 7.0, 12.0, 16.0, 24.525)
    frontier = [
        FrontierPoint(
            length=length,
            target_length=None,
            batch_size=int(612 / length),
            closed_by="memory",
            oom_batch_size=None,
            step_seconds=0.02 + 0.0004 * 612 + 0.001 * length,
            peak_bytes=int((124 + length / 24) * GIB),
        )
        for length in lengths
    ]
    for end in (0, -1):
        too_many = frontier[end].batch_size + 2
        frontier[end] = replace(frontier[end], closed_by="oom", oom_batch_size=too_many)
    trials = [
        made_trial(
            index,
            "ok" if index % 3 else "oom",
            batch_size=8 * (index + 1),
            length=lengths[index % 6],
        )
        for index in range(12)
    ]
    return Probe(
        meta=made_meta("probe"),
        lengths=made_lengths(unit),
        workload=WorkloadRecord(
            spec="builtin:conformer-ctc", options={"layers": 12, "precision": "bf16"}
        ),
        device=Device(
            kind="cuda",
            name="NVIDIA H200",
            total_bytes=140 * GIB,
            limit_bytes=126 * GIB,
            driver="570.86",
            torch="2.13.0",
            allocator="native",
            other_processes=0,
        ),
        settings={"tolerance": 0.01, "seed": 7},
        trials=trials,
        frontier=frontier,
        models=Models(
            peak_bytes=CostModel(
                floor=0, constant=2e9, linear=2.1e8, quadratic=1e5, relative_error=0.004
            ),
            step_seconds=CostModel(
                floor=0, constant=0.02, linear=4e-4, quadratic=0, relative_error=0.031
            ),
        ),
        max_batch_length=MAX_BATCH_LENGTH,
    )


def proven_probe():
    """Measured at every boundary of the table that `proven_sweep` recommends; the last 14 trials prove it."""
    made = made_probe()
    row = made_sweep().recommended_row
    first = len(made.trials)
    frontier = [
        replace(
            made.frontier[0],
            length=length,
            batch_size=int(612 / length),
            oom_batch_size=None,
            trial=first + index,
        )
        for index, length in enumerate((1.41, *row.boundaries))
    ]
    proofs = [
        made_trial(first + i, "ok", batch_size=p.batch_size, length=p.length)
        for i, p in enumerate(frontier)
    ]
    return replace(
        made,
        frontier=frontier,
        trials=[*made.trials, *proofs],
        margin=Margin(
            bytes=400 * MIB, spread_bytes=250 * MIB, first_step_bytes=0, repetitions=60
        ),
    )


SCRIPT = Script(
    batches=["x: [B, L] float32"],
    loader="Chats, 400 examples",
    per_unit=1.0,
    target_per_unit=None,
    accumulation=1,
    look_ahead=0,
)


def forced_probe():
    """As `proven_probe`, of a script whose own batches, of a stream, take more memory than those that were made."""
    probe = proven_probe()
    twins = [
        Twin(
            batch_size=8,
            length=20.0,
            target_length=None,
            own_bytes=1000 * MIB,
            made_bytes=made * MIB,
        )
        for made in (990, 803)
    ]
    script = replace(SCRIPT, twins=twins, streams=True)
    device = replace(probe.device, script=script)
    return replace(probe, device=device)


def proven_sweep():
    """As `made_sweep`, with what `proven_probe` proves: all of the recommended table."""
    sweep = made_sweep()
    points = proven_probe().frontier

    def proving(boundary, size):
        fits = (
            point.trial
            for point in points
            if point.length >= boundary and point.batch_size >= size
        )
        return next(fits, None)

    def unproven(row):
        return sum(
            proving(end, size) is None
            for end, size in zip(row.boundaries, row.batch_sizes, strict=True)
        )

    row = sweep.recommended_row
    examples = [COUNT // 13 + (bucket < COUNT % 13) for bucket in range(13)]
    batches = [48 + (bucket < 634 - 13 * 48) for bucket in range(13)]
    buckets = [
        BucketUse(
            boundary=boundary,
            batch_size=size,
            examples=examples[bucket],
            batches=batches[bucket],
            length=TOTAL_SECONDS / 13,
            padded_length=TOTAL_SECONDS / 13 * 1.05,
            proven_by=proving(boundary, size),
        )
        for bucket, (boundary, size) in enumerate(
            zip(row.boundaries, row.batch_sizes, strict=True)
        )
    ]
    rows = [replace(row, unproven=unproven(row)) for row in sweep.rows]
    proof = Proof(
        steps=412,
        pairs=182,
        processes=3,
        ooms=0,
        alloc_retries=2,
        highest_reserved_bytes=int(0.981 * proven_probe().device.limit_bytes),
        limit_bytes=proven_probe().device.limit_bytes,
    )
    return replace(sweep, rows=rows, buckets=buckets, proof=proof)


def partly_proven_sweep():
    """The sizes of the last four of 13 buckets are not proven; max_batch_length is 700 s, where 600 s were measured."""
    sweep = proven_sweep()
    rows = list(sweep.rows)
    rows[sweep.recommended] = replace(rows[sweep.recommended], unproven=4)
    last = [replace(use, proven_by=None) for use in sweep.buckets[-4:]]
    buckets = [*sweep.buckets[:-4], *last]
    return replace(sweep, max_batch_length=700.0, rows=rows, buckets=buckets)


def made_trial(
    index,
    outcome,
    *,
    batch_size=24,
    length=24.525,
    error=None,
):
    measured = {}
    if outcome == "ok":
        measured = {
            "steps": 3,
            "step_seconds": 0.25,
            "peak_bytes": 100 * GIB,
            "reserved_bytes": 110 * GIB,
            "alloc_retries": 0,
        }
    return Trial.of(
        BatchShape(batch_size, length),
        outcome,
        index=index,
        error=error,
        elapsed_seconds=1.5,
        **measured,
    )


def made_verification():
    """Of the table that `made_sweep` recommends: it holds."""
    row = made_sweep().recommended_row
    return Verification(
        meta=made_meta("verify"),
        lengths=made_lengths(),
        workload=made_probe().workload,
        device=made_probe().device,
        settings={"steps": 500, "seed": 7},
        bucket_boundaries=row.boundaries,
        bucket_batch_sizes=row.batch_sizes,
        max_batch_length=MAX_BATCH_LENGTH,
        worst_steps=26,
        steps=500,
        planned_steps=500,
        epoch_batches=634,
        failures=[],
        alloc_retries=0,
        peak_bytes=121 * GIB,
        reserved_bytes=125 * GIB,
        rest_growth_bytes=0,
        reserved_growth_bytes=0,
        estimated_epoch_seconds=200.0,
        measured_epoch_seconds=204.0,
        time_ratio=1.02,
        time_ratio_error=0.02,
        holds=True,
        reasons=[],
        warnings=[],
    )


def failed_verification():
    """The bucket of the longest examples ran out of memory."""
    made = made_verification()
    failure = VerifyFailure(
        phase="worst",
        step=3,
        bucket=12,
        batch_size=24,
        length=24.525,
        target_length=None,
        outcome="oom",
        error="CUDA out of memory. Tried to allocate 2.00 GiB",
    )
    return replace(
        made,
        worst_steps=25,
        steps=0,
        failures=[failure],
        rest_growth_bytes=None,
        reserved_growth_bytes=None,
        measured_epoch_seconds=None,
        time_ratio=None,
        time_ratio_error=None,
        holds=False,
        reasons=[
            "A batch of 24 × 24.52 s ran out of memory (bucket 13 of 13, up to 24.52 s)"
        ],
    )


def made_sweep(*, timed=True, unit="s"):
    """66 rows, 10 to 20 buckets each; recommended: 13 buckets of `optimal`, within 1% of the best."""
    rows = [_speechbrain_row(num_buckets, timed) for num_buckets in range(10, 21)]
    for strategy, batches in OTHER_BATCHES.items():
        rows += [
            _filled_row(strategy, n, batches - 2 * n + 20, timed) for n in range(10, 21)
        ]
    rows += [
        _filled_row("optimal", n, batches, timed)
        for n, batches in OPTIMAL_BATCHES.items()
    ]
    rows += [
        replace(_filled_row("optimal", n, batches - 2, timed), sizing="frontier")
        for n, batches in OPTIMAL_BATCHES.items()
    ]
    return Sweep(
        meta=made_meta("sweep"),
        lengths=made_lengths(unit),
        max_batch_length=MAX_BATCH_LENGTH,
        settings=SweepSettings(seed=7),
        device_name="NVIDIA H200" if timed else None,
        rows=rows,
        baselines=[
            _baseline("fixed-random", 466_900.0, timed),
            _baseline("fixed-sorted", 362_400.0, timed),
        ],
        lower_bound=LowerBound(
            batches=604,
            padded_length=TOTAL_SECONDS,
            estimated_epoch_seconds=_seconds(604, TOTAL_SECONDS, timed),
        ),
        recommended=next(
            index
            for index, row in enumerate(rows)
            if (row.strategy, row.sizing, row.num_buckets) == ("optimal", "length", 13)
        ),
        reason="optimal with 13 buckets is within 1% of the best, and fewer buckets keep more randomness",
        warnings=[
            "speechbrain with num_buckets=10 can't make a batch of more than 14 examples"
        ],
        quantiles=[1.41 * (24.525 / 1.41) ** (i / 1000) for i in range(1001)],
    )


def whole_sweep(unit="s"):
    """As `made_sweep`, with all that a sweep can tell: the user's settings, errors, ranks and the rest."""
    sweep = made_sweep(unit=unit)
    rows = [
        replace(
            row,
            estimated_epoch_error_seconds=2.5,
            equal_to_best=row.strategy == "optimal",
            steps=-(-row.batches // 8),
            ranks=RankTimes(
                without_waiting_epoch_seconds=25.0,
                independent_epoch_seconds=27.5,
                same_bucket_epoch_seconds=25.5,
            ),
        )
        for row in sweep.rows
    ]
    return replace(
        sweep,
        settings=SweepSettings(seed=7, world_size=8),
        rows=rows,
        current=replace(rows[10], strategy="current", num_buckets=200),
        current_settings={
            "source": "train.yaml",
            "max_batch_length": 600,
            "num_buckets": 200,
        },
        trade_off=[
            index
            for index, row in enumerate(rows)
            if (row.strategy, row.sizing) == ("optimal", "length")
        ][::-1],
        learning_rate=LearningRate(
            relative_to="current",
            from_batch_size=28.0,
            to_batch_size=45.0,
            linear=45 / 28,
            square_root=1.2677,
        ),
        two_dimensional=[
            TwoDimensionalRow(
                num_buckets=20,
                buckets=[(4.1, 30.0), (4.1, 48.0), (24.525, 400.0)],
                batch_sizes=[140, 120, 24],
                batches=590,
                estimated_epoch_seconds=180.0,
                one_dimensional_batches=628,
                one_dimensional_epoch_seconds=198.0,
            )
        ],
    )


def with_recommended(sweep, strategy, num_buckets):
    """The same sweep, with another row recommended."""
    index = next(
        index
        for index, row in enumerate(sweep.rows)
        if (row.strategy, row.num_buckets) == (strategy, num_buckets)
    )
    return replace(sweep, recommended=index)


def without_recommendation(sweep):
    return replace(
        sweep,
        recommended=None,
        reason="no table needs fewer batches than a fixed batch size of 24",
    )


@cache
def _speechbrain_row(num_buckets, timed):
    # Its first boundary is max_batch_length / exp(2·z); all but a few of these examples lie below it.
    batch_size = int(
        2.718281828 ** (2 * NormalDist().inv_cdf(num_buckets / (num_buckets + 1)))
    )
    batches = -(-COUNT // batch_size) + (1 if num_buckets == 20 else 0)
    boundaries = [
        MAX_BATCH_LENGTH / (batch_size + 0.4) * (i + 1) for i in range(num_buckets)
    ]
    return made_row(
        "speechbrain", boundaries, batches, TOTAL_SECONDS / 0.78, 1, 1.0, timed
    )


@cache
def _filled_row(strategy, num_buckets, batches, timed):
    boundaries = [
        round(24.525 * ((i + 1) / num_buckets) ** 0.75, 3) for i in range(num_buckets)
    ]
    padded = TOTAL_SECONDS / (1 - 0.4 / num_buckets)
    return made_row(
        strategy, boundaries, batches, padded, num_buckets, 0.7 * num_buckets, timed
    )


def made_row(
    strategy,
    boundaries,
    batches,
    padded_length,
    used_buckets,
    effective_buckets,
    timed,
):
    return Row(
        strategy=strategy,
        sizing="length",
        num_buckets=len(boundaries),
        used_buckets=used_buckets,
        boundaries=boundaries,
        batch_sizes=[
            max(1, int(MAX_BATCH_LENGTH / boundary)) for boundary in boundaries
        ],
        batches=batches,
        padded_length=padded_length,
        padding_ratio=1 - TOTAL_SECONDS / padded_length,
        fill=TOTAL_SECONDS / (batches * MAX_BATCH_LENGTH),
        mean_batch_size=COUNT / batches,
        largest_padded_length=599.8,
        effective_buckets=effective_buckets,
        mates_again=0.0045 * effective_buckets,
        smallest_batch_size=3,
        largest_batch_size=425,
        batch_size_variation=0.61,
        steps=batches,
        step_tokens_deviation=0.0812,
        estimated_epoch_seconds=_seconds(batches, padded_length, timed),
    )


def _baseline(name, padded_length, timed):
    return Baseline(
        name=name,
        batch_size=24,
        batches=1190,
        padded_length=padded_length,
        padding_ratio=1 - TOTAL_SECONDS / padded_length,
        estimated_epoch_seconds=_seconds(1190, padded_length, timed),
    )


def _seconds(batches, padded_length, timed):
    return 0.08 * batches + 0.0004 * padded_length if timed else None


def hostile_results(text):
    """A run in which every string that a file can freely choose holds this text."""
    probe, sweep = made_probe(unit=text), whole_sweep(unit=text)
    device = replace(
        probe.device, name=text, kind=text, driver=text, torch=text, allocator=text
    )
    return RunResults(
        name=text,
        probe=replace(
            probe,
            workload=WorkloadRecord(spec=text, options={text: text}),
            device=device,
            settings={text: text},
            trials=[*probe.trials, made_trial(12, "crash", error=text)],
        ),
        sweep=replace(
            sweep,
            settings=SweepSettings(strategies=(text,)),
            current_settings={"source": text},
            device_name=text,
            rows=[
                replace(
                    row, strategy=text if row.strategy == "optimal" else row.strategy
                )
                for row in sweep.rows
            ],
            baselines=[*sweep.baselines, replace(sweep.baselines[0], name=text)],
            reason=text,
            warnings=[text],
        ),
        verification=replace(
            failed_verification(),
            lengths=made_lengths(unit=text),
            workload=WorkloadRecord(spec=text, options={text: text}),
            device=device,
            failures=[replace(failed_verification().failures[0], error=text)],
            reasons=[text],
            warnings=[text],
        ),
    )


def tables_of(results, *, brief=False):
    """Title → table, of all that a report shows, or a brief one."""
    tables = {}
    for section in build_page(results).sections:
        for table in section.tables:
            if not brief or (table.brief and section.brief):
                tables[table.title] = table
    return tables


def summary_of(**records):
    """All sentences of a report on a run with these records."""
    return build_page(RunResults(name="run", **records)).summary


def warnings_of(**records):
    """All warnings of a report on a run with these records."""
    return build_page(RunResults(name="run", **records)).warnings


def made_drift(**changes):
    """How far other lengths are from a run's."""
    drift = Drift(
        lengths=made_lengths(),
        changed=True,
        beyond=12,
        batches=655,
        retuned_batches=634,
        epoch_seconds=None,
        retuned_epoch_seconds=None,
        stale=655 / 634 - 1,
    )
    return replace(drift, **changes)


def rule_inputs(**records):
    """Inputs of rules by the records of a run, and of a baseline: `baseline` is its sweep, `baseline_stream`, ..."""
    theirs = {
        name.removeprefix("baseline_") if "_" in name else "sweep": records.pop(name)
        for name in list(records)
        if name.startswith("baseline")
    }
    run = RunResults(name="run", **{"probe": made_probe(), **records})
    baseline = RunResults(name="baseline", **theirs) if theirs else None
    return RuleInputs(results=run, baseline=baseline)
