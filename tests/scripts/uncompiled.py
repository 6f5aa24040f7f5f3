"""Imported first by scripts of the tests, which compile nothing: spares them torch's compiler.

The first optimizer of a process imports it, in 1.6 s of a processor: as long as all of torch.
"""

import sys
from types import ModuleType

import torch

compiler = ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
compiler.trace_rules = ModuleType("trace_rules")  # for process groups
compiler.trace_rules.clear_lru_cache = lambda: None
compiler.utils = ModuleType("utils")  # for DDP
compiler.utils.get_optimize_ddp_mode = lambda: "no_optimization"
sys.modules["torch._dynamo"] = compiler
torch._dynamo = compiler
