"""Warnings about figures that can't be trusted."""

import pytest
from msgspec.structs import replace
from report_records import GIB, made_probe, made_trial

from batchtune.results import DeviceProcess
from batchtune.trust import settings_differences, trust_warnings

MIB = 1 << 20


def device(processes=(), **changes):
    given = {
        "free_bytes": 139 * GIB,
        "outside_bytes": GIB,
        "processes": [
            DeviceProcess(pid=pid, used_bytes=used) for pid, used in processes
        ],
        **changes,
    }
    return replace(made_probe().device, **given)


def trial(**changes):
    outcome = changes.pop("outcome", "ok")
    return replace(made_trial(0, outcome), **changes)


QUIET = {
    "outside_bytes": GIB,
    "sm_clock_mhz": 1980,
    "throttle_reasons": [],
    "step_seconds_spread": 0.001,
}
SCATTERED = {"step_seconds": 0.25, "step_seconds_spread": 0.26 * 0.25}
STEADY = {"step_seconds": 0.25, "step_seconds_spread": 0.14 * 0.25}
CPU = {"kind": "cpu", "processors": 2}
BUSY = [{"other_processors": 0.8}]


@pytest.mark.parametrize(
    ("facts", "trials", "told"),
    [
        ({}, [QUIET] * 10, None),
        ({"processes": [(1, 9 * MIB), (2, 63 * MIB)]}, [], None),
        (
            {"processes": [(4711, 3 * GIB)]},
            [],
            "Also on the device: 1 other process (4711 with 3 GiB).",
        ),
        (
            {"processes": [(815, None), (7, GIB), (8, 8 * MIB)]},
            [],
            "Also on the device: 2 other processes (815, 7 with 1 GiB).",
        ),
        (
            {},
            [
                {"throttle_reasons": ["power cap", "thermal slowdown by the driver"]},
                {"throttle_reasons": ["power cap"]},
                {"throttle_reasons": []},
                {"throttle_reasons": ["sync boost"], "outcome": "oom"},
            ],
            "The GPU's clock was held down while steps were timed (power cap in 2, thermal slowdown by the driver in 1 "
            "of 3 trials)",
        ),
        ({**CPU, "settings": {"threads": 1}}, BUSY, None),
        (CPU, BUSY, "Other programs took 0.8 of 2 processors while steps were timed"),
        (
            {**CPU, "other_processors": 2.0},
            [],
            "Other programs took 2.0 of 2 processors while the workload was built",
        ),
        (
            {**CPU, "processes": [(7, None)]},
            [],
            "Another probe (process 7) used the CPU when this one began",
        ),
        (
            {**CPU, "limit_bytes": 20 * GIB, "free_bytes": 10 * GIB},
            [],
            "The limit is 20 GiB, but only 10 GiB of memory were free",
        ),
        ({}, [SCATTERED, STEADY, STEADY, STEADY], None),
        (
            {},
            [SCATTERED, SCATTERED, STEADY, STEADY],
            "The times of a trial's steps differ by more than 15%",
        ),
        (
            {"settings": {"CUDA_LAUNCH_BLOCKING": "0", "cudnn_benchmark": False}},
            [],
            None,
        ),
        (
            {"settings": {"CUDA_LAUNCH_BLOCKING": "1"}},
            [],
            "CUDA_LAUNCH_BLOCKING is set",
        ),
        (
            {"settings": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
            [],
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set",
        ),
        (
            {"settings": {"cudnn_benchmark": True}},
            [],
            "torch.backends.cudnn.benchmark is on",
        ),
    ],
)
def test_each_doubt_is_one_warning(facts, trials, told):
    found = trust_warnings(device(**facts), [trial(**each) for each in trials])
    assert [text.startswith(told) for text in found] == [True] * (told is not None)


@pytest.mark.parametrize(
    ("grown", "remedy"),
    [(13 * GIB, None), (13 * GIB + 1, "1025MiB")],
)
def test_memory_outside_the_allocator_that_grows_names_a_reserve(grown, remedy):
    # 126 GiB limit and 1 GiB reserve of 140 GiB that were free.
    watched = device(free_bytes=140 * GIB, limit_bytes=126 * GIB, reserve_bytes=GIB)
    trials = [trial(outside_bytes=GIB), trial(outside_bytes=grown)]
    found = trust_warnings(watched, trials)
    assert [f"--reserve {remedy}," in text for text in found] == (
        [True] if remedy else []
    )


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            {"torch": "2.6.0"},
            {"torch": "2.7.0"},
            "PyTorch was 2.6.0, and 2.7.0 later:",
        ),
        ({"settings": {}}, {"settings": {"a": "x:1"}}, "a was not set, and x:1 later:"),
        ({"driver": None}, {"driver": "570"}, None),
    ],
)
def test_a_setting_that_changed_in_between_is_reported(before, now, told):
    found = settings_differences(device(**before), device(**now))
    assert [text.startswith(told) for text in found] == [True] * (told is not None)
