"""Modules of tests that need a device: skipped as a whole without it."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest


def module_without(
    what: str, module_path: Path, parent: pytest.Collector
) -> pytest.Module:
    """A module that is not imported, and is skipped because of what is missing."""

    class Skipped(pytest.Module):
        def collect(self) -> NoReturn:
            pytest.skip(what)

    return Skipped.from_parent(parent, path=module_path)
