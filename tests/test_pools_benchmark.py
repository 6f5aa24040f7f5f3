"""The benchmark of tables and pools runs, and pools as random as the table take less time in it."""

from pathlib import Path

import pytest
from benchmarks.pools import main


def test_pools_as_random_as_the_table_take_less_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tables", "--quick", "--data", str(tmp_path / "absent")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)}
    (table,) = (cells for name, cells in rows.items() if name.startswith("table of "))
    (pools,) = (cells for name, cells in rows.items() if name.endswith(": as random"))
    assert float(pools[3]) < float(table[3]) == 1
    assert float(pools[4]) <= float(table[4])
