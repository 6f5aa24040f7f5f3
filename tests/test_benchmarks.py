"""The benchmarks of pools and of streams run, and what they are there to show holds with little data too."""

import pytest


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a benchmark's tables, by their first cell."""
    rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| "))
    return {cells[0]: cells for cells in rows}


@pytest.mark.slow
def test_pools_as_random_as_the_table_take_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.pools import main

    main(["tables", "--quick"])
    rows = rows_of(capsys.readouterr().out)
    (table,) = (cells for name, cells in rows.items() if name.startswith("table of "))
    (pools,) = (cells for name, cells in rows.items() if name.endswith(": as random"))
    assert float(pools[3]) < float(table[3]) == 1
    assert float(pools[4]) <= float(table[4])


def test_tuned_streams_take_fewer_batches(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.streams import main

    main(["sweep", "--quick"])
    rows = rows_of(capsys.readouterr().out)
    tutorial = rows.pop("SpeechBrain, as in its tutorial")
    found = [cells for name, cells in rows.items() if name.endswith("by batches")]
    assert len(found) == 3
    assert all(int(cells[1].replace(",", "")) < int(tutorial[1].replace(",", "")) for cells in found)
