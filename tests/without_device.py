"""Modules of tests that need a device: skipped as a whole without it."""

import pytest


def module_without(what, module_path, parent):
    """A module that is not imported, and is skipped because of what is missing."""

    class Skipped(pytest.Module):
        def collect(self):
            pytest.skip(what)

    return Skipped.from_parent(parent, path=module_path)
