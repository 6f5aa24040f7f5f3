import pytest
from real_speechbrain import load_dynamic_batch_sampler, load_speechbrain


@pytest.fixture(scope="session")
def real_dynamic_batch_sampler():
    """The class of SpeechBrain itself."""
    return load_dynamic_batch_sampler()


@pytest.fixture(scope="session")
def real_dynamic_bucketed_batch():
    """The function of SpeechBrain itself."""
    return load_speechbrain()[3].dynamic_bucketed_batch
