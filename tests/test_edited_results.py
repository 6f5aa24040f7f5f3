"""Edited and damaged result files of a run: every command that reads them gives a result or one message."""

import contextlib
import copy
import itertools
import json
import random
import re
import shutil

import pandas as pd
import pytest
from cli.conftest import run_here
from exports.stream_runs import PACKERS
from loader_records import made_loader
from memory_laws import made_lengths
from ruamel.yaml import YAML

from batchtune.exports import FRAMEWORKS
from batchtune.results import Probe, read_result, write_result

LAW = ("--device", "law:constant=1GB,linear=10MB,quadratic=0.5MB,target=1MB,limit=8GB")
PROBE = (*LAW, "--num-lengths", 3, "--max-lengths", 4, "--quiet")
SWEEP = (
    *("--num-buckets", "2,4", "--quiet"),
    *("--strategy", "optimal", "--strategy", "speechbrain"),
)
STREAM = ("--buffer-size", 30, "--num-buckets", 4, "--quiet")
VERIFY = (*LAW, "--steps", 20, "--quiet")
FILES = (
    *("probe.json", "sweep.json", "stream.json", "loader.json", "verify.json"),
    *("sampler.yaml", "run.json", "trials.jsonl"),
)
KINDS = {"lengths": (), "pairs": ("--target-key", "tokens")}
# What no file may do to where it is shown, on a line of its own or as markup.
EVIL = (
    "\x1b]0;PWNED\x07",
    "\n::error::PWNED",
    "x" * 90 + " ::add-mask::PWNED",
    "<img src=x onerror=PWNED>",
    "\u202eA",
)
NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.5,
    1e-300,
    1e300,
    -1e300,
    10**6,
    10**15,
    10**18,
    2**62,
    2**63,
    2**64,
    10**40,
    10**400,
)
VALUES = (
    None,
    True,
    False,
    [],
    [1],
    [[]],
    {},
    {"a": [None]},
    "",
    "cuda:1",
    "builtin:conformer-ctc",
    *EVIL,
    *NUMBERS,
)


@pytest.fixture(scope="session")
def recorded(made_once):
    """Two runs, of lengths and of pairs of them, with their manifests: all files as commands write them."""

    def make(folder):
        for kind in KINDS:
            run = folder / kind
            lengths = made_lengths("speech", targets=kind == "pairs", count=120)
            columns = {"duration": lengths.values, "tokens": lengths.targets}
            pd.DataFrame(columns).to_csv(folder / f"{kind}.csv", index=False)
            manifest = (*manifest_of(folder, kind), "--run", run)
            now = "target_batch_numel=20,max_batch_numel=30"
            for command in (
                ("probe-oom", *manifest, *PROBE),
                ("sweep-buckets", *manifest, *SWEEP, "--current", "batch_size=4"),
                ("sweep-stream", *manifest, *STREAM, "--current", now),
                ("verify", *manifest, *VERIFY),
            ):
                ran = run_here(*command)
                assert ran.returncode == 0, ran.stderr
            lengths_of_run = read_result(run / "probe.json", Probe).lengths
            write_result(run / "loader.json", made_loader(lengths=lengths_of_run))

    return made_once("edited-results", make)


def manifest_of(folder, kind):
    return [folder / f"{kind}.csv", *KINDS[kind]]


# What an edit does


def edit(draw, tree):
    """Change one place, at any depth; fields of every kind are as likely, however often they repeat."""
    container, key = tree, draw.choice(places(tree))
    while (
        draw.random() < 0.75
        and isinstance(container[key], (dict, list))
        and container[key]
    ):
        container = container[key]
        key = draw.choice(places(container))
    draw.choice(EDITS)(draw, container, key)


def places(container):
    return (
        list(container) if isinstance(container, dict) else list(range(len(container)))
    )


def put(draw, container, key):
    container[key] = copy.deepcopy(draw.choice(VALUES))


def scale(draw, container, key):
    value = container[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        container[key] = type(value)(value * draw.choice((-1, 0, 2, 1000, 10**9)))
    else:
        put(draw, container, key)


def remove(draw, container, key):
    del container[key]


EDITS = (put, scale, remove)


def edited(draw, path):
    """Edit a file as its format has it."""
    is_of_lines = path.suffix == ".jsonl"
    text = path.read_text()
    if is_of_lines:
        tree = [json.loads(line) for line in text.splitlines()]
    elif path.suffix == ".yaml":
        tree = YAML(typ="safe").load(text)
    else:
        tree = json.loads(text)
    edit(draw, tree)
    lines = map(json.dumps, tree if is_of_lines else [tree])
    path.write_text("".join(f"{line}\n" for line in lines))


# What is done with an edited run


def commands(folder, kind, run, file=None):
    """Yield the commands that read a file; None: any."""
    manifest = manifest_of(folder, kind)
    if file in (None, "probe.json", "run.json"):
        yield ["sweep-buckets", *manifest, "--run", run.with_name("swept"), *SWEEP]
    if file in ("run.json", "trials.jsonl", "sampler.yaml"):
        return
    for report_format in ("terminal", "markdown", "html", "json"):
        yield ["report", run, "--format", report_format]
    rules = (
        "batches > 1",
        "padding_ratio > 8%",
        "verify.holds == false",
        "batches worse 2%",
        "stale > 2%",
        "gpu_idle > 5%",
        "loader.memory_bytes worse 5%",
    )
    gate = [word for rule in rules for word in ("--fail-if", rule)]
    gate += ["--baseline", run, "--junit-xml", run.with_name("gate.xml"), "--github"]
    yield ["report", run, *gate, "--manifest", *manifest]
    for name in FRAMEWORKS:
        yield ["export", run, "--to", name]


def hold(folder, kind, run, file):
    """Run every command on the run; anything but a result or one message is raised."""
    summary = run.with_name("summary.md")
    manifest = (*manifest_of(folder, kind), "--run", run)
    # Those that write into the run come last.
    writing = [["verify", *manifest, *VERIFY], ["probe-oom", *manifest, *PROBE]]
    for arguments in [*commands(folder, kind, run, file), *writing]:
        if arguments[0] == "sweep-buckets":
            shutil.copytree(run, run.with_name("swept"), dirs_exist_ok=True)
        ran = run_here(*arguments, env={"GITHUB_STEP_SUMMARY": str(summary)})
        assert ran.returncode in (0, 1, 2, 3), ran
        assert ran.returncode in (0, 3) or "Error: " in ran.stderr, ran
        harmless(ran.stdout, own_commands=False)
        harmless(ran.stderr, own_commands="--github" in arguments)
        assert "<img" not in ran.stdout or not {"html", "markdown"} & set(
            map(str, arguments)
        ), ran
    for written in (summary, run.with_name("gate.xml")):
        if written.exists():
            harmless(written.read_text(), own_commands=False)
            assert "<img" not in written.read_text()


def harmless(text, *, own_commands):
    """No terminal escape, no change of writing direction; no command to GitHub but batchtune's own."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), text
    began = re.findall(r"^\s*(?:::|##\[).*", text, re.MULTILINE)
    assert all(
        own_commands and re.match(r"::(error|warning) title=batchtune", line)
        for line in began
    ), began


def hold_edited(recorded, folder, file, kind, seed):
    """Edit a file of a copy of a run, in some places at random, and run every command on it."""
    draw = random.Random(f"{kind} {file} {seed}")
    run = folder / f"{kind}-{file}-{seed}" / "run"
    shutil.copytree(recorded / kind, run)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        with contextlib.suppress(IndexError):  # nothing is left to edit
            edited(draw, run / file)
    hold(recorded, kind, run, file)


@pytest.mark.parametrize(("file", "kind"), [*zip(FILES, itertools.cycle(KINDS))])
def test_an_edited_file_gives_a_result_or_one_message(recorded, tmp_path, file, kind):
    hold_edited(recorded, tmp_path, file, kind, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_edits_give_results_or_one_message_each(recorded, tmp_path, kind):
    for file, seed in itertools.product(FILES, range(1, 6)):
        hold_edited(recorded, tmp_path, file, kind, seed)


def test_what_is_recorded_is_no_edit(recorded, tmp_path):
    summary = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    for kind in KINDS:
        shutil.copytree(recorded / kind, tmp_path / kind)
        for arguments in commands(recorded, kind, tmp_path / kind):
            # No run here has a token budget.
            if arguments[0] != "sweep-buckets" and arguments[-1] not in PACKERS:
                ran = run_here(*arguments, env=summary)
                assert ran.returncode in (0, 3), ran.stderr
