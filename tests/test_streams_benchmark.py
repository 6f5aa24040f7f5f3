"""The benchmark of streams runs, and tuned ways to batch take fewer batches in it than the tutorial's settings."""

from pathlib import Path

import pytest


def test_tuned_streams_take_fewer_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    from benchmarks.streams import main

    main(["sweep", "--quick", "--data", str(tmp_path / "absent")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)}
    tutorial = rows.pop("SpeechBrain, as in its tutorial")
    found = [cells for name, cells in rows.items() if name.endswith("by batches")]
    assert len(found) == 3
    assert all(int(cells[1].replace(",", "")) < int(tutorial[1].replace(",", "")) for cells in found)
