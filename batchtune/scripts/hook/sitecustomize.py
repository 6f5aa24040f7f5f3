"""Runs in every Python that a command starts under batchtune: this folder is the first of its PYTHONPATH.

Without batchtune's environment variable nothing is patched. The `sitecustomize` that this one hides runs as well.
A Python that lacks batchtune, or is too old for it, runs as if this file were not there.
"""

import os
import sys


def _install() -> None:
    try:
        from batchtune.scripts import install

        install()
    except Exception:
        import atexit

        atexit.register(_say_that_batchtune_is_missing)


def _say_that_batchtune_is_missing() -> None:
    if "torch" in sys.modules:  # else it is no training
        sys.stderr.write("batchtune: can't be imported by " + sys.executable)
        sys.stderr.write(", whose loaders it therefore did not watch.\n")


def _run_the_hidden() -> None:
    import importlib.util
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    hidden = PathFinder.find_spec("sitecustomize", others)
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if os.environ.get("BATCHTUNE_SCRIPT"):
    _install()
_run_the_hidden()
