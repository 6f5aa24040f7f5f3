"""The workload, device and limit of a verification."""

import pytest
from msgspec.structs import asdict, replace
from verify.made_stepper import LIMIT_BYTES, made_probe

from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.results import WorkloadRecord
from batchtune.verify.plan import subject_of

LENGTHS = Lengths.of([1.0, 2.0, 30.0])
OWN = {"workload": "made.py:Made", "options": {"dim": 64}}
PROBE = replace(
    made_probe(LENGTHS),
    workload=WorkloadRecord(spec="made.py:Made", options={"dim": 64}),
    settings={
        "device": "cuda:1",
        "memory_bytes": 5 << 30,
        "memory_fraction": 0.8,
        "seed": 3,
        "reserve_bytes": 7,
    },
)


def subject(folder, **asked):
    return subject_of(
        LENGTHS,
        PROBE,
        {name: value for name, value in {**OWN, **asked}.items() if value is not None},
        folder,
    )


def probed(spec, **options):
    return replace(PROBE, workload=WorkloadRecord(spec=spec, options=options))


def test_all_but_own_code_is_as_it_was_probed(tmp_path):
    found = subject(tmp_path)
    settings = asdict(found.settings)
    # Batches that differ from a script's own no longer end anything: the probe went on.
    assert settings == {**settings, **PROBE.settings, **OWN, "force": True}
    assert found.limit_bytes == LIMIT_BYTES


def test_a_built_in_and_its_options_are_taken_from_the_record(tmp_path):
    probe = probed("builtin:transformer-lm", size="tiny")
    found = subject_of(LENGTHS, probe, {}, tmp_path)
    assert (found.settings.workload, found.settings.options) == (
        "builtin:transformer-lm",
        {"size": "tiny"},
    )


@pytest.mark.parametrize(
    "spec",
    ["subprocess:run", "builtin:made.py:Made", " builtin:transformer-lm", ""],
)
def test_no_code_is_run_that_only_a_file_names(tmp_path, spec):
    with pytest.raises(UsageError, match="runs no code that only a file names"):
        subject_of(LENGTHS, probed(spec), {}, tmp_path)


def test_own_code_gets_no_options_that_only_a_file_names(tmp_path):
    with pytest.raises(UsageError, match="passes it no such options") as caught:
        subject(tmp_path, options=None)
    assert "--set" in str(caught.value.hint)


def test_another_workload_does_not_take_the_options(tmp_path):
    found = subject(tmp_path, workload="made.py:Other", options=None)
    assert found.settings.options == {}


@pytest.mark.parametrize("wanted", [{"memory_bytes": 1 << 30}, {"ddp": True}], ids=str)
def test_with_other_memory_the_limit_is_new(tmp_path, wanted):
    assert subject(tmp_path, **wanted).limit_bytes is None


def test_without_a_probe_the_workload_must_be_named(tmp_path):
    speech = Lengths.of([1.0, 2.0, 30.0], unit="s")
    message = r"no training step to verify: .* holds no probe\.json"
    with pytest.raises(UsageError, match=message):
        subject_of(speech, None, {}, tmp_path)
    found = subject_of(
        LENGTHS, None, {"workload": "made.py:Made", "memory_bytes": 9}, tmp_path
    )
    assert (found.settings.memory_bytes, found.limit_bytes) == (9, None)
    assert not found.settings.force
