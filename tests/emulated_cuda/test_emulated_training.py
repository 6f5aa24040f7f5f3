"""Training on the emulated device: memory as the sizes of tensors say, and values that are not computed."""

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
def tensors_of(parameters):
    return sum(-(-p.numel() * 4 // 512) * 512 for p in parameters)

def step():
    model = made("cuda")
    parameters = list(model.parameters())
    allocated = torch.cuda.memory_allocated
    optimizer = torch.optim.AdamW(parameters, fused=False, foreach=True)
    figures = {"tensors": tensors_of(parameters), "model": allocated()}
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
    return figures

def peaks(dtype):
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
    return [peak(batch_size) for batch_size in (512, 1024, 1536)]

def values():
    copied = torch.arange(5.0).cuda()
    pinned = torch.arange(5.0).pin_memory()
    asynchronously = pinned.to("cuda", non_blocking=True)
    computed = copied + 1
    return {
        "copied": copied.tolist(),
        "pinned": [pinned.is_pinned(), asynchronously.tolist()],
        "computed": computed.tolist(),
        "finite": computed.isfinite().all().item(),
        "nan": computed.isnan().any().item(),
    }

figures = {"step": step()}
figures["peaks"] = [peaks(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
figures["values"] = values()
print(json.dumps(figures))
"""


def test_tensors_take_their_memory_and_have_no_computed_values(emulated_cuda):
    figures = emulated_cuda.figures(MODEL + STEPS, memory="8GiB")
    step = figures["step"]
    assert step["model"] == step["gradients"] == step["tensors"]
    assert step["states"] == 2 * step["tensors"]
    assert step["left"] == 0
    for small, middle, large in figures["peaks"]:
        assert middle - small > 256 * MIB
        assert large - middle == pytest.approx(middle - small, rel=0.01)
    counted = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert figures["values"] == {
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
