"""What all tests share. Being here, it also puts this folder on the import path: `import report_records`."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_this_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives this process, and all that it starts, a temporary folder of its own.

    The lock of a device lies there, and test processes that run side by side must not wait for each other.
    """
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
