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
    shown = batchtune("report", "--full")
    assert NAME in shown.stdout


def test_a_run_of_a_law_is_verified_on_the_same_law(batchtune, succeed, manifest):
    succeed("tune", manifest, "--device", LAW)
    succeed("verify", manifest)
    leaks = batchtune("verify", manifest, "--device", f"{LAW},leak=1MB", code=3)
    assert "the workload leaks" in flat(leaks.stdout)
