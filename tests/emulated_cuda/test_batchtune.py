"""batchtune on the emulated device, from the probe to the verification. Memory is real here, times are not."""

import json
from pathlib import Path

import pytest
from emulated_cuda.machine import ROOT

pytestmark = pytest.mark.process
EMULATED = ROOT / "tests" / "benchmarks" / "emulated_steps.json"


def test_doctor_shows_the_devices(emulated_cuda):
    found = json.loads(emulated_cuda.batchtune("doctor", "--json", devices=2))
    assert [gpu["name"] for gpu in found["gpus"]] == ["Emulated GPU"] * 2


HALF_MADE = """
import json, msgspec, sys
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape
settings = ProbeSettings(
    workload=sys.argv[1], options={}, device="cuda", allocator="native",
    memory_bytes=520 << 20, memory_fraction=1.0,
)
with Supervisor(settings) as supervisor:
    supervisor.start()
    rans = [supervisor.measure(BatchShape(size, 1.0), 0) for size in (300, 10)]
print(json.dumps(msgspec.to_builtins([ran.trial for ran in rans])))
"""


def test_a_half_made_optimizer_state_costs_the_process(emulated_cuda):
    """Its next step would fail with torch's own KeyError, with any batch."""
    workload = f"{Path(__file__).with_name('filling_workload.py')}:Filling"
    large, small = emulated_cuda.figures(HALF_MADE, workload)
    assert large["outcome"] == "oom"
    # Besides parameters, gradients and the batch, one state fits, and not the other.
    assert "Tried to allocate 64.00 MiB" in large["error"]
    assert (small["outcome"], small["worker"]) == ("ok", 2)


RECORDED = """
import json, sys, torch
from batchtune.probe import replay
from batchtune.results import BatchShape
from batchtune.workloads.builtin import TransformerLM

def step(size, length):
    if training == "streams":
        with torch.cuda.stream(side):
            fetched = torch.empty(size << 20, device="cuda")
        fetched.record_stream(torch.cuda.current_stream())
    outputs.clear()
    lm.optimizer.zero_grad()
    lm.loss(lm.make_batch(BatchShape(size, length))).backward()
    lm.optimizer.step()
    outputs.extend(torch.empty(1 << 23, device="cuda") for _ in range(8))

outputs = []  # of the last step, made after the optimizer's state
side = torch.cuda.Stream()
_, training, unrecorded, path = sys.argv
lm = TransformerLM(size="tiny")
lm.setup(torch.device("cuda", 0))
if training == "ddp":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    lm.model = torch.nn.parallel.DistributedDataParallel(lm.model)
for size in range(int(unrecorded)):
    step(size + 1, 50.0)
torch.cuda.empty_cache()
recorder = replay.RequestRecorder(0)
steps, real = [], []
for size, length in [(8, 64.0), (3, 200.0), (40, 17.0), (1, 9.0), (8, 64.0)]:
    recorder.begin()
    step(size, length)
    steps.append(recorder.take())
    real.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
with open(path, "w") as file:
    json.dump([steps[0].held, [step.requests for step in steps]], file)
print(json.dumps(real))
"""
REPLAYED = """
import json, sys, torch
from batchtune.probe import replay
from batchtune.probe.requests import RecordedStep, Replay
torch.cuda.init()
with open(sys.argv[1]) as file:
    held, steps = json.load(file)
first, *others = recorded = steps
released, first = replay.freed_by(first)
freed, others[0] = replay.freed_by(others[0])
kept = replay.kept_from(first, freed)
memory = replay.Memory(held, released)
replayed = []
for number, step in enumerate([first, *others]):
    memory.run(step)
    if number == 0:
        memory.keep(kept)
    replayed.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
memory.end()
again = replay.as_first(others[-1], first, kept)
begins = [ask for ask in again if ask > 0 or ask % 2] == [ask for ask in first if ask > 0 or ask % 2]
after = torch.cuda.memory_reserved()
steps = [RecordedStep(0, held, requests) for requests in recorded]
done = replay.replay(Replay(4 << 30, steps, seconds=0, most_seconds=60, seed=0))
print(json.dumps([replayed, after, begins, done.processes, done.steps]))
"""


@pytest.mark.parametrize("conf", ["False", "True"])
@pytest.mark.parametrize(
    ("training", "unrecorded"),
    [("plain", "0"), ("plain", "2"), ("streams", "2"), ("ddp", "2")],
)
def test_replayed_steps_take_what_real_ones_take(
    emulated_cuda, tmp_path, training, unrecorded, conf
):
    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{conf}"}
    path = str(tmp_path / "steps.json")
    real = emulated_cuda.figures(RECORDED, training, unrecorded, path, **settings)
    replayed, after, begins, processes, steps = emulated_cuda.figures(
        REPLAYED, path, **settings
    )
    if training != "plain":  # a block is free once the GPU has reached an event
        real = [reserved for _, reserved in real]
        replayed = [reserved for _, reserved in replayed]
    assert real == replayed
    assert after == 0 and begins
    # However long it takes, each step that can begins a process of ten steps, and two of a hundred.
    assert (processes, steps) == (12, 840)


FAILED = """
import json, torch
from batchtune.probe.replay import RequestRecorder
torch.cuda.init()
recorder = RequestRecorder(0)
recorder.begin()
held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError:
    print(json.dumps(recorder.take().requests))
"""


def test_a_recorded_step_may_run_out_of_memory(emulated_cuda):
    assert emulated_cuda.figures(FAILED) == [1 << 20]


CALIBRATED = """
import json, sys
sys.path.insert(0, "tests")
from benchmarks import calibration
case, _, allocator = sys.argv[1].rpartition(" ")
case = calibration.CASES[case]
print(json.dumps(calibration.steps_of(case, allocator, "cuda", "16GiB")))
"""


@pytest.mark.parametrize("case", ["LM base bf16 native", "LM base fp32 expandable"])
def test_the_calibration_of_a_gpu_compares_it_with_this(emulated_cuda, case):
    reference = json.loads(EMULATED.read_text())[case]
    assert emulated_cuda.figures(CALIBRATED, case, memory="140GiB") == reference
