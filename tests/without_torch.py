"""A Python where packages are as good as not installed."""

# What only a machine that trains has.
UNINSTALLED = ("torch", "pandas", "pynvml", "nvidia")

_SITECUSTOMIZE = """\
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, Missing())
"""


def blocking(names, folder):
    """Makes a folder one that, first on PYTHONPATH, lets no process import these packages."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(names=names))
    return folder
