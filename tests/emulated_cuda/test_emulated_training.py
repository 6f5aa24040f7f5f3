"""Training on the emulated device: memory as the sizes of tensors say, and values that are not computed."""

from __future__ import annotations

import pytest
from emulated_cuda.machine import MIB

pytestmark = pytest.mark.process

MODEL = """
import json, sys, torch
from torch import nn

def made(device):
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, device=device)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

def loss_of(model, batch_size, length, device):
    return model(torch.ones(batch_size, length, 128, device=device)).square().mean()
"""

STEPS = """
model = made("cuda")
parameters = list(model.parameters())
tensors = sum(-(-p.numel() * 4 // 512) * 512 for p in parameters)
allocated = torch.cuda.memory_allocated
optimizer = torch.optim.AdamW(parameters, fused=False, foreach=True)
figures = {"tensors": tensors, "model": allocated()}
loss = loss_of(model, 4, 32, "cuda")
loss.backward()
del loss
# What torch holds for cuBLAS is no gradient.
torch._C._cuda_clearCublasWorkspaces()
figures["gradients"] = allocated() - figures["model"]
optimizer.step()
figures["states"] = allocated() - figures["model"] - figures["gradients"]
optimizer.zero_grad(set_to_none=True)
figures["left"] = allocated() - figures["model"] - figures["states"]
print(json.dumps(figures))
"""

PEAKS = """
dtype = getattr(torch, sys.argv[1])
model = made("cuda")
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)
def peak(batch_size):
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = loss_of(model, batch_size, 64, "cuda")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()
peak(8)
print(json.dumps([peak(batch_size) for batch_size in (512, 1024, 1536)]))
"""


def test_a_step_of_a_transformer_takes_what_its_tensors_take(emulated_cuda):
    figures = emulated_cuda.figures(MODEL + STEPS)
    assert figures["model"] == figures["tensors"]
    assert figures["gradients"] == figures["tensors"]
    assert figures["states"] == 2 * figures["tensors"]
    assert figures["left"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_peak_grows_by_the_same_for_each_example(emulated_cuda, dtype):
    small, middle, large = emulated_cuda.figures(MODEL + PEAKS, dtype, memory="8GiB")
    assert middle - small > 256 * MIB
    assert large - middle == pytest.approx(middle - small, rel=0.01)


VALUES = """
import json, torch
copied = torch.arange(5.0).cuda()
pinned = torch.arange(5.0).pin_memory()
asynchronously = pinned.to("cuda", non_blocking=True)
computed = copied + 1
print(json.dumps({
    "copied": copied.tolist(),
    "pinned": [pinned.is_pinned(), asynchronously.tolist()],
    "computed": computed.tolist(),
    "finite": computed.isfinite().all().item(),
    "nan": computed.isnan().any().item(),
}))
"""


def test_what_was_copied_is_there_and_what_was_computed_is_zero(emulated_cuda):
    counted = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert emulated_cuda.figures(VALUES) == {
        "copied": counted,
        "pinned": [True, counted],
        "computed": [0.0] * 5,
        "finite": True,
        "nan": False,
    }


RANK = """
import os
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
torch.cuda.set_device(rank)
model = DistributedDataParallel(made(f"cuda:{rank}"))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss_of(model, 4, 32, f"cuda:{rank}").backward()
    optimizer.step()
    optimizer.zero_grad()
held = [torch.cuda.memory_allocated(device) > 0 for device in range(2)]
gathered = [None, None]
torch.distributed.all_gather_object(gathered, torch.distributed.get_backend())
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump([held, gathered], file)
torch.distributed.destroy_process_group()
"""


def test_ddp_trains_on_two_devices_over_nccl(emulated_cuda, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(MODEL + RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = emulated_cuda(*launcher, str(script), str(tmp_path), devices=2)
    assert ran.returncode == 0, ran.stderr
    written = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert written == [
        '[[true, false], ["nccl", "nccl"]]',
        '[[false, true], ["nccl", "nccl"]]',
    ]
