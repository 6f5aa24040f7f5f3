import pytest
from real_speechbrain import load_dynamic_batch_sampler


@pytest.fixture(scope="session")
def sampler():
    """SpeechBrain's own class."""
    return load_dynamic_batch_sampler()
