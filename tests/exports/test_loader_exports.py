"""The recommended arguments of a data loader: in loader.yaml, and in the config of every framework."""

import ast
import re

import pytest
from exports.stream_runs import PACKERS, content, executed, prose, rendered
from exports.test_export_conformance import check, every_export
from loader_records import (
    all_failed,
    made_dali,
    made_iterable,
    made_loader,
)
from msgspec.structs import replace
from report_records import made_sweep
from reports.changed import with_row
from ruamel.yaml import YAML

from batchtune.errors import ResultError
from batchtune.exports import FRAMEWORKS, export_of
from batchtune.exports.run_configs import loader_config, render_loader_yaml

BESIDE = {"prefetch_factor": 4, "pin_memory": True, "persistent_workers": True}
OTHERS = {"multiprocessing_context": "spawn", "in_order": False}
IN_PYTHON = [
    name
    for name in FRAMEWORKS
    if export_of(name).file.endswith(".py") and name not in PACKERS
]


def recommending(arguments, **changes):
    """A loader that recommends these arguments."""
    row = {"arguments": arguments, "workers": arguments["num_workers"]}
    return replace(with_row(made_loader(), **row), **changes)


ALL = recommending({"num_workers": 6, **BESIDE, **OTHERS})


def exported(name, loader):
    return rendered(name, made_sweep(), loader=loader)


# loader.yaml


def test_loader_yaml_reads_back_the_same_and_has_the_same_bytes():
    text = render_loader_yaml(ALL)
    assert text == render_loader_yaml(ALL)
    document = YAML(typ="safe").load(text)
    assert document["arguments"] == {"num_workers": 6, **BESIDE, **OTHERS}
    assert document["kind"] == "torch" and document["version"] == 1
    evidence = document["evidence"]
    assert evidence["target"] == "train.py:make_dataset root=data"
    assert evidence["examples_per_second"] == pytest.approx(870.7, abs=0.1)
    assert evidence["gpu_idle"] == 0.006
    assert text.startswith("# batchtune's recommendation for torch's DataLoader")


@pytest.mark.parametrize("loader", [made_dali(), made_iterable()])
def test_loader_yaml_of_other_kinds(loader):
    document = YAML(typ="safe").load(render_loader_yaml(loader))
    assert document["arguments"] == loader.recommended_row.arguments
    assert document["evidence"]["gpu_idle"] is None


def test_what_recommends_nothing_has_no_yaml():
    said = "No setting of the loader is recommended: Nothing is recommended"
    with pytest.raises(ResultError, match=said):
        loader_config(all_failed())


@pytest.mark.parametrize(
    "text",
    [
        "a: b\n- !!python/object:os.system {}",
        "\x1b[31m",
        "'\"\\ \u2028#",
        "\u202eA\U000e0041",
    ],
)
def test_strings_of_strangers_stay_strings_in_yaml(text):
    target = replace(ALL.target, spec=text)
    loader = recommending({text: text, "num_workers": 2}, target=target)
    written = render_loader_yaml(loader)
    assert YAML(typ="safe").load(written)["arguments"][text] == text
    assert all(character == "\n" or character.isprintable() for character in written)


# Frameworks


@every_export
@pytest.mark.parametrize("loader", [made_dali(), made_iterable(), all_failed()])
def test_other_kinds_and_failures_change_no_export(name, loader):
    assert exported(name, loader) == exported(name, None)


@every_export
def test_every_export_names_the_workers_and_what_was_measured(name):
    text = exported(name, ALL)
    check(name, text)
    same = content(name, text) == content(name, exported(name, None))
    assert same == (name in PACKERS)
    assert (
        "`batchtune tune-loader` measured the arguments of loader.yaml: 870.7 examples/s"
        in prose(text)
    )


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_dataloader_gets_all_arguments(name):
    text = exported(name, ALL)
    (loader,) = re.findall(r"^LOADER = ({.*?^})", text, re.MULTILINE | re.DOTALL)
    assert ast.literal_eval(loader) == {"num_workers": 6, **BESIDE, **OTHERS}
    assert "**LOADER" in text


def test_the_code_makes_a_dataloader_with_these_arguments():
    names = executed(exported("pytorch", recommending({"num_workers": 2, **BESIDE})))
    names["sampler_from_config"] = lambda *_: [[0]]
    loader = names["train_loader"]([1], [1.0], list, pin_memory=False)
    assert (loader.num_workers, loader.prefetch_factor) == (2, 4)
    assert (loader.persistent_workers, loader.pin_memory) == (True, False)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemo", {"num_workers": 6, "pin_memory": True}),
        ("nemo-tarred", {"num_workers": 6, "pin_memory": True}),
        ("espnet", {"num_workers": 6}),
        ("speechbrain", {"num_workers": 6}),
    ],
)
def test_configs_hold_what_they_can_and_name_the_rest(name, settings):
    text = exported(name, ALL)
    document = content(name, text)
    if name.startswith("nemo"):
        document = document["model"]["train_ds"]
    assert {key: document[key] for key in settings} == settings
    assert "Also recommended, and not set here: prefetch_factor=4, " in prose(text)


def test_fairseq_gets_a_flag():
    text = exported("fairseq", ALL)
    assert " --num-workers 6 " in text and "#     num_workers: 6\n" in text


def test_arguments_of_the_users_own_function_are_named():
    text = exported("pytorch", recommending({"num_workers": 2, "crop": 3}))
    assert "Also recommended, and not set here: crop=3." in prose(text)
