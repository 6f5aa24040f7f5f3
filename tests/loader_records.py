"""Made records of a loader's tuning, for the tests of reports and exports."""

from msgspec.structs import replace
from report_records import made_lengths, made_meta, made_probe, made_sweep

from batchtune.reports import RunResults
from batchtune.results import (
    Demand,
    LoaderRow,
    LoaderTuning,
    Reproduced,
    WorkloadRecord,
)

MIB = 1024**2
WORKERS = (0, 1, 2, 4, 6, 8)
# Examples in a batch on average, and the time of a step with it.
BATCH_EXAMPLES, STEP_SECONDS = 32, 0.0384
SHARED_MEMORY = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error.\nraised by item 17"


def made_loader(**changes):
    """A torch loader: workers × prefetch_factor, the last two settings failed; recommended: 4 workers, 2 ahead."""
    rows = [_row({"num_workers": 0, "pin_memory": True}, 0)]
    for workers in WORKERS[1:]:
        for factor in (2, 4):
            arguments = {
                "num_workers": workers,
                "prefetch_factor": factor,
                "pin_memory": True,
            }
            rows.append(
                _row({**arguments, "persistent_workers": True}, workers, factor)
            )
    for row in rows[-2:]:
        rows[rows.index(row)] = LoaderRow(
            arguments=row.arguments,
            workers=row.workers,
            outcome="shared_memory",
            error=SHARED_MEMORY,
        )
    made = LoaderTuning(
        meta=made_meta("loader"),
        lengths=made_lengths(),
        target=WorkloadRecord(spec="train.py:make_dataset", options={"root": "data"}),
        kind="torch",
        settings={
            "sweep": {"num_workers": list(WORKERS), "prefetch_factor": [2, 4]},
            "seconds": 10.0,
            "trials": 3,
            "ranks_per_node": 2,
            "processors": 8,
            "seed": 0,
        },
        device_name="NVIDIA H200",
        batch="32 × 1600 × 80 (features)",
        epoch_batches=892,
        epoch_examples=28_539,
        demand=Demand(
            source="probe",
            per="shape",
            step_seconds=STEP_SECONDS,
            device_name="NVIDIA H200",
        ),
        rows=rows,
        recommended=5,
        reason="With num_workers=4 prefetch_factor=2 a step of 38.4 ms waits for 0.6% of the time.",
        reproduced=Reproduced(batches=40),
        warnings=["Each rank has 4 processors: 2 ranks share 8"],
    )
    return replace(made, **changes)


def bottleneck():
    """The same, with a step of a quarter of the time: no setting keeps it busy."""
    made = made_loader()
    rows = [
        row if row.gpu_idle is None else replace(row, gpu_idle=0.2 + row.gpu_idle * 0.7)
        for row in made.rows
    ]
    rows[7] = replace(rows[7], gpu_idle=0.34)
    return replace(
        made,
        rows=rows,
        recommended=7,
        demand=replace(made.demand, step_seconds=STEP_SECONDS / 4),
    )


UNKNOWN = {
    "lengths": None,
    "demand": None,
    "device_name": "CPU",
    "epoch_batches": None,
    "epoch_examples": None,
    "warnings": [],
}


def made_dali():
    """A generator that uses DALI, without a step to hold it against."""
    rows = [
        replace(
            _row({"eval_mode": mode, "num_threads": threads}, threads), gpu_idle=None
        )
        for mode in ("eager", "sync_cpu")
        for threads in (1, 2)
    ]
    return made_loader(
        **UNKNOWN,
        kind="dali",
        rows=rows,
        recommended=1,
        reproduced=Reproduced(
            batches=3, first_difference=1, what="log_mel has other values"
        ),
        target=WorkloadRecord(spec="audio.py:make_batches", options={}),
        reason="eval_mode=eager num_threads=2 is the fastest",
    )


def made_iterable():
    """Any iterable of batches, measured as it is, with nothing to compare and nothing else known."""
    row = LoaderRow(
        arguments={},
        workers=0,
        outcome="ok",
        examples_per_second=52.5,
        trials=1,
        batches=3,
        examples=96,
        first_batch_seconds=0.4,
    )
    return made_loader(
        **UNKNOWN,
        kind="iterable",
        rows=[row],
        recommended=0,
        reproduced=None,
        settings={},
        batch=None,
        reason="",
    )


def all_failed():
    """Every setting failed."""
    error = "ValueError: item 17 has no audio"
    rows = [
        LoaderRow(arguments={"num_workers": n}, workers=n, outcome="error", error=error)
        for n in (0, 2)
    ]
    return made_loader(
        rows=rows,
        recommended=None,
        reason="Nothing is recommended: all 2 settings failed.",
    )


def hostile_loader(text):
    """A loader in which every string that a file can freely choose holds this text."""
    made = made_loader()
    rows = [
        replace(row, arguments={**row.arguments, text: text}, error=text)
        for row in made.rows
    ]
    return replace(
        made,
        rows=[replace(rows[0], arguments={text: 1}), *rows[1:]],
        target=WorkloadRecord(spec=text, options={text: text}),
        settings={**made.settings, text: text},
        device_name=text,
        batch=text,
        demand=replace(made.demand, device_name=text),
        reason=text,
        reproduced=Reproduced(batches=2, first_difference=0, what=text),
        warnings=[text],
    )


def loaded(loader=None, *, sweep=False):
    """A run with a loader's tuning alone; with a probe and a sweep of tables on request."""
    others = {"probe": made_probe(), "sweep": made_sweep()} if sweep else {}
    return RunResults(name="librispeech-100", loader=loader or made_loader(), **others)


def _row(arguments, workers, factor=2):
    rate = 250.0 * max(1, workers) / (1 + 0.04 * workers) * (1 + 0.005 * factor)
    needed = BATCH_EXAMPLES / STEP_SECONDS
    idle = max(0.012 / factor, 1 - rate / needed)
    return LoaderRow(
        arguments=arguments,
        workers=workers,
        outcome="ok",
        rounds=2 if workers >= 4 else 1,
        trials=3,
        batches=120,
        examples=120 * BATCH_EXAMPLES,
        examples_per_second=rate,
        batches_per_second=rate / BATCH_EXAMPLES,
        length_per_second=rate * 12.7,
        examples_per_second_spread=0.03,
        first_batch_seconds=0.9 + 0.1 * workers,
        wait_p50_seconds=BATCH_EXAMPLES / rate * 0.6,
        wait_p99_seconds=BATCH_EXAMPLES / rate * 3,
        processors=0.95 * workers + 0.4,
        memory_bytes=(400 + 310 * workers) * MIB,
        worker_bytes=310 * MIB,
        shared_bytes=workers * factor * 16 * MIB,
        batch_bytes=16 * MIB,
        growth_bytes_per_batch=0.0,
        gpu_idle=idle,
        estimated_epoch_seconds=892 * STEP_SECONDS / (1 - idle),
    )
