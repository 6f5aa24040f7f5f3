"""Loaders of DALI's dynamic mode, against the real DALI, on the CPU."""

import importlib.util
import inspect
import random
import sys
import wave
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchtune.errors import LoaderError
from batchtune.loaders import Target
from batchtune.loaders.dali import DaliKind
from batchtune.loaders.worker import digests_of, words_of
from batchtune.workloads import load_function, user_traceback

TARGETS = Path(__file__).parent / "dali_targets.py"
DYNAMIC = "nvidia.dali.experimental.dynamic"
MODES = ("eager", "deferred", "sync_cpu", "sync_full")
FILES = 11

needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None
    or importlib.util.find_spec("nvidia.dali") is None,
    reason="nvidia-dali is not installed",
)


@pytest.fixture(scope="module")
def wavs(tmp_path_factory):
    """Wavs of different lengths, 1 kHz."""
    folder, chance = tmp_path_factory.mktemp("wavs"), random.Random(0)
    for number in range(FILES):
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, 1000, 0, "NONE", ""))
            file.writeframes(chance.randbytes(2 * (100 + 37 * number)))
    return str(folder)


@pytest.fixture
def opened(wavs):
    """`opened(name, options, **arguments)`: a loader of a target, in all threads again when the test ends."""

    def open_loader(name, options=None, **arguments):
        return DaliKind().open(
            target_of(name, {"folder": wavs, **(options or {})}), arguments
        )

    yield open_loader
    if ndd := sys.modules.get(DYNAMIC):
        ndd.set_num_threads(None)


def target_of(name, options, device="cpu", seed=3):
    """Its options are those that it takes."""
    function = load_function(
        name if ":" in name else f"{TARGETS}:{name}",
        {},
        given={*DaliKind.GIVEN, *options},
    )
    takes = frozenset(inspect.signature(function).parameters)
    options = {name: value for name, value in options.items() if name in takes}
    return Target(
        function=function,
        options=options,
        takes=takes,
        seed=seed,
        device=device,
        config=None,
    )


def digests(loader, batches=None):
    with closing(loader.epoch()) as epoch:
        return [
            digests_of(batch)
            for _, batch in zip(range(batches or 99), epoch, strict=False)
        ]


# Which functions, which settings


@needs_dali
def test_functions_that_use_the_dynamic_mode_are_recognised(tmp_path):
    imports = {"torch": False, f"{DYNAMIC} as ndd": True, "nvidia.dali.fn": False}
    for number, (name, is_recognised) in enumerate(imports.items()):
        (tmp_path / f"made{number}.py").write_text(f"def make():\n    import {name}\n")
        assert (
            DaliKind().recognises(target_of(f"{tmp_path}/made{number}.py:make", {}))
            is is_recognised
        )
    assert DaliKind().recognises(target_of("mels", {"folder": ""}))


def test_functions_with_shards_are_read_by_two_threads():
    axes = DaliKind().axes(
        16, accelerator=False, takes=frozenset({"shard_id", "num_shards"})
    )
    assert (axes["num_threads"], axes["reader_threads"]) == ([1, 16], [0, 1, 2])
    assert DaliKind().axes(2, accelerator=True, takes=frozenset({"shard_id"}))[
        "reader_threads"
    ] == [0, 1]
    assert (
        len(DaliKind().settings({"reader_threads": [0, 1], "queue_depth": [1, 2]})) == 3
    )


# What is delivered


@needs_dali
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    files=st.integers(1, FILES),
    batch_size=st.integers(1, 5),
    threads=st.integers(0, 3),
    stick=st.booleans(),
    pad=st.booleans(),
)
def test_each_example_counts_once_in_an_epoch(
    wavs, files, batch_size, threads, stick, pad
):
    threads = min(threads, files)
    options = {
        "folder": wavs,
        "batch_size": batch_size,
        "files": files,
        "stick": stick,
        "pad": pad,
    }
    loader = DaliKind().open(
        target_of("Labels", options), {"reader_threads": threads, "queue_depth": 1}
    )
    for number in range(3):
        counted = Counter()
        for labels in loader.epoch():
            facts = loader.facts(labels)
            assert len(labels.shape) == batch_size  # DALI's batches are full
            assert facts.examples is not None
            counted.update(
                int(label.item()) for label in list(labels.tensors)[: facts.examples]
            )
        assert counted.total() == files
        # Else the epoch starts behind the examples that filled up the last one.
        if pad or number == 0:
            assert set(counted) == set(range(files))


@needs_dali
def test_lengths_are_those_of_each_example(opened):
    loader = opened("mels")
    for batch in loader.epoch():
        facts = loader.facts(batch)
        frames = [extent for _, extent in batch["mel"].shape]
        assert facts.total_length == sum(frames[: facts.examples])
        assert facts.size_bytes == sum(8 * 4 * extent for extent in frames) + 4 * 4
    assert facts.examples == FILES % 4
    assert words_of(batch) == f"4 × 8 × {max(frames)} (mel)"


@needs_dali
def test_equal_seeds_give_equal_batches_in_all_modes(opened):
    for threads in (0, 2):
        found = [
            digests(
                opened("mels", eval_mode=mode, reader_threads=threads, num_threads=2)
            )
            for mode in MODES
        ]
        assert found[0] == found[1] == found[2] == found[3]
        assert (
            len({one["mel"] for one in found[0]})
            == len(found[0])
            == (4 if threads else 3)
        )
    # A kept generator of random numbers goes on; a function that is called anew shuffles as before.
    loader = opened("mels")
    first, second = digests(loader), digests(loader)
    assert [one["label"] for one in first] == [one["label"] for one in second]
    assert all(
        one["mel"] != other["mel"] for one, other in zip(first, second, strict=True)
    )


@needs_dali
def test_an_epoch_can_be_broken_off_and_begun_again(opened):
    for threads in (0, 1, 2):
        loader = opened("mels", reader_threads=threads, queue_depth=1)
        assert len(digests(loader, 1)) == 1
        assert len(digests(loader)) == 3 + (threads == 2)


# What goes wrong


@needs_dali
@pytest.mark.parametrize("mode", ["eager", "deferred", "sync_cpu"])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_operators_error_names_the_line_of_the_user(opened, mode, threads):
    loader = opened("fails", eval_mode=mode, reader_threads=threads)
    for _ in range(2):  # it can be begun again
        with pytest.raises(
            RuntimeError, match="Slice can't be placed out of bounds"
        ) as caught:
            list(loader.epoch())
    assert "mel = ndd.slice(mel, start=[999], shape=[5], axes=[1])" in user_traceback(
        caught.value
    )


@needs_dali
@pytest.mark.parametrize("mode", ["eager", "deferred"])
def test_an_error_that_passed_through_operators_is_dalis(opened, tmp_path, mode):
    for number in range(2):
        (tmp_path / f"{number}.wav").write_bytes(b"no audio" * 20)
    with pytest.raises(RuntimeError, match="Format not recognised"):
        list(opened("decodes", {"folder": str(tmp_path)}, eval_mode=mode).epoch())


@needs_dali
def test_bad_arguments_are_named(opened, wavs):
    with pytest.raises(
        ValueError, match="number of threads per CPU core must not exceed 100"
    ):
        opened("mels", num_threads=10**6)
    with pytest.raises(LoaderError, match="does not take shard_id and num_shards"):
        opened("decodes", reader_threads=2)
    for threads in (0, 1):
        with pytest.raises(
            LoaderError, match="returns a int, but an iterable of batches"
        ):
            opened("a_number", reader_threads=threads)
    with pytest.raises(RuntimeError, match="number of input samples: 11"):
        list(opened("mels", {"folder": wavs}, reader_threads=FILES + 1).epoch())


def test_without_dali_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(
        f"def make():\n    import {DYNAMIC} as ndd\n    yield ndd\n"
    )
    monkeypatch.setitem(sys.modules, DYNAMIC, None)
    with pytest.raises(LoaderError, match="dynamic mode can't be imported") as caught:
        DaliKind().open(target_of(f"{tmp_path / 'late.py'}:make", {}), {})
    assert "pip install nvidia-dali-cuda120" in str(caught.value.hint)
