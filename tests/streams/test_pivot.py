"""SpeechBrain's `dynamic_bucketed_batch`, reproduced on lengths alone."""

import random
from itertools import pairwise

import numpy as np
import pytest

from batchtune.streams.simulated import PivotSettings, speechbrain_batches

OF_SAMPLER = (
    "target_batch_numel",
    "max_batch_numel",
    "max_batch_size",
    "max_padding_ratio",
)


def real_batches(function, lengths, keywords, seed):
    """SpeechBrain's batches, how many examples it had read for each, and the state of `random` afterwards."""
    read = 0

    def stream():
        nonlocal read
        for place, length in enumerate(lengths):
            read += 1
            yield length, place

    random.seed(seed)
    given = dict(keywords)
    sampler = {name: given.pop(name) for name in OF_SAMPLER if name in given}
    batches, reads = [], []
    for batch in function(
        stream(),
        len_fn=lambda item: item[0],
        collate_fn=list,
        sampler_kwargs=sampler,
        **given,
    ):
        batches.append([place for _, place in batch])
        reads.append(read)
    return batches, reads, random.getstate()


def our_batches(lengths, keywords, seed):
    generator = random.Random(seed)
    found = speechbrain_batches(lengths, PivotSettings(**keywords), generator)
    starts = [0, *found.ends.tolist()]
    batches = [found.examples[start:end].tolist() for start, end in pairwise(starts)]
    return batches, found.read.tolist(), generator.getstate()


def made_up(rng, most):
    """Lengths, some of them 0, whole or not; keywords, in and out of all that makes sense."""
    count = int(rng.integers(0, most))
    # Few distinct ones, so that neighbours pad equally and rounding decides.
    whole = rng.integers(rng.random() > 0.05, rng.choice([2, 5, 12, 30, 3000]), count)
    lengths = (whole / rng.choice([1, 7, 10, 16000])).tolist()
    mean = sum(lengths) / count if count else 1.0
    values = {
        "target_batch_numel": [5, 20, 40, 5, 20, 40, -1, 0, 1, 1000],
        "max_batch_numel": [None, None, 10, 30, 60, 30, 0, 2],
        "min_sample_len": [None, None, None, 0.1, 0.5],
        "max_sample_len": [None, None, None, 0.7, 1.5],
        "max_batch_size": [None, 50, None, 50, -1, 0, 1, 3],
        "max_padding_ratio": [0.05, 0.1, 0.2, 0.25, 0.5, None, -0.1, 0.0, 0.9],
        "buffersize": [
            7,
            30,
            64,
            1024,
            count // 3,
            count // 2,
            count,
            count + 1,
            -1,
            0,
        ],
        "drop_end": [False, True],
    }
    keywords = {}
    for name, choices in values.items():
        value = choices[rng.integers(len(choices))]
        if value is not None and name.endswith(("numel", "len")):
            value *= mean
        # As in a recipe: some are left at SpeechBrain's defaults.
        if name == OF_SAMPLER[0] or rng.random() < 0.8:
            keywords[name] = value
    return lengths, keywords


@pytest.mark.parametrize(("cases", "most", "seed"), [(500, 100, 0), (12, 6000, 1)])
def test_the_batches_are_those_of_speechbrain(
    real_dynamic_bucketed_batch, cases, most, seed
):
    rng = np.random.default_rng(seed)
    batched = 0
    for case in range(cases):
        lengths, keywords = made_up(rng, most)
        try:
            real = real_batches(real_dynamic_bucketed_batch, lengths, keywords, case)
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="divides by zero"):
                our_batches(lengths, keywords, case)
        else:
            batched += len(real[0])
            ours = our_batches(lengths, keywords, case)
            assert ours == real, (case, lengths, keywords)
    assert batched > cases
