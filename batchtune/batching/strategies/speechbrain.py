"""Boundaries as SpeechBrain's DynamicBatchSampler takes them from `num_buckets`."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.batching.samplers import speechbrain_table
from batchtune.batching.strategies.base import Problem
from batchtune.lengths import FloatArray


def speechbrain(problem: Problem, num_buckets: Sequence[int]) -> list[FloatArray]:
    """SpeechBrain's own boundaries; one more, the longest length, where examples are longer than its last.

    max_batch_length / boundary is below 1 in that one more bucket, or 1 where rounding put SpeechBrain's last
    boundary just below max_batch_length: its batch size is 1 by the common rule too.
    """
    return [
        speechbrain_table(problem.histogram, problem.max_batch_length, num_buckets=buckets).boundaries
        for buckets in num_buckets
    ]
