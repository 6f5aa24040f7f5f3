"""The documentation's pages: their commands run, their help and pictures are fresh, and the site builds strictly."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cli.conftest import run_here_in, write_lengths

from batchtune.cli.app import load_command

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted(EXAMPLES.rglob("*.md"))]
# Several machines or GPUs, objects behind URLs, and launchers that may lack: these commands are only parsed. Those of
# the example scripts run in test_example_scripts.py, the workflow's in test_examples_ci.py.
ELSEWHERE = re.compile(
    r"srun|--nnodes|--nproc-per-node|accelerate launch|://|--engine ray|cuda:1|eval_mode|pip install|-m pytest"
    r"|examples/scripts/|\$RUN"
)
LAW = "law:constant=100MiB,linear=1MiB,limit=4GiB,seconds=0.01,seconds_linear=1e-4"
# Real steps are few and small; a loader is measured for a moment.
SETTINGS = {
    "BATCHTUNE_NUM_LENGTHS": "2",
    "BATCHTUNE_MAX_LENGTHS": "2",
    "BATCHTUNE_SECONDS": "0.1",
    "BATCHTUNE_TRIALS": "1",
    "BATCHTUNE_TIME_TOLERANCE": "1000",
    "OMP_NUM_THREADS": "1",
}


def lines_of(page):
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    joined = re.sub(r"\\\n\s*", "", "".join(blocks))
    return list(dict.fromkeys(re.sub(r"\s+#.*", "", joined).splitlines()))


def script_of(name):
    spec = importlib.util.spec_from_file_location(
        name, EXAMPLES / "site" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_options_that_exist(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    lines = [line for page in PAGES for line in lines_of(page)]
    commands = [
        line[line.index("batchtune ") :] for line in lines if "batchtune " in line
    ]
    for line in commands:
        words = shlex.split(line)
        ends = [at for at, word in enumerate(words) if word in ("|", ">", "&&")]
        name, *arguments = words[1 : min(ends, default=None)]
        # Raises where an option is unknown or its value can't be parsed.
        load_command(name).make_context(name, arguments)


@pytest.fixture
def folder(made_once, tmp_path):
    """A folder with what the commands name, as run by a device whose memory is computed."""

    def make(folder):
        lengths = [1 + number % 23 for number in range(400)]
        write_lengths(folder / "train.csv", lengths)
        write_lengths(folder / "train.json", lengths)
        write_lengths(folder / "train-v2.csv", lengths)
        rows = "".join(
            f"{number}.wav\t{16000 * each}\n" for number, each in enumerate(lengths)
        )
        (folder / "train.tsv").write_text(f"/data\n{rows}")
        (folder / "train.yaml").write_text("max_batch_length: 60\nnum_buckets: 5\n")
        (folder / "examples").symlink_to(EXAMPLES)
        shutil.copy(Path(__file__).parent / "page_files" / "train.py", folder)
        (folder / "shards.py").write_text(
            "from train import make_loader as make_batches\n"
        )
        command = [
            sys.executable,
            EXAMPLES / "shards" / "make_shards.py",
            "--shards=2",
            "--wavs=64",
        ]
        subprocess.run(
            [*command, "--out", folder / "made"], check=True, capture_output=True
        )
        (folder / "shards").mkdir()
        deal(sorted((folder / "made").iterdir()), folder)
        tune = ["tune", "train.csv", f"--device={LAW}", "--run"]
        for run in ("batchtune-run", "my-run", "old-run", "new-run"):
            ran = run_here_in(folder, *tune, run)
            assert ran.returncode == 0, ran.stderr

    shutil.copytree(made_once("pages", make), tmp_path / "pages", symlinks=True)
    return tmp_path / "pages"


def deal(made, folder):
    """Deal the samples of some shards to 128, and their wavs to a folder."""
    (folder / "LibriSpeech" / "train-clean-100").mkdir(parents=True)
    numbers = iter(range(128))
    for path in made:
        with tarfile.open(path) as shard:
            members = shard.getmembers()
            for at in range(0, len(members), 3):
                name = folder / "shards" / f"train-{next(numbers):03d}.tar"
                with tarfile.open(name, "w") as dealt:
                    for member in members[at : at + 3]:
                        dealt.addfile(member, shard.extractfile(member))
            shard.extract(
                members[0], folder / "LibriSpeech" / "train-clean-100", filter="data"
            )


RUN_HERE = {
    str(page.relative_to(ROOT)): lines
    for page in PAGES
    if (lines := [line for line in lines_of(page) if not ELSEWHERE.search(line)])
}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run(page, folder):
    ours = {key: text for key, text in os.environ.items() if "BATCHTUNE_" not in key}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in RUN_HERE[page]:
        device = {"BATCHTUNE_DEVICE": LAW}
        if "python train.py" in line:
            device = {"BATCHTUNE_MEMORY": "400MiB"}
        if re.search("batchtune (tune|probe-oom) ", line):
            shutil.rmtree(folder / "batchtune-run", ignore_errors=True)
        ran = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", line],
            cwd=folder,
            env={**ours, **SETTINGS, **device, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        held = [0, 3] if "--fail-if" in line else [0]
        assert ran.returncode in held, (
            f"{line}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        )


def test_the_commands_pages_hold_their_help():
    pages = script_of("help_pages")
    for name in pages.COMMANDS:
        page = (pages.PAGES / f"{name}.md").read_text("utf-8")
        assert pages.fresh(name, page) == page, "run examples/site/help_pages.py"


def test_the_pictures_are_those_of_their_script():
    for name, drawn in script_of("pictures").drawings().items():
        assert (EXAMPLES / "pages" / name).read_text("utf-8") == drawn


@pytest.mark.process
def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("material")
    config = EXAMPLES / "site" / "mkdocs.yml"
    build = [
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        config,
        "--site-dir",
        tmp_path,
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", *build],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "commands" / "tune.html").read_text("utf-8")
    assert not re.search(r'(src|href)="https?:', page)
