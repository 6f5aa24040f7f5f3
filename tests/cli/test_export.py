"""`batchtune export` as a user runs it."""

import json

import pytest
from exports.stream_runs import made_stream, write_config
from msgspec.structs import replace
from report_records import made_sweep

from batchtune.exports import FRAMEWORKS, Tuned, export_of
from batchtune.results import (
    SAMPLER_FILE,
    STREAM_FILE,
    SWEEP_FILE,
    Proof,
    write_result,
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "batchtune-run"
    folder.mkdir()
    return folder


@pytest.fixture
def run_folder(folder):
    write_result(folder / SWEEP_FILE, made_sweep())
    write_config(folder, made_sweep())
    return folder


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize(
    ("output", "file"),
    [([], "batchtune_espnet.yaml"), (["-o", "new/x.yaml"], "new/x.yaml")],
    ids=["stdout", "file"],
)
def test_as_json(succeed, tmp_path, output, file):
    ran = succeed("export", "--to", "espnet", "--json", *output)
    document = json.loads(ran.stdout)
    config = Tuned(sweep=made_sweep(), config="batchtune-run/sampler.yaml")
    assert document.pop("meta")["format"] == "batchtune/export"
    assert document == {
        "framework": "espnet",
        "title": "ESPnet",
        "file": file,
        "content": export_of("espnet").render(config),
    }
    path = tmp_path / "new" / "x.yaml"
    assert path.exists() == (f"Wrote {path}." in ran.stderr) == bool(output)


def test_a_table_that_is_not_proven_is_exported_with_a_warning(succeed, run_folder):
    proof = Proof(limit_bytes=1, reason="no time was left to run it")
    write_result(run_folder / SWEEP_FILE, replace(made_sweep(), proof=proof))
    said = succeed("export", "--to", "espnet").stderr
    assert "are not proven: no time was left to run it." in said


@pytest.mark.parametrize("command", [["report"], ["export", "--to", "espnet"]])
def test_a_config_that_samplers_refuse_is_told(succeed, run_folder, command):
    config = run_folder / SAMPLER_FILE
    config.write_text(config.read_text().replace("num_buckets: 13", "num_buckets: 3"))
    ran = succeed(*command)
    damage = "sampler.yaml is damaged: num_buckets is 3, but the table's is 13"
    assert damage in ran.stderr
    assert ran.stdout
    config.unlink()
    ran = succeed(*command)
    assert "sampler.yaml does not exist. `batchtune tune` writes it." in ran.stderr
    assert ran.stdout


def test_the_frameworks_are_listed(batchtune):
    lines = batchtune("export", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(FRAMEWORKS)
    listed = json.loads(batchtune("export", "--list", "--json").stdout)
    assert [one["framework"] for one in listed] == list(FRAMEWORKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name it with --to. Known frameworks: speechbrain,"),
        (["--to", "Lightning"], "Did you mean 'lightning'?"),
        (["--to", "keras"], "Known frameworks: speechbrain,"),
    ],
)
@pytest.mark.usefixtures("run_folder")
def test_wrong_usage(batchtune, arguments, message):
    ran = batchtune("export", *arguments, code=2)
    assert ran.stdout == ""
    assert message in ran.stderr


def test_a_run_of_a_stream_is_exported(succeed, folder):
    write_result(folder / STREAM_FILE, made_stream())
    ran = succeed("export", "--to", "webdataset")
    assert "stream.yaml does not exist. `batchtune sweep-stream`" in ran.stderr
    assert ran.stdout == export_of("webdataset").render(Tuned(stream=made_stream()))
    tarred = json.loads(succeed("export", "--to", "nemo-tarred", "--json").stdout)
    assert tarred["title"] == "NeMo with tarred data"
    assert tarred["file"] == "tarred_train_ds.yaml"
