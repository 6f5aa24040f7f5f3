"""The kernel's counters of what its OOM killer did, in made trees of /proc and /sys."""

from pathlib import Path

import pytest

from batchtune.processes.worker import Nursery, oom_kills

V1 = "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n"
VMSTAT = "nr_free_pages 1\noom_kill 9\nfoo_oom_kill 8\n"


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "proc__self__cgroup": "0::/user/job\n",
                "sys__fs__cgroup__user__job__memoryDOTevents": "low 0\noom 4\noom_kill 3\noom_group_kill 0\n",
                "proc__vmstat": VMSTAT,
            },
            3,
        ),
        (
            {  # in a container, whose own group is the root of what it sees
                "proc__self__cgroup": "0::/../../docker/4711\n",
                "sys__fs__cgroup__memoryDOTevents": "oom_kill 2\n",
                "proc__vmstat": VMSTAT,
            },
            2,
        ),
        (
            {
                "proc__self__cgroup": V1,
                "sys__fs__cgroup__memory__job__7__memoryDOToom_control": "under_oom 0\noom_kill 5\n",
                "proc__vmstat": VMSTAT,
            },
            5,
        ),
        (  # the root group counts nothing
            {"proc__self__cgroup": "0::/\n", "proc__vmstat": VMSTAT},
            9,
        ),
        ({"proc__vmstat": VMSTAT}, 9),
        ({"proc__self__cgroup": "0::/\n", "proc__vmstat": "nr_free_pages 1\n"}, None),
        ({}, None),
    ],
    ids=["version 2", "container", "version 1", "root group", "no groups", "old kernel", "no kernel to ask"],
)
def test_the_count_is_the_own_groups_where_there_is_one(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert oom_kills(tree(tmp_path, **files)) == expected


def test_this_machine_has_a_count() -> None:
    assert oom_kills() is not None


def test_a_kill_is_an_oom_only_if_the_kernel_counted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {(3, 3): False, (3, 4): True, (None, None): True, (3, None): False, (None, 3): False}
    worker = Nursery.__new__(Nursery)
    for (before, after), killed in cases.items():
        worker._oom_kills = before
        monkeypatch.setattr("batchtune.processes.worker.oom_kills", lambda after=after: after)
        assert worker._oom_killed() is killed, (before, after)
