"""Imports the real SpeechBrain, for tests and benchmarks that compare with it."""

import importlib.util
import sys
import types
import warnings
from functools import cache
from importlib.machinery import ModuleSpec

import pytest


def load_dynamic_batch_sampler():
    """Imports the class of SpeechBrain itself."""
    return load_speechbrain()[0].DynamicBatchSampler


@cache  # imported twice, SpeechBrain would wrap torch's DataLoader twice, which then calls itself
def load_speechbrain():
    """Imports SpeechBrain's modules of samplers, of data sets, of loaders and of streams.

    They read no audio, so where torchaudio does not load, an empty module takes its place for the
    import. Afterwards SpeechBrain's modules are forgotten: some of them import more as soon as anyone looks
    at them, and hypothesis looks at every module there is. Without SpeechBrain, the test that asks is skipped.
    """
    if importlib.util.find_spec("speechbrain") is None:
        pytest.skip("speechbrain is not installed")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        torchaudio_or_none(patch)
        try:
            names = ("sampler", "dataset", "dataloader", "iterators")
            return tuple(
                importlib.import_module(f"speechbrain.dataio.{name}") for name in names
            )
        finally:
            _unwrap_loaders()
            for name in list(sys.modules):
                if name.partition(".")[0] == "speechbrain":
                    del sys.modules[name]


def torchaudio_or_none(patch):
    """Puts an empty module in torchaudio's place where it does not load: others import it if it is installed."""
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        empty = types.ModuleType("torchaudio")
        empty.__spec__ = ModuleSpec("torchaudio", None)
        patch.setitem(sys.modules, "torchaudio", empty)


def _unwrap_loaders():
    """Takes back what SpeechBrain changes in torch's loaders: done twice, they call themselves for ever."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if "__old_init__" in vars(_BaseDataLoaderIter):
        _BaseDataLoaderIter.__init__ = _BaseDataLoaderIter.__old_init__
        del _BaseDataLoaderIter.__old_init__
