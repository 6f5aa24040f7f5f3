"""Loaders of DALI's dynamic mode on a GPU: batches lie there, each reader thread has a stream, and seeds hold."""

import sys
from pathlib import Path

import pytest
from gpu.on_cuda import needs_a_real_gpu
from manifests.samples import wav

sys.path.insert(0, str(Path(__file__).parents[1] / "loaders"))

from test_dali import needs_dali, target_of

from batchtune.loaders.dali import DaliKind

pytestmark = [needs_dali, needs_a_real_gpu("DALI brings its own CUDA runtime")]
FILES = 11


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Wavs of 0.1 to 0.6 s, 16 kHz."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(FILES):
        (folder / f"{number:02}.wav").write_bytes(wav(1600 + 800 * number))
    return str(folder)


def opened(name, folder, **arguments):
    return DaliKind().open(
        target_of(name, {"folder": folder}, device="cuda:0"), arguments
    )


def where(loader):
    for batch in loader.epoch():
        yield batch["power"].device.device_type, batch["stream"]


def test_each_reader_thread_has_a_stream_of_its_own(clips):
    for threads in (0, 1, 2):
        found = list(where(opened("where", clips, reader_threads=threads)))
        assert {device for device, _ in found} == {"gpu"}
        assert len({stream for _, stream in found}) == max(1, threads)
