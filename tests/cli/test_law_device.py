"""Commands on a device made by a law, which needs no process, and what their results say of it."""

import json

from cli.conftest import flat

from batchtune.probe.devices.law import NAME

LAW = "law:constant=100MB,linear=1MiB,limit=460MiB"


def test_all_results_of_a_law_say_what_they_are(batchtune, succeed, manifest):
    ran = succeed("tune", manifest, "--device", LAW, "--verify", "--json")
    assert "Nothing is run: the device is made by a law." in ran.stderr
    run = manifest.parent / "batchtune-run"
    for name in ("run", "probe", "verify"):
        result = json.loads((run / f"{name}.json").read_text())
        assert result["device"]["name"] == NAME
        assert result["workload"]["spec"] == "law"
    assert f"device: {NAME}" in (run / "sampler.yaml").read_text()
    assert NAME in batchtune("report", "--full").stdout


def test_a_run_of_a_law_is_verified_on_the_same_law(batchtune, succeed, manifest):
    succeed("tune", manifest, "--device", LAW)
    succeed("verify", manifest)
    leaks = batchtune("verify", manifest, "--device", f"{LAW},leak=1MB", code=3)
    assert "the workload leaks" in flat(leaks.stdout)


def test_no_batch_is_larger_than_a_step_that_keeps_its_examples(succeed, manifest):
    steps = ("--current", "batch_size=2", "--accumulate", 2)

    def largest_tried(*options):
        result = succeed("tune", manifest, "--device", LAW, *steps, *options, "--json")
        sizes = [
            trial["batch_size"]
            for trial in json.loads(result.stdout)["probe"]["trials"]
        ]
        return max(sizes), sizes

    largest, kept = largest_tried()
    assert largest == 4
    assert "Batches with more than a step's 4 examples were not tried" in flat(
        succeed("report").stdout
    )
    succeed("sweep-buckets", manifest, *steps, "--keep", "nothing")
    assert "larger ones may fit" in flat(succeed("report", "--full").stdout)
    largest, all_tried = largest_tried("--keep", "nothing")
    assert largest > 4
    # Those trials are reused; and a probe that tried more answers for fewer.
    assert all_tried[: len(kept)] == kept
    assert largest_tried()[1] == all_tried
