"""How others search for the largest batch size, written from their published description, to compare with.

Both ask one question, does a batch of this size and length fit, and know nothing of how much memory one took. What is
the same for all that are compared is given: the lengths, what the data can fill, and how close to the limit is close
enough.
"""


def each_length_anew(fits, lengths, cap, tolerance):
    """For each length by itself: from 2 doubled until it fails, then bisected between the last two.

    As PyTorch Lightning documents `lightning.pytorch.callbacks.BatchSizeFinder` with `mode="binsearch"` and
    `init_val=2`. That finds one batch size, for the longest examples; for a frontier it is run once for each length.
    It bisects down to one example; here it stops at the tolerance, as all that are compared do.

    Args:
        fits: Runs one trial.
        lengths: In any order.
        cap: What the data can fill.
        tolerance: Largest gap between a size that fits and one that does not, as a share; one example at least.

    Yields:
        Each length and the largest batch size that was seen to fit; 0 where not even one example does.
    """
    for length in lengths:
        yield length, _bracketed(fits, length, 2, cap(length), tolerance)


def from_the_last_answer(fits, lengths, cap, tolerance, start=32):
    """From the longest to the shortest, each search begun where the last one ended.

    As NVIDIA NeMo documents its OOMptimizer (`scripts/speech_recognition/oomptimizer.py --help`, and NeMo's pull
    request 9763): the buckets of the longest examples first, starting from `--start-batch-size` (32); twice as many
    while they fit, half as many while they do not, then bisection, until the gap is one example or at most
    `--threshold` of the smallest size that failed. Its threshold is 5% unless told otherwise; here it is the
    tolerance, as for all that are compared.

    Args:
        fits: Runs one trial.
        lengths: In any order.
        cap: What the data can fill.
        tolerance: Largest gap, as a share; one example at least.
        start: Batch size tried first at the longest length.

    Yields:
        Each length and the largest batch size that was seen to fit; 0 where not even one example does.
    """
    for length in sorted(lengths, reverse=True):
        found = _bracketed(fits, length, start, cap(length), tolerance)
        yield length, found
        start = max(1, found)


def _bracketed(fits, length, start, cap, tolerance):
    """Doubled from the start while it fits, halved while nothing has, then bisected down to the tolerance."""
    passed, failed, size = 0, cap + 1, min(start, cap)
    while failed - passed > max(1, int(passed * tolerance)):
        if fits(size, length):
            passed = size
        else:
            failed = size
        if failed > cap:
            size = min(2 * passed, cap)
        elif passed == 0:
            size = failed // 2
        else:
            size = (passed + failed) // 2
    return passed
