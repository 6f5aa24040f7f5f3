"""Bad input: one clear message, the right exit code, no traceback, no half-written file."""

import math
import re
import resource
import subprocess

import pytest
from cli.conftest import LAW, command, contents, result_in
from made_trials import ran as reply_of

from batchtune.cli.app import COMMANDS, load_command
from batchtune.errors import UsageError

LIMIT = ["--max-batch-length", 60]
ROWS = "id,duration\na,1.5\nb,2.5\nc,3.5\n"


def text(content, encoding="utf-8"):
    return lambda path: path.write_text(content, encoding=encoding) and None


MANIFESTS = {
    "missing": (lambda path: None, "no such file|does not exist"),
    "empty": (text(""), "empty"),
    "folder": (lambda path: path.mkdir(), "folder"),
    "wrong encoding": (text(ROWS.replace("a,", "ä,"), "utf-16"), "UTF-16|utf-8"),
    "JSON that breaks off": (
        text('{"a": {"duration": 1.5},\n "b": {"dura'),
        "line 2: Input data was truncated",
    ),
    "NaN": (text(ROWS + "d,nan\n"), "line 5"),
    "two candidates": (
        text("id,duration,num_samples\na,1.5,24000\n"),
        "duration.*num_samples",
    ),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "device"),
}


def assert_one_message(ran, pattern):
    assert "Traceback (most recent" not in ran.stderr.replace("  | Traceback", "")
    assert len(re.findall("^Error:", ran.stderr, re.MULTILINE)) == 1
    assert re.search(pattern, ran.stderr, re.DOTALL | re.IGNORECASE), ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_bad_manifest_is_one_message_and_no_file(batchtune, tmp_path, name):
    make, pattern = MANIFESTS[name]
    make(tmp_path / "manifest")
    ran = batchtune("sweep-buckets", "manifest", *LIMIT, code=1)
    assert_one_message(ran, pattern)
    assert "manifest" in ran.stderr
    assert not (tmp_path / "batchtune-run").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["q" * 5000], 1),
        (["manifest", "--length-key", "q" * 5000], 1),
        (["manifest", "--jobs", "7" * 5000], 2),
        (["manifest", "--unit", "q" * 5000], 2),
        (["manifest", "--" + "q" * 5000], 2),
    ],
    ids=["name", "column", "number", "choice", "option"],
)
def test_long_arguments_are_quoted_in_short(batchtune, tmp_path, arguments, code):
    (tmp_path / "manifest").write_text(ROWS)
    ran = batchtune("sweep-buckets", *arguments, *LIMIT, code=code)
    assert_one_message(ran, ".")
    assert len(ran.stderr) < 1500


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--strategy", "best"], "best.*speechbrain"),
        (["--unit", "parsec"], "parsec.*tokens"),
        (["--length-scale", "1/0"], "1/0"),
        (["--max-batch-length", "0"], "max-batch-length"),
        (
            ["--max-batch-length", "4"],
            "shorter than the shortest example \\(5 s\\).*unit",
        ),
        (["--max-batch-size", "0"], "max.batch.size"),
        (["--min-length", "nan"], "--min-length nan"),
        (["--jobs", "0"], "Error: --jobs: 0 is not at least 1\nGive another"),
        (["--jobs", "1025"], "Error: --jobs: 1025 is not at most 1024\n"),
        (["--seed", "1.5"], "Error: --seed: '1.5' is not a whole number\n"),
        (["--format", "xml"], "xml"),
        (["--no-such-option"], "no-such-option"),
        (["--current", "no-such.yaml"], "no-such.yaml. is neither a file"),
        (["--current", "max_batch_length=600,bucket_boundaries=0:2"], "0"),
        (["--multiple-of", "0"], "--multiple-of"),
        (["--world-size", "0"], "--world-size"),
        (["--min-randomness", "nan"], "--min-randomness"),
        (["--min-steps", "1000000"], "--min-steps 1000000: an epoch of"),
        (["--min-steps", "0"], "--min-steps"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(batchtune, manifest, arguments, pattern):
    ran = batchtune("sweep-buckets", manifest, *LIMIT, *arguments, code=2)
    assert_one_message(ran, pattern)
    assert not (manifest.parent / "batchtune-run" / "sweep.json").exists()


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--memory", "lots"], "lots"),
        (["--memory-fraction", "0"], "fraction"),
        (["--tolerance", "1"], "tolerance"),
        (["--device", "tpu"], "tpu"),
        (["--num-lengths", "1"], "--num-lengths: must be a whole number of at least 2"),
        (["--set", "size"], "size"),
        (["--setup-timeout", "0"], "--setup-timeout: must be a number above 0"),
        (["--wait", "-1"], "--wait: must be a number of at least 0"),
        (["--minutes", "0"], "^Error: --minutes: 0 is not at least 0.01\nGive another"),
        (["--micro-batches", "9"], "are not kept"),
        (
            ["--micro-batches", "9", "--current", "batch_size=4", "--accumulate", "2"],
            "--micro-batches 9: .* makes 1 to 8",
        ),
    ],
    ids=" ".join,
)
def test_a_meaningless_probe_is_exit_code_2(batchtune, manifest, arguments, pattern):
    """Before the first trial."""
    ran = batchtune("tune", manifest, "--device", LAW, *arguments, code=2)
    assert_one_message(ran, pattern)
    assert not (manifest.parent / "batchtune-run" / "trials.jsonl").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_number_option_says_what_is_not_a_number(name):
    lists = {"num_buckets", "pool_size", "buffer_size", "length_scale"}
    command = load_command(name)
    for option in command.params:
        if option.metavar in ("N", "X", "SECONDS") and option.name not in lists:
            message = f"^{option.opts[0]}: 'x' is not a (whole )?number\n"
            with pytest.raises(UsageError, match=message):
                command.make_context(name, [option.opts[0], "x"])


def test_wait_needs_no_number():
    for words, seconds in (
        (["--wait", "m.csv"], math.inf),
        (["--wait", "5", "m.csv"], 5.0),
        (["m.csv"], 0.0),
    ):
        parsed = load_command("probe-oom").make_context("probe-oom", words).params
        assert (parsed["wait"], parsed["manifest"]) == (seconds, ["m.csv"])


def test_without_a_unit_the_workload_must_be_named(batchtune, tmp_path):
    (tmp_path / "m.csv").write_text("id,length\na,15\nb,25\n")
    ran = batchtune("probe-oom", "m.csv", code=2)
    assert_one_message(ran, "--workload.*--unit")


def test_a_workload_that_fails_is_its_own_error(batchtune, manifest, tmp_path, plan):
    def broken(shape, number):
        line = "    torch.ones(2, 3) @ torch.ones(2, 3)"
        return reply_of(shape, "error", line, error="RuntimeError: mat1 and mat2")

    plan(broken)
    ran = batchtune("probe-oom", manifest, "--device", LAW, code=1)
    assert_one_message(ran, "step.*RuntimeError: mat1 and mat2")
    assert "  |     torch.ones(2, 3) @ torch.ones(2, 3)" in ran.stderr
    assert "too large" not in ran.stderr
    assert not (tmp_path / "batchtune-run" / "probe.json").exists()


def test_a_run_folder_of_other_lengths_is_refused_unless_forced(
    batchtune, succeed, manifest, tmp_path
):
    succeed("sweep-buckets", manifest, *LIMIT)
    before = contents(tmp_path / "batchtune-run")
    (tmp_path / "other.csv").write_text(ROWS)
    ran = batchtune("sweep-buckets", "other.csv", *LIMIT, code=1)
    assert_one_message(ran, "other lengths.*--run.*--force")
    assert contents(tmp_path / "batchtune-run") == before
    succeed("sweep-buckets", "other.csv", *LIMIT, "--force")
    assert result_in(tmp_path)["lengths"]["count"] == 3


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("/dev/null/run", "Not a directory"),
        ("dangling", "it is a link that leads to no folder"),
    ],
)
def test_a_run_folder_that_can_t_be_created_is_named(batchtune, manifest, run, reason):
    manifest.with_name("dangling").symlink_to("nowhere")
    ran = batchtune("tune", manifest, "--device", LAW, "--run", run, code=1)
    assert_one_message(ran, f"{run} can't be created: {reason}\nChoose another")


def test_a_full_disk_leaves_no_half_written_file(batchtune, manifest, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        ran = batchtune("sweep-buckets", manifest, *LIMIT, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_one_message(ran, "sweep.json can't be written: File too large")
    assert list((tmp_path / "batchtune-run").iterdir()) == []


@pytest.mark.process
def test_a_result_that_cant_be_printed_is_an_error(succeed, manifest, tmp_path):
    succeed("sweep-buckets", manifest, *LIMIT)
    with open("/dev/full", "w") as full_disk:
        piped = {"stdout": full_disk, "stderr": subprocess.PIPE}
        full = subprocess.run(command("report"), cwd=tmp_path, text=True, **piped)
    said = "Error: the result can't be written: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, said)
