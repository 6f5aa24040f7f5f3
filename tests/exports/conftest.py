import importlib.util

import pytest
from real_speechbrain import load_dynamic_batch_sampler


@pytest.fixture(scope="session")
def sampler():
    """SpeechBrain's own class."""
    if importlib.util.find_spec("speechbrain") is None:
        pytest.skip("speechbrain is not installed")
    return load_dynamic_batch_sampler()
