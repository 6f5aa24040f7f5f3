import importlib.util

import pytest
from real_speechbrain import load_dynamic_batch_sampler, load_speechbrain


@pytest.fixture(scope="session")
def real_dynamic_batch_sampler():
    """The class of SpeechBrain itself."""
    if importlib.util.find_spec("speechbrain") is None:
        pytest.skip("speechbrain is not installed")
    return load_dynamic_batch_sampler()


@pytest.fixture(scope="session")
def real_dynamic_bucketed_batch():
    """The function of SpeechBrain itself."""
    if importlib.util.find_spec("speechbrain") is None:
        pytest.skip("speechbrain is not installed")
    return load_speechbrain()[3].dynamic_bucketed_batch
