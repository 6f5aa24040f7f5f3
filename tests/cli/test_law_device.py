"""Commands on a device made by a law, which needs no process, and what their results say of it."""

import json
from pathlib import Path

from cli.conftest import Run

from batchtune.probe.devices.law import NAME

LAW = "law:constant=100MB,linear=1MiB,limit=460MiB"


def test_all_results_of_a_law_say_what_they_are(batchtune: Run, manifest: Path) -> None:
    ran = batchtune("tune", manifest, "--device", LAW, "--verify", "--json")
    assert ran.returncode == 0, ran.stderr
    assert "Nothing is run: the device is made by a law." in ran.stderr
    run = manifest.parent / "batchtune-run"
    for name in ("run", "probe", "verify"):
        result = json.loads((run / f"{name}.json").read_text())
        assert result["device"]["name"] == NAME
        assert result["workload"]["spec"] == "law"
    assert f"device: {NAME}" in (run / "sampler.yaml").read_text()
    shown = batchtune("report", "--full")
    assert NAME in shown.stdout


def test_a_run_of_a_law_is_verified_on_the_same_law(
    batchtune: Run, manifest: Path
) -> None:
    assert batchtune("tune", manifest, "--device", LAW).returncode == 0
    assert batchtune("verify", manifest).returncode == 0
    leaks = batchtune("verify", manifest, "--device", f"{LAW},leak=1MB")
    assert leaks.returncode == 3
    assert "the workload leaks" in " ".join(leaks.stdout.split())
