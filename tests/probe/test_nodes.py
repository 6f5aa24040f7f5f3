"""Several nodes: what node 0 and the agents say to each other, and real ranks on two nodes of this machine."""

import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_supervisor
from cli.conftest import write_lengths
from msgspec.structs import replace
from test_gang import GANG, LENGTHS, SMALL, settings
from worker_processes import gone, ours

from batchtune.errors import ProbeError, UsageError
from batchtune.probe import nodes as nodes_module
from batchtune.probe.nodes import Greeting, Nodes, serve_node_0
from batchtune.probe.requests import Launch, Launched
from batchtune.probe.supervisor import Supervisor
from batchtune.processes.worker import WorkerLost, encode
from batchtune.results import BatchShape, Probe, read_result


def free_ports():
    """The first of three ports in a row that nothing uses, below those that the kernel gives to connections."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + 3):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def launch_of(node_rank, nnodes, port):
    return Launch(
        nproc_per_node=1,
        nnodes=nnodes,
        node_rank=node_rank,
        port=port,
        leader_port=port + 2,
    )


def greeting_of(node_rank):
    return Greeting(token="", node_rank=node_rank, host=f"host{node_rank}", facts={})


class MadeNursery:
    """What an agent does with its worker process, in words."""

    def __init__(self):
        self.done = []

    def start_worker(self):
        self.done.append("start")

    def ask(self, request, kinds, timeout_seconds):
        self.done.append(request)
        return Launched()

    def output(self):
        return "last words\n"

    def end_worker(self):
        self.done.append("end")

    def close(self):
        self.done.append("close")


class Cluster:
    """Node 0, and agents as threads."""

    def __init__(self, nnodes=2):
        self.nnodes = nnodes
        self.port = free_ports()
        self.nodes = Nodes(launch_of(0, nnodes, self.port), greeting_of(0))
        self.threads = ThreadPoolExecutor()
        self.nursery = MadeNursery()

    def agent(self, node_rank):
        launch = launch_of(node_rank, self.nnodes, self.port)
        return self.threads.submit(serve_node_0, launch, greeting_of(node_rank), 20.0)

    def stranger(self, says):
        channel = socket.create_connection(("127.0.0.1", self.port + 1))
        channel.sendall(says)
        return channel


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr(nodes_module, "Nursery", lambda *program: made.nursery)
    yield made
    made.nodes.__exit__(None, None, None)
    made.threads.shutdown()


def test_agents_start_and_end_their_ranks(cluster):
    agent = cluster.agent(1)
    with cluster.nodes as nodes:
        nodes.gather(20.0)
        starts = []
        for _ in range(2):
            starts.append(nodes.start("native"))
            nodes.end()
            assert nodes.last_words == ["Node 1 (host1) printed last:\nlast words"]
    agent.result(20.0)
    asked = [replace(launch, node_rank=1) for launch in starts]
    first, second = asked
    done = ["start", first, "end", "start", second, "end", "close"]
    assert cluster.nursery.done == done
    assert first.rdzv_id != second.rdzv_id
    assert first.token != second.token
    assert first.allocator == "native"


def test_agents_are_told_why_node_0_fails(cluster):
    agent = cluster.agent(1)
    with pytest.raises(UsageError), cluster.nodes as nodes:
        nodes.gather(20.0)
        nodes.start("auto")
        raise UsageError("no such manifest", "Name another.")
    message = r"node 0 has ended: no such manifest\nName another."
    with pytest.raises(ProbeError, match=message):
        agent.result(20.0)
    assert cluster.nursery.done[-2:] == ["end", "close"]


def test_an_agent_ends_its_ranks_if_node_0_is_gone(cluster):
    agent = cluster.agent(1)
    cluster.nodes.gather(20.0)
    cluster.nodes.start("auto")
    cluster.nodes._agents[1].channel.close()
    with pytest.raises(ProbeError, match=r"node 0 \(.*\) has closed the connection"):
        agent.result(20.0)
    assert cluster.nursery.done[-2:] == ["end", "close"]


def test_two_nodes_of_one_rank_are_refused(monkeypatch):
    monkeypatch.setattr(nodes_module, "Nursery", lambda *program: MadeNursery())
    cluster = Cluster(3)
    agents = [cluster.agent(1) for _ in range(2)]
    message = "both host1 and host1 say that they are node 1"
    with pytest.raises(ProbeError, match=message), cluster.nodes as nodes:
        nodes.gather(20.0)
    for agent in agents:
        with pytest.raises(ProbeError, match=message):
            agent.result(20.0)
    cluster.threads.shutdown()


def test_strangers_are_turned_away(cluster):
    strangers = [
        cluster.stranger(says)
        for says in (
            *[b""] * 100,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xfe\n",
            b'{"type":"greeting","token":' + b"[" * 50_000 + b"\n",
            encode(replace(greeting_of(1), token="wröng")) + b"\n",
            encode(greeting_of(0)) + b"\n",
            encode(greeting_of(2)) + b"\n",
        )
    ]
    agent = cluster.agent(1)
    with cluster.nodes as nodes:
        nodes.gather(20.0)
        # Nobody can come later.
        with pytest.raises(ConnectionRefusedError):
            cluster.stranger(b"")
    agent.result(20.0)
    for stranger in strangers:
        stranger.close()


def test_a_node_that_never_comes_is_named(cluster):
    port = cluster.port
    message = f"^no sign of node 1 of 2 within 0 s at 127.0.0.1:{port + 1}\n"
    hint = f".*TCP ports {port} to {port + 2} of 127.0.0.1"
    with pytest.raises(ProbeError, match=message + hint):
        cluster.nodes.gather(0.0)


def test_a_node_that_goes_in_a_trial_is_named(cluster):
    channel = cluster.stranger(encode(greeting_of(1)) + b"\n")
    cluster.nodes.gather(20.0)
    here = replace(test_supervisor.SETTINGS, nproc_per_node=1, nnodes=2)
    ended = WorkerLost("crash", "has ended")
    lost = r"lost node 1 \(host1\): batchtune has"
    with Supervisor(here, nodes=cluster.nodes) as supervisor:
        supervisor._nursery = test_supervisor.MadeNursery(ended)
        supervisor.start()
        channel.close()
        with pytest.raises(ProbeError, match=lost):
            supervisor.measure(SMALL, 0)
        with pytest.raises(ProbeError, match=lost):
            supervisor.start()


def test_a_node_may_start_again_while_others_are_awaited(cluster):
    cluster.stranger(encode(greeting_of(1)) + b"\n").close()
    agent = cluster.agent(1)
    with cluster.nodes as nodes:
        nodes.gather(20.0)
        nodes.start("auto")
    agent.result(20.0)


def test_what_is_not_node_0_is_told(cluster):
    agent = cluster.agent(1)
    cluster.nodes.gather(20.0)
    cluster.nodes._agents[1].channel.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProbeError, match="is not batchtune"):
        agent.result(20.0)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_port_in_use_is_named(offset):
    port = free_ports()
    with (
        socket.create_server(("127.0.0.1", port + offset)),
        pytest.raises(ProbeError, match=f"can't listen on port {port + offset} of "),
    ):
        Nodes(launch_of(0, 2, port), greeting_of(0))


def test_ranks_of_several_machines_need_them():
    with pytest.raises(UsageError, match="ranks on 2 machines were probed"):
        Supervisor(replace(settings(), nproc_per_node=1, nnodes=2))


def two_nodes(folder, command, *others):
    """What two nodes with folders of their own print, say and end with, of node 0 first."""
    started = []
    endpoint = f"127.0.0.1:{free_ports()}"
    for node in range(2):
        place = folder / f"node{node}"
        place.mkdir(exist_ok=True)
        options = ["--nnodes", "2", "--rdzv-endpoint", endpoint]
        options += ["--node-rank", str(node), *(others if node else ())]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "batchtune", *command, *options],
                cwd=place,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                },  # as torchrun sets it for two ranks
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [(*process.communicate(), process.returncode) for process in started]
    assert all(gone(process.pid) for process in started)
    return ended


def write_manifest(folder):
    folder.mkdir()
    write_lengths(folder / "lengths.csv", [24, 100, 176, 252] * 500, "tokens")


def probing(command, *further):
    return [
        command,
        "lengths.csv",
        "--workload",
        f"{GANG}:ByLength",
        "--device",
        "cpu",
        "--memory",
        "460MiB",
        "--memory-fraction",
        "1",
        "--num-lengths",
        "2",
        "--setup-timeout",
        "300",
        *further,
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_nodes_find_what_fits_on_two_ranks(tmp_path):
    write_manifest(tmp_path / "node0")
    tune = probing("tune", "--nproc-per-node", "1", "--num-buckets", "2")
    tune += ["--verify", "--verify-steps", "3", "--time-tolerance", "1000"]
    (_, said, code), (printed_by_1, _, code_of_1) = two_nodes(tmp_path, tune)
    assert (code, code_of_1) == (0, 0), said
    assert printed_by_1 == ""
    # Node 1 has no manifest, and writes nothing.
    assert list((tmp_path / "node1").iterdir()) == []
    run = tmp_path / "node0" / "batchtune-run"
    assert (run / "verify.json").exists()
    of_nodes = read_result(run / "probe.json", Probe)
    assert (of_nodes.device.nnodes, of_nodes.device.world_size) == (2, 2)
    assert [rank.rank for rank in of_nodes.device.ranks] == [0, 1]
    with Supervisor(settings("ByLength"), lengths=LENGTHS) as supervisor:
        outcomes = [
            supervisor.measure(BatchShape(size, point.length), 0).trial.outcome
            for point in of_nodes.frontier
            for size in (point.batch_size - 1, 2 * point.batch_size)
        ]
    assert outcomes == ["ok", "oom"] * len(of_nodes.frontier)
    assert not ours()


@pytest.mark.process
def test_nodes_with_other_options_are_refused(tmp_path):
    write_manifest(tmp_path / "node0")
    command = probing("tune", "--nproc-per-node", "1")
    ended = two_nodes(tmp_path, command, "--memory", "300MiB")
    for _, said, code in ended:
        assert code == 1
        assert "--memory is 300MiB there, 460MiB on node 0" in " ".join(said.split())
    assert not (tmp_path / "node0" / "batchtune-run").exists()
