"""Imports the real batching of axolotl and NeMo: of each the one file, as the rest can't be installed beside ours.

What these files import of their own packages, and do not batch with, is replaced. A package may be installed, or be a
folder on PYTHONPATH with the file alone.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def axolotl_multipack():
    """axolotl's module of `MultipackBatchSampler`, compiled only where numba is installed."""
    modules = {
        "axolotl": {},
        "axolotl.utils": {},
        "axolotl.utils.distributed": {
            "reduce_and_broadcast": lambda local, reduce: reduce([local()])
        },
        "axolotl.utils.logging": {
            "get_logger": lambda name: types.SimpleNamespace(
                debug=lambda *_: None, info=lambda *_: None, warning=lambda *_: None
            )
        },
    }
    if importlib.util.find_spec("numba") is None:
        modules["numba"] = {"njit": lambda function: function}
    return load("axolotl/utils/samplers/multipack.py", modules)


@cache
def nemo_sampling():
    """NeMo's module of `FixedBucketBatchSizeConstraint2D`."""
    names = {"Formattable": object, "NeMoMultimodalConversation": object}
    return load(
        "nemo/collections/common/data/lhotse/sampling.py",
        {"nemo.collections.common.data.lhotse.text_adapters": names},
    )


def load(path, modules):
    """Run one file of a package among stand-ins for the modules that it imports; ImportError without it."""
    package, _, within = path.partition("/")
    found = importlib.util.find_spec(package)
    folders = [] if found is None else found.submodule_search_locations or []
    files = [Path(folder) / within for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ImportError(f"{package} has no {within}")
    spec = importlib.util.spec_from_file_location(f"real_{package}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    with stand_ins(modules):
        spec.loader.exec_module(module)
    return module


@contextmanager
def stand_ins(modules):
    """Put made modules in the place of real ones."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, members in modules.items():
        sys.modules[name] = types.SimpleNamespace(**members)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
