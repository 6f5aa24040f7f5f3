"""The device made by a law: what it computes, and what it is told."""

import pytest

from batchtune.errors import UsageError
from batchtune.probe.devices import DEVICE_FORMS, backends, is_device
from batchtune.probe.devices.law import Coefficients, MadeDevice
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape

LAW = "law:constant=1GB,linear=2MB,quadratic=5kB,limit=8GB,seconds=0.5,seconds_linear=1e-3"
SHAPE = BatchShape(4, 10.0)


def measured(law):
    settings = ProbeSettings(workload="law", options={}, device=law)
    return MadeDevice.of(settings, None, 0).measure(SHAPE, 3).trial


def test_memory_and_time_follow_the_coefficients():
    trial = measured(LAW)
    assert (trial.index, trial.outcome) == (3, "ok")
    assert trial.peak_bytes == 1e9 + 40 * 2e6 + 400 * 5e3
    assert trial.rest_bytes == 1e9
    assert trial.step_seconds == 0.5 + 40e-3


def test_all_tokens_count_and_targets_by_their_longest():
    law = Coefficients(constant=1, linear=2, quadratic=3, target=10)
    packed = BatchShape.packed([30, 10])
    assert law.bytes_of(packed) == 1 + 2 * 40 + 3 * (900 + 100)
    assert law.bytes_of(BatchShape(3, 5.0, 7.0)) == 1 + 2 * 15 + 3 * 75 + 10 * 21


def test_noise_spreads_the_peaks_by_as_much_as_it_says():
    trial = measured(f"{LAW},noise=0.03")
    without = Coefficients.parse(LAW).bytes_of(SHAPE)
    assert without < trial.peak_bytes <= 1.015 * without
    assert 0.02 * without < trial.peak_spread_bytes <= 0.03 * without


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        (
            "law:liner=2MB",
            "unknown coefficient 'liner'",
            "Did you mean 'linear'? Known",
        ),
        ("law:2MB", "unknown coefficient '2MB'", "Known are constant, linear"),
        ("law:linear", "the coefficient linear is ''", "or a size such as 2MB. Known"),
        ("law:linear=-1", "the coefficient linear is '-1'", "at least 0"),
        ("law:noise=1,noise=2", "the coefficient noise is given twice", ""),
    ],
)
def test_a_wrong_coefficient_is_named(value, message, hint):
    with pytest.raises(UsageError) as raised:
        ProbeSettings(workload="law", options={}, device=value)
    assert message in raised.value.message
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(
    "options",
    [
        {"command": ["python", "x.py"]},
        {"nproc_per_node": 2},
        {"simulate_world_size": 2},
    ],
    ids=str,
)
def test_a_law_takes_neither_scripts_nor_ranks(options):
    with pytest.raises(UsageError, match=r"--device law:…"):
        ProbeSettings(workload="law", options={}, device=LAW, **options)


def test_no_device_is_made_by_a_law_unless_asked():
    assert "law" not in DEVICE_FORMS
    assert not is_device(LAW)
    assert all("law" not in type(backend).__module__ for backend in backends())
