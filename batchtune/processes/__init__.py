"""Starts a module of batchtune in a new interpreter, with nothing of the working folder on `sys.path`.

`python -m` and `python -c` put the working folder first: a `numpy.py` in a downloaded data set would run as soon as
something imports numpy. The path of this file puts its own folder there instead, which it then takes away. (The option
`-P` does the same, from Python 3.11 on.)
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def command(module: str, *arguments: object) -> list[str]:
    """Return the command that calls the module's `main()` in a new interpreter."""
    return [sys.executable, __file__, module, *map(str, arguments)]


def drop_first_folder() -> None:
    """Take off `sys.path` what Python puts there first for a program; batchtune itself stays importable."""
    if not getattr(sys.flags, "safe_path", False):  # else Python has put nothing there
        del sys.path[0]
    packages = __file__.rpartition("/batchtune/")[0]
    if packages not in sys.path:
        sys.path.append(packages)


def keep_out_the_working_folder() -> None:
    """Make `multiprocessing` start its interpreters without the working folder too.

    They begin with `python -c "from multiprocessing..."`, and get the `sys.path` of this process only after that.
    Python 3.10 has no option but `-I` for it, which ignores PYTHONHASHSEED and the like as well.
    """
    from multiprocessing import util

    option = "-P" if sys.version_info >= (3, 11) else "-I"
    options = vars(util)["_args_from_interpreter_flags"]()
    if option not in options:
        vars(util)["_args_from_interpreter_flags"] = lambda: [*options, option]


def import_for_good(*modules: str) -> None:
    """Import modules that stay: Python's garbage collector never looks through them, not even meanwhile.

    Collecting garbage while PyTorch is imported takes a third of the import's time and finds almost
    nothing; looking through its objects after each trial takes 0.2 s.
    """
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    drop_first_folder()
    del sys.argv[0]
    keep_out_the_working_folder()
    import_module(sys.argv[0]).main()
