"""Warnings about figures that can't be trusted."""

import msgspec
import pytest
from report_records import GIB, made_probe, made_trial

from batchtune.results import DeviceProcess
from batchtune.trust import (
    busy_with,
    settings_differences,
    settings_warnings,
    trust_warnings,
)

MIB = 1 << 20


def device(**changes):
    free = {"free_bytes": 139 * GIB, "outside_bytes": GIB}
    return msgspec.structs.replace(made_probe().device, **{**free, **changes})


def trial(**changes):
    return msgspec.structs.replace(
        made_trial(0, changes.pop("outcome", "ok")), **changes
    )


def test_a_device_left_alone_gives_no_warning():
    quiet = {
        "outside_bytes": GIB,
        "sm_clock_mhz": 1980,
        "throttle_reasons": [],
        "step_seconds_spread": 0.001,
    }
    assert (
        trust_warnings(device(processes=[]), [trial(**quiet) for _ in range(10)]) == []
    )


@pytest.mark.parametrize(
    ("processes", "who"),
    [
        ([], None),
        ([(1, 9 * MIB), (2, 63 * MIB)], None),
        ([(4711, 3 * GIB)], "1 other process (4711 with 3 GiB)"),
        (
            [(815, None), (7, GIB), (8, 8 * MIB)],
            "2 other processes (815, 7 with 1 GiB)",
        ),
    ],
)
def test_other_processes_are_named_with_their_memory(processes, who):
    found = [DeviceProcess(pid=pid, used_bytes=used) for pid, used in processes]
    assert busy_with(found) == who
    told = trust_warnings(device(processes=found, other_processes=len(found)), [])
    assert [text.split(". ")[0] for text in told] == (
        [f"Also on the device: {who}"] if who else []
    )


def test_a_throttled_clock_is_reported_with_its_reasons():
    trials = [
        trial(throttle_reasons=["power cap", "thermal slowdown by the driver"]),
        trial(throttle_reasons=["power cap"]),
        trial(throttle_reasons=[]),
        trial(throttle_reasons=["sync boost"], outcome="oom"),
    ]
    told = trust_warnings(device(), trials)[0]
    assert "(power cap in 2, thermal slowdown by the driver in 1 of 3 trials)" in told


@pytest.mark.parametrize(
    ("others", "threads", "told"), [(0.2, 2, False), (0.8, 2, True), (0.8, 1, False)]
)
def test_programs_that_take_processors_give_a_warning(others, threads, told):
    cpu = device(
        kind="cpu", processors=2, settings={"threads": threads}, other_processors=2.0
    )
    found = trust_warnings(cpu, [trial(other_processors=others)])
    assert [text.split(":")[0] for text in found] == [
        f"Other programs took {others} of 2 processors while steps were timed"
    ] * told
    assert "while the workload was built" in trust_warnings(cpu, [])[0]


def test_another_probe_on_the_cpu_gives_a_warning():
    cpu = device(
        kind="cpu", processors=2, processes=[DeviceProcess(pid=7, used_bytes=None)]
    )
    assert trust_warnings(cpu, [])[0].startswith(
        "Another probe (process 7) used the CPU when this one began"
    )


@pytest.mark.parametrize(("disturbed", "told"), [(1, False), (2, True)])
def test_scattered_times_in_over_a_quarter_of_trials_warn(disturbed, told):
    spreads = [0.26 * 0.25] * disturbed + [0.14 * 0.25] * (4 - disturbed)
    found = trust_warnings(
        device(),
        [trial(step_seconds=0.25, step_seconds_spread=spread) for spread in spreads],
    )
    assert [
        text.startswith("The times of a trial's steps differ by more than 15%")
        for text in found
    ] == [True] * told


@pytest.mark.parametrize(
    ("grown", "remedy"),
    [(13 * GIB, None), (13 * GIB + 1, "1025MiB"), (15 * GIB, f"{3 * 1024}MiB")],
)
def test_memory_outside_the_allocator_that_grows_names_a_reserve(grown, remedy):
    # 126 GiB limit and 1 GiB reserve of 140 GiB that were free.
    watched = device(free_bytes=140 * GIB, limit_bytes=126 * GIB, reserve_bytes=GIB)
    found = trust_warnings(
        watched, [trial(outside_bytes=GIB), trial(outside_bytes=grown)]
    )
    assert [f"--reserve {remedy}," in text for text in found] == (
        [True] if remedy else []
    )


def test_a_cpu_limit_beyond_free_memory_gives_a_warning():
    cpu = device(kind="cpu", processors=2, limit_bytes=20 * GIB, free_bytes=10 * GIB)
    assert trust_warnings(cpu, [])[0].startswith(
        "The limit is 20 GiB, but only 10 GiB of memory were free"
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "0", "cudnn_benchmark": False}, False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, True),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, True),
        ({"cudnn_benchmark": True}, True),
    ],
)
def test_settings_that_distort_give_a_warning(settings, told):
    assert len(settings_warnings(settings)) == told
    assert trust_warnings(device(settings=settings), []) == settings_warnings(settings)


@pytest.mark.parametrize(
    ("before", "now", "starts"),
    [
        (
            {"torch": "2.6.0"},
            {"torch": "2.7.0"},
            ["PyTorch was 2.6.0, and 2.7.0 later"],
        ),
        (
            {"settings": {"a": "tf32"}},
            {"settings": {"a": "ieee"}},
            ["a was tf32, and ieee later"],
        ),
        (
            {"settings": {}},
            {"settings": {"a": "x:1"}},
            ["a was not set, and x:1 later"],
        ),
        ({"driver": None}, {"driver": "570"}, []),
    ],
)
def test_a_setting_that_changed_in_between_is_reported(before, now, starts):
    told = settings_differences(device(**before), device(**now))
    assert [text.partition(":")[0] for text in told] == [
        start.partition(":")[0] for start in starts
    ]
