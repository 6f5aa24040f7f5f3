"""Packed rows on a CUDA device: one kernel for all sequences, with the results of each on its own."""

import pytest
import torch

from batchtune.results import BatchShape
from batchtune.workloads import load_workload
from batchtune.workloads.builtin import Spans, attend_within

CUDA = torch.device("cuda")
LENGTHS = [300, 17, 128, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_attends_within_each_sequence(dtype):
    made = torch.randn(3, 1, 4, sum(LENGTHS), 64, device=CUDA)
    spans = Spans.of(LENGTHS, CUDA)
    exact = attend_within(*made, spans)
    halves = made.to(dtype).requires_grad_()
    mixed = attend_within(*halves, spans)
    mixed.sum().backward()
    torch.testing.assert_close(mixed.float(), exact, atol=2e-2, rtol=2e-2)
    assert halves.grad.isfinite().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_packed_step_trains(dtype):
    workload = load_workload(
        "builtin:transformer-lm", {"size": "tiny", "packed": True, "dtype": dtype}
    )
    workload.setup(CUDA)
    workload.step(workload.make_batch(BatchShape.packed(LENGTHS)))
    torch.cuda.synchronize()
