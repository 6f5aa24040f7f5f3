"""The probe's answer against the truth on CUDA, with real models: found by brute force, in steps of one example."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from gpu.on_cuda import GIB, settings, supervise

from batchtune.lengths import Lengths
from batchtune.probe.probing import run_probe
from batchtune.results import BatchShape, Probe

pytestmark = pytest.mark.usefixtures("one_nursery")
LANGUAGE_MODEL = "builtin:transformer-lm"
# A tiny language model takes some 0.2 MiB a token: tens of examples of these lengths fill 1 GiB.
TOKENS = Lengths.of([64.0, 128.0, 256.0] * 200)
NEARLY = 0.9


def largest_by_brute_force(
    workload: str,
    options: dict[str, Any],
    memory_bytes: int,
    length: float,
    answer: int,
    most: int,
) -> int:
    """The largest batch size that fits, by trying one after the other from the answer until three in a row did not.

    If the answer does not fit, from one example.
    """
    largest = 0
    failed = 0
    with supervise(workload, options, memory_bytes=memory_bytes) as supervisor:
        supervisor.start()
        first = (
            answer
            if supervisor.measure(BatchShape(answer, length), 0).trial.outcome == "ok"
            else 1
        )
        for batch_size in range(first, most + 1):
            trial = supervisor.measure(BatchShape(batch_size, length), batch_size).trial
            assert trial.outcome in ("ok", "oom"), trial.error
            if trial.outcome == "ok":
                largest, failed = batch_size, 0
            elif (failed := failed + 1) == 3:
                break
    return largest


def run_in_turns(
    probe: Probe, rounds: int, workload: str, options: dict[str, Any], memory_bytes: int
) -> list[str]:
    """Outcomes of the frontier's shapes, one after the other, in a fresh worker that keeps its cache."""
    allocator = probe.settings["allocator"]
    with supervise(
        workload, options, memory_bytes=memory_bytes, allocator=allocator
    ) as supervisor:
        supervisor.start()
        shapes = [
            BatchShape(point.batch_size, point.length) for point in probe.frontier
        ]
        return [
            supervisor.step(shape).trial.outcome
            for _ in range(rounds)
            for shape in shapes
        ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("dtype", "checkpoint"),
    [("fp32", False), ("bf16", True)],
    ids=["whole", "checkpointed"],
)
@pytest.mark.usefixtures("a_nursery_of_its_own")
@pytest.mark.parametrize("expandable", [False, True])
def test_a_real_models_frontier_is_the_truth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    checkpoint: bool,
    expandable: bool,
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{expandable}")
    options = {"size": "tiny", "dtype": dtype, "checkpoint": checkpoint}
    probe = run_probe(
        TOKENS, settings(LANGUAGE_MODEL, options, memory_bytes=GIB), tmp_path
    )
    for point in probe.frontier:
        truth = largest_by_brute_force(
            LANGUAGE_MODEL, options, GIB, point.length, point.batch_size, 600
        )
        assert point.batch_size <= truth
        is_near = point.batch_size >= NEARLY * truth - 1
        # What fits alone may not fit into the segments that other shapes left: then the probe has seen it fail.
        was_given_up = any(
            trial.outcome == "oom"
            and trial.length == point.length
            and point.batch_size < trial.batch_size <= truth
            for trial in probe.trials
        )
        assert is_near or (was_given_up and not expandable)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("compile", "bf16"),
    [(True, False), (True, True), (False, True)],
    ids=["compiled", "compiled bf16", "eager bf16"],
)
def test_the_frontier_of_a_compiled_or_eager_model_fits(
    tmp_path: Path, compile: bool, bf16: bool
) -> None:
    if compile:
        pytest.importorskip("triton")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("torch.compile needs a C compiler here")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            pytest.skip("torch.compile needs Python's headers (Python.h) here")
    options = {"compile": compile, "bf16": bf16}
    lengths = Lengths.of([2.0, 4.0, 8.0] * 200)
    probe = run_probe(
        lengths, settings("Compiled", options, memory_bytes=GIB), tmp_path
    )
    assert [point.length for point in probe.frontier] == [2.0, 4.0, 8.0]
    assert set(run_in_turns(probe, 3, "Compiled", options, GIB)) == {"ok"}
    assert all(point.batch_size >= 10 for point in probe.frontier)
