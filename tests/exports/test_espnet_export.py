"""ESPnet: its samplers, with the batch_bins that is written, never exceed max_batch_length."""

import numpy as np
import pytest
from buckets.speech import swept
from exports.stream_runs import content, rendered
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from real_lengths import librispeech_samples

from batchtune.exports.frameworks import batch_bins
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings

RATE = 16_000


ONE_TABLE = {"strategies": ("optimal",), "num_buckets": (13,)}


def ten_or_twelve(unit):
    """A sweep of two lengths, which is at most 60 a batch."""
    lengths = Lengths.of([10.0] * 30 + [12.0] * 30, unit=unit)
    return swept(lengths, 60, **ONE_TABLE)


def cut(lengths, bins):
    """(batch size, longest length) of each batch of espnet2/samplers/num_elements_batch_sampler.py, one feature."""
    batches, size = [], 0
    for length in np.sort(lengths).tolist():
        size += 1
        if size * length > bins:
            batches.append((size, length))
            size = 0
    return [*batches, (size, float(np.max(lengths)))] if size else batches


@given(
    lengths=st.sampled_from([20, 300, 5000]).flatmap(
        lambda top: st.lists(st.integers(1, top), min_size=1, max_size=2500)
    ),
    times=st.integers(1, 5),
    share=st.floats(1, 20),
    # Lengths in seconds: not all of them are exact in floating point.
    scale=st.sampled_from([1, RATE]),
    cap=st.none() | st.integers(1, 40),
)
def test_no_batch_exceeds_max_batch_length(lengths, times, share, scale, cap):
    values = np.repeat(lengths, times)
    limit = int(share * values.max())
    made = swept(values / scale, limit / scale, **ONE_TABLE)
    capped = replace(made, settings=SweepSettings(max_batch_size=cap))
    bins = batch_bins(capped, scale=scale)
    assert bins <= batch_bins(made, scale=scale)
    # ESPnet takes no less than 1, with which two examples of length 1 can still meet.
    if bins == 1:
        return
    batches = cut(values, bins)
    assert max(size * length for size, length in batches) <= limit
    assert cap is None or max(size for size, _ in batches) <= cap
    # On three GPUs, each of which takes every third example of a batch.
    if cap is None:
        batches = cut(values, 3 * bins)
        assert max(-(-size // 3) * length for size, length in batches) <= limit


def test_what_exceeds_the_limit_by_itself_is_named():
    text = rendered("espnet", swept([1.0, 2.0, 40.0], 20))
    assert "The longest example, 40 s, exceeds it by itself" in text


@pytest.mark.parametrize(
    ("unit", "batch_type", "scale"),
    [
        ("s", "numel", 16_000),
        ("ms", "numel", 16),
        ("samples", "numel", 1),
        ("frames", "length", 1),
        (None, "length", 1),
    ],
)
def test_the_unit_decides_the_batch_type_and_the_scale(unit, batch_type, scale):
    text = rendered("espnet", ten_or_twelve(unit))
    # Fewer lengths than quantiles, so that each is one: neighbours 10 and 12, 6 × 10 = 60 examples allowed by 60 / 10.
    # 5 × 12 is the limit; with 50, a sixth of 12 could join five of 10.
    bins = 50 * scale - 1
    assert content("espnet", text) == {"batch_type": batch_type, "batch_bins": bins}
    assert "ends a batch only after the example" in text


# The real samplers, where ESPnet is installed (without its dependencies but typeguard it is enough).


def test_the_real_sampler_on_librispeech(tmp_path):
    pytest.importorskip("espnet2.samplers.num_elements_batch_sampler")
    build = pytest.importorskip("espnet2.samplers.build_batch_sampler")
    samples = librispeech_samples()[::4]
    shapes = tmp_path / "speech_shape"
    lines = [f"{index} {length}\n" for index, length in enumerate(samples.tolist())]
    shapes.write_text("".join(lines))
    text = rendered("espnet", swept(samples / RATE, 600, **ONE_TABLE))
    chosen = content("espnet", text)
    bins = chosen["batch_bins"]
    options = {"type": chosen["batch_type"], "batch_size": 20, "batch_bins": bins}
    batches = build.build_batch_sampler(**options, shape_files=[str(shapes)])
    sizes = [(len(batch), int(samples[[*map(int, batch)]].max())) for batch in batches]
    assert sizes == cut(samples, bins)
