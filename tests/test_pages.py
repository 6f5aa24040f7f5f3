"""The documentation's pages: their commands run, their help and pictures are fresh, and the site builds strictly."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cli.conftest import run_here_in, write_lengths
from started import python

from batchtune.cli.app import load_command

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted(EXAMPLES.rglob("*.md"))]
# These commands are only parsed: several machines or GPUs, objects behind URLs, launchers that may lack, and probes of
# scripts, which test_example_scripts.py holds; test_examples_ci.py runs the workflow's.
ELSEWHERE = re.compile(
    r"srun|--nnodes|--nproc-per-node|--simulate-world-size|--ranks-per-node|accelerate launch|://|--engine ray"
    r"|cuda:1|eval_mode"
    r"|pip install|-m pytest|examples/scripts/|\$RUN|batchtune (tune|probe-oom|verify) .*python train.py"
    r"|batchtune run -- "
)
LAW = "law:constant=100MiB,linear=0.3MiB,limit=4GiB,seconds=0.01,seconds_linear=1e-4"
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
    """What the script of the site defines."""
    return runpy.run_path(str(EXAMPLES / "site" / f"{name}.py"))


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
    """A folder with what the commands name, and with runs on a device whose memory is computed."""

    def make(folder):
        make_data(folder)
        tune = ["tune", "train.csv", f"--device={LAW}", "--verify", "--run"]
        for command in (
            *(
                [*tune, run]
                for run in ("batchtune-run", "my-run", "old-run", "new-run")
            ),
            ["record", "--per-unit=16000", "--", sys.executable, "train.py"],
            ["sweep-stream", "shards/", "--workers=4"],
            ["scan", "train.csv", "--histogram", "-o", "histogram.parquet"],
        ):
            check(run_here_in(folder, *command), command[0])

    shutil.copytree(made_once("pages", make), tmp_path / "pages", symlinks=True)
    return tmp_path / "pages"


def make_data(folder):
    """Write shards of whole seconds, and their lengths as other manifests; some of the wavs lie in a folder."""
    maker = EXAMPLES / "shards" / "make_shards.py"
    for seconds in range(1, 9):
        options = ["--seconds", seconds, seconds, "--out", f"of-{seconds}"]
        python(maker, "--wavs=1", "--shards=16", *options, cwd=folder)
    (folder / "shards").mkdir()
    clips = folder / "LibriSpeech" / "train-clean-100"
    clips.mkdir(parents=True)
    lengths = []
    for number, path in enumerate(sorted(folder.glob("of-*/*.tar"))):
        lengths.append(int(path.parent.name[-1]))
        path = path.rename(folder / "shards" / f"train-{number:03d}.tar")
        with tarfile.open(path) as shard:
            shard.extractall(clips, filter="data")
    for name in ("train.csv", "train-v2.csv", "train.json"):
        write_lengths(folder / name, lengths)
    rows = [
        f"{number}.wav\t{round(16000 * each)}" for number, each in enumerate(lengths)
    ]
    (folder / "train.tsv").write_text("\n".join(["/data", *rows, ""]))
    (folder / "train.yaml").write_text("max_batch_length: 60\nnum_buckets: 5\n")
    (folder / "examples").symlink_to(EXAMPLES)
    shutil.copy(Path(__file__).parent / "page_files" / "train.py", folder)
    loader = "from train import make_loader as make_batches\n"
    (folder / "shards.py").write_text(loader)


def in_shell(folder, line, settings):
    ours = {key: text for key, text in os.environ.items() if "BATCHTUNE_" not in key}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", line],
        cwd=folder,
        env={**ours, **settings, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def check(ran, line):
    held = [0, 3] if "--fail-if" in line else [0]
    output = f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert ran.returncode in held, f"{line}\n{output}"


def lines_to_run():
    """Each page's commands that can run here, but for those of pages before it."""
    seen = set()
    for page in PAGES:
        lines = [line for line in lines_of(page) if not ELSEWHERE.search(line)]
        new = [line for line in lines if line not in seen]
        seen.update(new)
        if new:
            yield pytest.param(new, id=str(page.relative_to(ROOT)))


@pytest.mark.slow
@pytest.mark.parametrize("lines", list(lines_to_run()))
def test_the_commands_of_a_page_run(lines, folder):
    run = folder / "batchtune-run"
    for line in lines:
        device = "cpu" if "tune-loader" in line else LAW
        settings = {**SETTINGS, "BATCHTUNE_DEVICE": device}
        settings["GITHUB_STEP_SUMMARY"] = str(folder / "summary.md")
        is_new = re.search("batchtune (tune|probe-oom) ", line)
        if is_new:
            shutil.rmtree(run)
        if "tune-loader" in line:
            (run / "loader.json").unlink(missing_ok=True)
        words = shlex.split(line)
        if words[0] == "batchtune" and not {"|", ">", "&&"} & set(words):
            ran = run_here_in(folder, *words[1:], env=settings)
        else:
            ran = in_shell(folder, line, settings)
        check(ran, line)
        if is_new:
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(folder / "my-run", run)


def test_the_commands_pages_hold_their_help():
    pages = script_of("help_pages")
    for name in pages["COMMANDS"]:
        page = (pages["PAGES"] / f"{name}.md").read_text("utf-8")
        assert pages["fresh"](name, page) == page, "run examples/site/help_pages.py"


def test_the_pictures_are_those_of_their_script():
    for name, drawn in script_of("pictures")["drawings"]().items():
        assert (EXAMPLES / "pages" / name).read_text("utf-8") == drawn


@pytest.mark.process
def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("material")
    places = ["--config-file", EXAMPLES / "site" / "mkdocs.yml", "--site-dir", tmp_path]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    python("-m", "mkdocs", "build", "--strict", *places, env=env)
    page = (tmp_path / "commands" / "tune.html").read_text("utf-8")
    assert not re.search(r'(src|href)="https?:', page)
