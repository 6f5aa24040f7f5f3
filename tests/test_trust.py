"""Warnings about figures that can't be trusted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from report_records import GIB, made_probe, made_trial

from batchtune.results import Device, DeviceProcess, Trial
from batchtune.trust import busy_with, settings_differences, settings_warnings, trust_warnings

MIB = 1 << 20


def device(**changes: Any) -> Device:
    free: dict[str, Any] = {"free_bytes": 139 * GIB, "outside_bytes": GIB}
    return msgspec.structs.replace(made_probe().device, **{**free, **changes})


def trial(**changes: Any) -> Trial:
    return msgspec.structs.replace(made_trial(0, changes.pop("outcome", "ok")), **changes)


def test_a_device_left_alone_gives_no_warning() -> None:
    quiet = {"outside_bytes": GIB, "sm_clock_mhz": 1980, "throttle_reasons": [], "step_seconds_spread": 0.001}
    assert trust_warnings(device(processes=[]), [trial(**quiet) for _ in range(10)]) == []


def test_unknown_facts_give_no_warning() -> None:
    assert trust_warnings(device(other_processes=None, free_bytes=None, outside_bytes=None), [trial()]) == []


@pytest.mark.parametrize(
    ("processes", "who"),
    [
        ([], None),
        ([(1, 9 * MIB), (2, 63 * MIB)], None),
        ([(4711, 3 * GIB)], "1 other process (4711 with 3 GiB)"),
        ([(815, None), (7, GIB), (8, 8 * MIB)], "2 other processes (7 with 1 GiB, 815)"),
        (
            [(pid, pid * GIB) for pid in (1, 2, 3, 4)],
            "4 other processes (4 with 4 GiB, 3 with 3 GiB, 2 with 2 GiB, ...)",
        ),
    ],
)
def test_other_processes_are_named_with_their_memory(processes: list[tuple[int, int | None]], who: str | None) -> None:
    found = [DeviceProcess(pid=pid, used_bytes=used) for pid, used in processes]
    assert busy_with(found) == who
    told = trust_warnings(device(processes=found, other_processes=len(found)), [])
    assert [text.split(". ")[0] for text in told] == ([f"Also on the device: {who}"] if who else [])


def test_processes_that_are_only_counted_give_a_warning() -> None:
    assert trust_warnings(device(other_processes=2), [])[0].startswith("Also on the device: 2 other processes. ")


def test_a_throttled_clock_is_reported_with_its_reasons() -> None:
    trials = [
        trial(throttle_reasons=["power cap", "thermal slowdown by the driver"]),
        trial(throttle_reasons=["power cap"]),
        trial(throttle_reasons=[]),
        trial(throttle_reasons=["sync boost"], outcome="oom"),
    ]
    assert trust_warnings(device(), trials)[0].startswith(
        "The GPU's clock was held down while steps were timed, in 2 of 3 trials (power cap in 2, thermal slowdown by "
        "the driver in 1)"
    )


@pytest.mark.parametrize(("clocks", "told"), [((1980, 1782), False), ((1980, 1781), True), ((1980,), False)])
def test_a_clock_that_varies_gives_a_warning(clocks: tuple[int, ...], told: bool) -> None:
    trials = [trial(sm_clock_mhz=clock) for clock in clocks] + [trial(sm_clock_mhz=300, outcome="oom")]
    assert bool(trust_warnings(device(), trials)) is told


def test_trials_of_a_single_timed_step_count_as_trials() -> None:
    scatters, single = trial(step_seconds=1.0, step_seconds_spread=0.5), trial(step_seconds=9.0)
    assert trust_warnings(device(), [scatters, *[single] * 27]) == []
    assert "in 2 of the 4 trials that passed" in trust_warnings(device(), [scatters, scatters, single, single])[0]


@pytest.mark.parametrize(("others", "threads", "told"), [(0.2, 2, False), (0.8, 2, True), (0.8, 1, False)])
def test_programs_that_take_processors_give_a_warning(others: float, threads: int, told: bool) -> None:
    cpu = device(kind="cpu", processors=2, settings={"threads": threads}, other_processors=2.0)
    found = trust_warnings(cpu, [trial(other_processors=others)])
    assert [text.split(":")[0] for text in found] == [
        f"Other programs took {others} of 2 processors while steps were timed"
    ] * told
    assert "while the workload was built" in trust_warnings(cpu, [])[0]


def test_another_probe_on_the_cpu_gives_a_warning() -> None:
    cpu = device(kind="cpu", processors=2, processes=[DeviceProcess(pid=7, used_bytes=None)])
    assert trust_warnings(cpu, [])[0].startswith("Another probe (process 7) used the CPU when this one began")


@pytest.mark.parametrize(("disturbed", "told"), [(1, False), (2, True)])
def test_scattered_times_in_over_a_quarter_of_trials_warn(disturbed: int, told: bool) -> None:
    spreads = [0.26 * 0.25] * disturbed + [0.14 * 0.25] * (4 - disturbed)
    found = trust_warnings(device(), [trial(step_seconds=0.25, step_seconds_spread=spread) for spread in spreads])
    assert [text.startswith("The times of a trial's steps differ by more than 15%") for text in found] == [True] * told


@pytest.mark.parametrize(
    ("grown", "remedy"), [(13 * GIB, None), (13 * GIB + 1, "1025MiB"), (15 * GIB, f"{3 * 1024}MiB")]
)
def test_memory_outside_the_allocator_that_grows_names_a_reserve(grown: int, remedy: str | None) -> None:
    # 126 GiB limit and 1 GiB reserve of 140 GiB that were free.
    watched = device(free_bytes=140 * GIB, limit_bytes=126 * GIB, reserve_bytes=GIB)
    found = trust_warnings(watched, [trial(outside_bytes=GIB), trial(outside_bytes=grown)])
    assert [f"--reserve {remedy}," in text for text in found] == ([True] if remedy else [])


def test_a_cpu_limit_beyond_free_memory_gives_a_warning() -> None:
    cpu = device(kind="cpu", processors=2, limit_bytes=20 * GIB, free_bytes=10 * GIB)
    assert trust_warnings(cpu, [])[0].startswith("The limit is 20 GiB, but only 10 GiB of memory were free")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, False),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, True),
        ({"cudnn_benchmark": True}, True),
        ({"cudnn_benchmark": False, "deterministic_algorithms": True, "cudnn_deterministic": True}, False),
    ],
)
def test_settings_that_distort_give_a_warning(settings: dict[str, Any], told: bool) -> None:
    assert len(settings_warnings(settings)) == told
    assert trust_warnings(device(settings=settings), []) == settings_warnings(settings)


@pytest.mark.parametrize(
    ("before", "now", "start"),
    [
        ({"torch": "2.6.0"}, {"torch": "2.7.0"}, "PyTorch was 2.6.0, and 2.7.0 later"),
        ({"driver": "550"}, {"driver": "570"}, "The driver was 550, and 570 later"),
        (
            {"settings": {"matmul_precision": "tf32"}},
            {"settings": {"matmul_precision": "ieee"}},
            "matmul_precision was tf32, and ieee later",
        ),
        (
            {"settings": {"cudnn_benchmark": False}},
            {"settings": {"cudnn_benchmark": True}},
            "cudnn_benchmark was off, and on later",
        ),
        (
            {"settings": {"a": 1}, "allocator": "native"},
            {"settings": {"a": 1, "PYTORCH_ALLOC_CONF": "x:1"}, "allocator": "native (x:1)"},
            "PYTORCH_ALLOC_CONF was not set, and x:1 later",
        ),
    ],
)
def test_a_setting_that_changed_in_between_is_reported(before: dict[str, Any], now: dict[str, Any], start: str) -> None:
    assert [text.split(":")[0].startswith(start.split(":")[0]) for text in differences(before, now)] == [True]
    assert differences(before, now)[0].startswith(start)


@pytest.mark.parametrize(("before", "now"), [({}, {}), ({"driver": None}, {"driver": "570"})])
def test_what_is_the_same_or_not_known_is_no_difference(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert differences(before, now) == []


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return settings_differences(device(**before), device(**now))
