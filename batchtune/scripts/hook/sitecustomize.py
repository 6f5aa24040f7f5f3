"""Runs in every Python that a command starts under batchtune: this folder is the first of its PYTHONPATH.

Without batchtune's environment variable nothing is patched. The `sitecustomize` that this one hides runs as well.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

if os.environ.get("BATCHTUNE_SCRIPT"):
    if importlib.util.find_spec("batchtune") is None:
        sys.exit(
            f"Error: batchtune is not installed for {sys.executable}, which runs this script.\n"
            "Install it there from its checkout: python -m pip install FOLDER"
        )
    from batchtune.scripts.interposing import install

    install()

_here = os.path.dirname(os.path.abspath(__file__))
_others = [folder for folder in sys.path if os.path.abspath(folder) != _here]
_hidden = PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
