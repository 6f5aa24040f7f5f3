"""What the tests of the manifests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchtune.errors import ManifestError
from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths

Read = Callable[..., Lengths]
Refusal = Callable[..., ManifestError]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes a manifest and reads it: read(content, name="manifest", **options)."""

    def run(content: str | bytes, name: str = "manifest", **options: object) -> Lengths:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_lengths(path, ReadOptions(**options))  # type: ignore[arg-type]

    return run


@pytest.fixture
def refusal(read: Read) -> Refusal:
    """The ManifestError that reading a manifest must end with."""

    def run(
        content: str | bytes, name: str = "manifest", **options: object
    ) -> ManifestError:
        with pytest.raises(ManifestError) as caught:
            read(content, name, **options)
        assert caught.value.hint
        return caught.value

    return run


def cases(rows: dict[str, tuple[Any, ...]], names: str) -> pytest.MarkDecorator:
    """Run a test for each row, which is named by what it holds."""
    return pytest.mark.parametrize(names.split(), rows.values(), ids=rows)
