"""Commands on a device made by a law, which needs no process, and what their results say of it."""

from cli.conftest import flat, result_in

from batchtune.probe.devices.law import NAME

LAW = "law:constant=100MB,linear=1MiB,limit=460MiB"


def test_all_results_of_a_law_say_what_they_are(succeed, manifest):
    ran = succeed("tune", manifest, "--device", LAW, "--verify")
    assert "Nothing is run: the device is made by a law." in ran.stderr
    for name in ("run", "probe", "verify"):
        result = result_in(manifest.parent, name)
        assert result["device"]["name"] == NAME
        assert result["workload"]["spec"] == "law"
    config = manifest.parent / "batchtune-run" / "sampler.yaml"
    assert f"device: {NAME}" in config.read_text()
    assert NAME in succeed("report", "--full").stdout


def test_a_run_of_a_law_is_verified_on_the_same_law(batchtune, succeed, manifest):
    succeed("tune", manifest, "--device", LAW)
    succeed("verify", manifest)
    leaks = batchtune("verify", manifest, "--device", f"{LAW},leak=1MB", code=3)
    assert "the workload leaks" in flat(leaks.stdout)


def test_no_batch_is_larger_than_a_step_that_keeps_its_examples(succeed, manifest):
    steps = ("--current", "batch_size=2", "--accumulate", 2)

    def tried(*options):
        succeed("tune", manifest, "--device", LAW, *steps, *options)
        trials = result_in(manifest.parent, "probe")["trials"]
        return [trial["batch_size"] for trial in trials]

    kept = tried()
    assert max(kept) == 4
    said = flat(succeed("report").stdout)
    assert "Batches with more than a step's 4 examples were not tried" in said
    succeed("sweep-buckets", manifest, *steps, "--keep", "nothing")
    assert "larger ones may fit" in flat(succeed("report", "--full").stdout)
    all_tried = tried("--keep", "nothing")
    assert max(all_tried) > 4
    # Those trials are reused; and a probe that tried more answers for fewer.
    assert all_tried[: len(kept)] == kept
    assert tried() == all_tried
