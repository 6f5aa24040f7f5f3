"""`batchtune export` as a user runs it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cli.conftest import Run
from exports.stream_runs import made_stream
from report_records import made_probe, made_sweep, without_recommendation

from batchtune.exports import FRAMEWORKS, Tuned, export_of
from batchtune.exports.run_configs import render_sampler_yaml, render_stream_yaml, sampler_config, stream_config
from batchtune.results import PROBE_FILE, SAMPLER_FILE, STREAM_FILE, SWEEP_FILE, write_result

TRAINING = """\
# my training
seed: 1234
dynamic_batch_sampler:
  max_batch_length: 100  # seconds
  num_buckets: 60
  shuffle: true
number_of_epochs: 10
"""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "batchtune-run"
    folder.mkdir()
    write_result(folder / SWEEP_FILE, made_sweep())
    (folder / SAMPLER_FILE).write_text(render_sampler_yaml(sampler_config(made_sweep())), encoding="utf-8")
    return folder


def expected(framework: str, config: str = "batchtune-run/sampler.yaml") -> str:
    return export_of(framework).render(Tuned(sweep=made_sweep(), config=config))


@pytest.mark.usefixtures("run_folder")
def test_the_export_goes_to_stdout(batchtune: Run) -> None:
    ran = batchtune("export", "--to", "espnet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected("espnet"), "")


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize("given", ["batchtune-run", "./batchtune-run", "{here}/batchtune-run"])
def test_the_config_is_named_from_the_working_folder(batchtune: Run, tmp_path: Path, given: str) -> None:
    ran = batchtune("export", given.format(here=tmp_path), "--to", "pytorch")
    assert ran.stdout == expected("pytorch")


def test_an_edited_sampler_yaml_is_pointed_out(batchtune: Run, run_folder: Path) -> None:
    config = run_folder / "sampler.yaml"
    text = config.read_text()
    last = text[: text.index("shuffle:")].rstrip().rpartition(" ")[2]
    config.write_text(text.replace(f" {last}\nshuffle:", f" {int(last.rstrip(']')) - 1}]\nshuffle:"))
    for command in ("report", "export --to nemo"):
        assert "Warning: batchtune-run/sampler.yaml was edited" in batchtune(*command.split()).stderr


def test_pools_that_the_sweep_does_not_recommend_are_pointed_out(batchtune: Run, run_folder: Path) -> None:
    config = run_folder / "sampler.yaml"
    config.write_text(config.read_text() + "sampler: pooled\npool_size: 20000\n")
    warned = "Warning: batchtune-run/sampler.yaml was edited: pool_size differs from that of sweep.json"
    assert warned in batchtune("report").stderr


@pytest.mark.parametrize("framework", ["pytorch", "lightning", "transformers", "accelerate"])
def test_code_that_reads_a_damaged_sampler_yaml_is_an_error(batchtune: Run, run_folder: Path, framework: str) -> None:
    config = run_folder / "sampler.yaml"
    config.write_text(config.read_text().replace("shuffle: true", "shuffle: 7"))
    ran = batchtune("export", "--to", framework)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: batchtune-run/sampler.yaml is damaged: ")
    assert "create the file again with `batchtune sweep-buckets`" in ran.stderr
    ran = batchtune("export", "--to", "nemo")  # which does not read it
    assert ran.returncode == 0
    assert ran.stderr.startswith("Warning: batchtune-run/sampler.yaml is damaged: ")


@pytest.mark.usefixtures("run_folder")
def test_the_environment_names_the_framework(batchtune: Run) -> None:
    assert batchtune("export", env={"BATCHTUNE_TO": "fairseq"}).stdout == expected("fairseq")


@pytest.mark.usefixtures("run_folder")
def test_it_goes_to_a_file(batchtune: Run, tmp_path: Path) -> None:
    ran = batchtune("export", "--to", "lightning", "-o", "batches.py")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert (tmp_path / "batches.py").read_text(encoding="utf-8") == expected("lightning")


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize("output", [[], ["-o", "-"], ["-o", "x.yaml"]], ids=["stdout", "dash", "file"])
def test_as_json(batchtune: Run, tmp_path: Path, output: list[str]) -> None:
    ran = batchtune("export", "--to", "espnet", "--json", *output)
    document = json.loads(ran.stdout)
    assert list(document) == ["meta", "framework", "title", "file", "content"]
    assert (document["framework"], document["title"]) == ("espnet", "ESPnet")
    assert document["content"] == expected("espnet")
    assert document["file"] == ("x.yaml" if output == ["-o", "x.yaml"] else "batchtune_espnet.yaml")
    assert (tmp_path / "x.yaml").exists() == (output == ["-o", "x.yaml"])


def test_the_frameworks_are_listed(batchtune: Run) -> None:
    lines = batchtune("export", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(FRAMEWORKS)
    assert [one["framework"] for one in json.loads(batchtune("export", "--list", "--json").stdout)] == list(FRAMEWORKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name it with --to. Known frameworks: speechbrain,"),
        (["--to", "espnt"], "Did you mean 'espnet'?"),
        (["--to", "Lightning"], "Did you mean 'lightning'?"),
        (["--to", "keras"], "Known frameworks: speechbrain,"),
        (["--to", "nemo", "--patch", "x.yaml"], "--patch needs --to speechbrain"),
        (["--to", "speechbrain", "--key-path", "a.b"], "Add --patch FILE"),
    ],
)
@pytest.mark.usefixtures("run_folder")
def test_wrong_usage(batchtune: Run, arguments: list[str], message: str) -> None:
    ran = batchtune("export", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_without_a_run(batchtune: Run, tmp_path: Path) -> None:
    ran = batchtune("export", "--to", "espnet")
    assert ran.returncode == 1
    assert "There is no run folder batchtune-run" in ran.stderr
    (tmp_path / "batchtune-run").mkdir()
    assert "holds neither probe.json nor sweep.json" in batchtune("export", "--to", "espnet").stderr
    write_result(tmp_path / "batchtune-run" / PROBE_FILE, made_probe())
    ran = batchtune("export", "--to", "espnet")
    assert ran.returncode == 1
    assert "holds no sweep.json" in ran.stderr and "batchtune sweep-buckets MANIFEST" in ran.stderr


def test_nothing_recommended(batchtune: Run, run_folder: Path) -> None:
    write_result(run_folder / SWEEP_FILE, without_recommendation(made_sweep()))
    ran = batchtune("export", "--to", "pytorch", "-o", "x.py")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "recommends nothing" in ran.stderr
    assert not (run_folder.parent / "x.py").exists()


# --patch


@pytest.fixture
def training(run_folder: Path) -> Path:
    path = run_folder.parent / "train.yaml"
    path.write_text(TRAINING, encoding="utf-8")
    path.chmod(0o640)
    return path


def patched() -> str:
    from batchtune.exports.speechbrain import patch_speechbrain

    return patch_speechbrain(TRAINING, Tuned(sweep=made_sweep()), name="train.yaml").text


def test_a_training_file_is_patched_in_place(batchtune: Run, training: Path) -> None:
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert training.read_text(encoding="utf-8") == patched() != TRAINING
    assert stat.S_IMODE(training.stat().st_mode) == 0o640
    assert "--- train.yaml\n+++ train.yaml (tuned)\n@@" in ran.stderr
    assert "\n-  max_batch_length: 100" in ran.stderr
    assert sorted(path.name for path in training.parent.iterdir()) == ["batchtune-run", "train.yaml"]


def test_patching_once_more_changes_nothing(batchtune: Run, training: Path) -> None:
    batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    before = training.stat()
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert (ran.returncode, ran.stderr) == (0, "train.yaml has these values already.\n")
    assert (training.stat().st_ino, training.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_patched_file_can_go_elsewhere(batchtune: Run, training: Path) -> None:
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml", "-o", "-", "--quiet")
    assert (ran.stdout, ran.stderr) == (patched(), "")
    batchtune("export", "--to", "speechbrain", "--patch", "train.yaml", "-o", "new.yaml")
    assert (training.parent / "new.yaml").read_text(encoding="utf-8") == patched()
    assert training.read_text(encoding="utf-8") == TRAINING


@pytest.mark.usefixtures("run_folder", "training")
def test_a_patched_file_never_replaces_a_result(batchtune: Run, tmp_path: Path) -> None:
    result = tmp_path / "batchtune-run" / "sweep.json"
    before = result.read_bytes()
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml", "-o", result)
    assert ran.returncode == 2 and "is a file of a run folder" in ran.stderr
    assert result.read_bytes() == before


def test_a_patch_as_json(batchtune: Run, training: Path) -> None:
    document = json.loads(batchtune("export", "--to", "speechbrain", "--patch", "train.yaml", "--json").stdout)
    assert (document["file"], document["content"]) == ("train.yaml", patched())
    assert training.read_text(encoding="utf-8") == patched()


def test_a_file_that_can_not_be_patched_stays_as_it_is(batchtune: Run, training: Path) -> None:
    missing = batchtune("export", "--to", "speechbrain", "--patch", "missing.yaml")
    assert missing.returncode == 1 and "missing.yaml does not exist" in missing.stderr
    training.write_bytes(b"\xff\xfe")
    damaged = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml")
    assert damaged.returncode == 1 and "not UTF-8" in damaged.stderr
    assert training.read_bytes() == b"\xff\xfe"


def test_a_key_path_is_handed_on(batchtune: Run, training: Path) -> None:
    ran = batchtune("export", "--to", "speechbrain", "--patch", "train.yaml", "--key-path", "no.such.place")
    assert ran.returncode != 0
    assert training.read_text(encoding="utf-8") == TRAINING


@pytest.fixture
def stream_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "batchtune-run"
    folder.mkdir()
    write_result(folder / STREAM_FILE, made_stream())
    return folder


@pytest.mark.usefixtures("stream_folder")
def test_a_run_of_a_stream_is_exported(batchtune: Run) -> None:
    ran = batchtune("export", "--to", "webdataset")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == export_of("webdataset").render(Tuned(stream=made_stream()))
    listed = json.loads(batchtune("export", "--to", "nemo-tarred", "--json").stdout)
    assert (listed["title"], listed["file"]) == ("NeMo with tarred data", "tarred_train_ds.yaml")


def test_an_export_names_the_command_for_the_sweep_that_it_needs(
    batchtune: Run, stream_folder: Path, run_folder_of_tables: Path
) -> None:
    ran = batchtune("export", "--to", "nemo")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "Error: batchtune-run holds no sweep.json: nothing is recommended yet" in ran.stderr
    assert "batchtune sweep-buckets MANIFEST --run batchtune-run" in ran.stderr
    ran = batchtune("export", str(run_folder_of_tables), "--to", "lhotse-shar")
    assert "tables holds no stream.json: nothing is recommended yet" in ran.stderr
    assert "batchtune sweep-stream SOURCE --run tables" in ran.stderr


@pytest.fixture
def run_folder_of_tables(tmp_path: Path) -> Path:
    write_result(tmp_path / "tables" / SWEEP_FILE, made_sweep())
    return Path("tables")


def test_an_edited_stream_yaml_is_pointed_out(batchtune: Run, stream_folder: Path) -> None:
    text = render_stream_yaml(stream_config(made_stream()))
    (stream_folder / "stream.yaml").write_text(text.replace("buffer_size: 1024", "buffer_size: 99"), encoding="utf-8")
    warned = "Warning: batchtune-run/stream.yaml was edited: buffer_size differs from that of stream.json"
    for command in ("report", "export --to webdataset"):
        assert warned in batchtune(*command.split()).stderr
    (stream_folder / "stream.yaml").write_text(text, encoding="utf-8")
    assert "edited" not in batchtune("report").stderr
    (stream_folder / "stream.yaml").write_text("format: 3", encoding="utf-8")
    ran = batchtune("export", "--to", "webdataset")
    assert (ran.returncode, ran.stdout) == (1, "") and ran.stderr.startswith("Error: batchtune-run/stream.yaml ")


@pytest.mark.usefixtures("stream_folder")
def test_a_recipe_of_a_stream_is_patched_in_place(batchtune: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "train.yaml"
    recipe.write_text("sample_rate: 16000\nbatch:\n  sampler_kwargs:\n    target_batch_numel: 720000 # 45 s\n")
    ran = batchtune("export", "--to", "speechbrain-stream", "--patch", "train.yaml")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "+    target_batch_numel: 8960000 # 45 s" in ran.stderr
    assert "Give make_dataloader looped_nominal_epoch=395" in ran.stderr
    assert "  buffersize: 1024\n" in recipe.read_text()
