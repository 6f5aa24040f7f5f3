"""The NeMo export, run by NeMo itself where it is installed, and by the sampler that it calls."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_lengths import librispeech_seconds, write_librispeech_cuts
from report_records import (
    made_probe,
    made_sweep,
    proven_probe,
    proven_sweep,
)
from ruamel.yaml import YAML

from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.errors import ResultError
from batchtune.exports import export_of
from batchtune.exports.base import Tuned
from batchtune.exports.nemo import DurationLimit, duration_limit
from batchtune.lengths import Lengths
from batchtune.results import CostModel, Models, Probe, Row, Sweep, TwoDimensionalRow

EXPORT = export_of("nemo")
TWO = TwoDimensionalRow(
    num_buckets=3,
    buckets=[(4.0, 10.0), (4.0, 20.0), (9.0, 25.0)],
    batch_sizes=[3, 2, 1],
    batches=900,
    estimated_epoch_seconds=200.0,
    one_dimensional_batches=1000,
    one_dimensional_epoch_seconds=230.0,
)


@pytest.fixture(scope="module")
def librispeech() -> np.ndarray:
    return librispeech_seconds()


@pytest.fixture(scope="module")
def swept(librispeech: np.ndarray) -> Sweep:
    return sweep(Lengths.of(librispeech, unit="s"), 600, SweepSettings(num_buckets=(13,)), Costs())


@pytest.fixture(scope="module")
def nemo() -> Any:
    """NeMo's own data loading, which few machines have."""
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("nemo is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("nemo.collections.common.data.lhotse.dataloader")


def render(result: Sweep, probe: Probe | None = None) -> str:
    return EXPORT.render(Tuned(sweep=result, probe=probe))


def train_ds(text: str) -> dict[str, Any]:
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    assert list(document) == ["model"] and list(document["model"]) == ["train_ds"]
    settings: dict[str, Any] = document["model"]["train_ds"]
    return settings


def alternative(text: str, first: str) -> dict[str, Any]:
    """The fragment with the commented alternative that begins with this key in place of what it replaces."""
    lines = text[text.index(f"    # {first}:") :].split("\n\n")[0].splitlines()
    commented = YAML(typ="safe", pure=True).load("\n".join(line.replace("    # ", "", 1) for line in lines))
    return {**train_ds(text), **commented}


def recommended(result: Sweep) -> Row:
    assert result.recommended_row is not None
    return result.recommended_row


def nemo_batches(nemo: Any, settings: dict[str, Any], path: Path, tokenizer: Any = None) -> list[list[float]]:
    """The durations in each batch of an epoch, by NeMo's own reading of the settings."""
    from omegaconf import OmegaConf

    asked = {**settings, "cuts_path": str(path), "force_finite": True, "shard_seed": 0, "concurrent_bucketing": False}
    asked.pop("use_lhotse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = nemo.make_structured_with_schema_warnings(OmegaConf.create(asked))
        sampler, _ = nemo.get_lhotse_sampler_from_config(config, 0, 1, tokenizer=tokenizer)
        return [[cut.duration for cut in batch] for batch in sampler]


def lhotse_batches(settings: dict[str, Any], durations: Iterable[float]) -> list[list[float]]:
    """The same by the sampler and the constraint that NeMo gives these settings to."""
    lhotse = pytest.importorskip("lhotse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampling = importlib.import_module("lhotse.dataset.sampling.dynamic_bucketing")
        bins = settings["bucket_duration_bins"]
        sampler = sampling.DynamicBucketingSampler(
            [lhotse.MonoCut(id=str(i), start=0, duration=float(d), channel=0) for i, d in enumerate(durations)],
            constraint=sampling.FixedBucketBatchSizeConstraint(bins, settings["bucket_batch_size"]),
            duration_bins=bins,
            shuffle=settings["shuffle"],
            drop_last=settings["drop_last"],
            num_buckets=settings["num_buckets"],
            buffer_size=settings["bucket_buffer_size"],
        )
        return [[cut.duration for cut in batch] for batch in sampler]


def write_cuts(path: Path, durations: Iterable[float], tokens: Iterable[int] | None = None) -> Path:
    lhotse = pytest.importorskip("lhotse")
    cuts = []
    texts = [1] * 10_000 if tokens is None else list(tokens)
    for index, (duration, count) in enumerate(zip(durations, texts, strict=False)):
        recording = lhotse.Recording(
            id=str(index), sources=[], sampling_rate=16_000, num_samples=round(duration * 16_000), duration=duration
        )
        said = lhotse.SupervisionSegment(
            id=str(index), recording_id=str(index), start=0, duration=duration, text="x" * count
        )
        cuts.append(
            lhotse.MonoCut(
                id=str(index), start=0, duration=duration, channel=0, recording=recording, supervisions=[said]
            )
        )
    lhotse.CutSet.from_cuts(cuts).to_file(path)
    return path


def test_lhotses_sampler_makes_full_batches_of_real_lengths(librispeech: np.ndarray, swept: Sweep) -> None:
    some, row = librispeech[::4], recommended(swept)
    counts = np.bincount(np.searchsorted(row.boundaries, some), minlength=len(row.boundaries))
    found = lhotse_batches(train_ds(render(swept)), some)
    assert len(found) == int(np.sum(-(-counts // np.array(row.batch_sizes))))
    assert sum(map(len, found)) == len(some)


@pytest.mark.slow
def test_nemo_makes_as_many_batches_as_the_row_of_real_lengths(nemo: Any, swept: Sweep, tmp_path: Path) -> None:
    cuts = write_librispeech_cuts(tmp_path / "cuts.jsonl")
    found = nemo_batches(nemo, train_ds(render(swept)), cuts)
    assert len(found) == recommended(swept).batches
    assert sum(map(len, found)) == swept.lengths.count


def test_nemo_keeps_the_longest_example_and_drops_what_is_beyond(nemo: Any, tmp_path: Path) -> None:
    durations = [1.5, 24.525, 24.6, 3.582, 3.583]
    path = write_cuts(tmp_path / "cuts.jsonl", durations)
    found = nemo_batches(nemo, train_ds(render(made_sweep())), path)
    assert sorted(map(sorted, found)) == [[1.5, 3.582], [3.583], [24.525]]


def test_nemo_obeys_the_limit_of_the_alternative(nemo: Any, tmp_path: Path) -> None:
    settings = alternative(render(proven_sweep(), proven_probe()), "bucket_batch_size")
    assert settings["bucket_batch_size"] is None
    path = write_cuts(tmp_path / "cuts.jsonl", [20.0] * 100)
    limit = duration_limit(proven_probe(), recommended(proven_sweep()).boundaries)
    assert limit is not None
    assert max(map(len, nemo_batches(nemo, settings, path))) == limit.fitting(20.0)


def test_nemo_takes_the_first_bin_that_holds_both_lengths(nemo: Any, tmp_path: Path) -> None:
    def letters(text: str) -> list[int]:
        """One token a letter."""
        return list(range(len(text)))

    text = render(msgspec.structs.replace(made_sweep(), two_dimensional=[TWO]))
    settings = alternative(text, "num_buckets")
    durations, tokens = [3.0] * 3 + [3.1] * 2 + [3.2, 8.0], [10] * 3 + [11] * 2 + [21, 5]
    path = write_cuts(tmp_path / "cuts.jsonl", durations, tokens)
    found = nemo_batches(nemo, settings, path, tokenizer=letters)
    assert sorted(map(sorted, found)) == [[3.0, 3.0, 3.0], [3.1, 3.1], [3.2], [8.0]]


def test_the_fragment_has_the_table_and_disables_other_limits() -> None:
    settings = train_ds(render(made_sweep()))
    row = recommended(made_sweep())
    assert (settings["bucket_duration_bins"], settings["bucket_batch_size"]) == (row.boundaries, row.batch_sizes)
    assert (settings["use_lhotse"], settings["use_bucketing"], settings["num_buckets"]) == (True, True, 13)
    assert (settings["batch_size"], settings["batch_duration"], settings["max_duration"]) == (None, None, 24.525)
    assert settings["bucket_duration_bins"][-1] >= made_sweep().lengths.max


def test_the_buffer_is_never_too_small_for_the_batch_sizes() -> None:
    row = msgspec.structs.replace(recommended(made_sweep()), batch_sizes=[2000] * 13)
    settings = train_ds(render(msgspec.structs.replace(made_sweep(), rows=[row], recommended=0)))
    assert settings["bucket_buffer_size"] == 13 * 1999 + 1


def test_milliseconds_become_seconds() -> None:
    lengths = msgspec.structs.replace(made_sweep().lengths, unit="ms", max=24525.0)
    boundaries = [1000 * boundary for boundary in recommended(made_sweep()).boundaries]
    row = msgspec.structs.replace(recommended(made_sweep()), boundaries=boundaries)
    settings = train_ds(render(msgspec.structs.replace(made_sweep(), rows=[row], recommended=0, lengths=lengths)))
    assert settings["bucket_duration_bins"] == pytest.approx(recommended(made_sweep()).boundaries, rel=1e-15)
    assert settings["max_duration"] == 24.525


@pytest.mark.parametrize(("unit", "remedy"), [("samples", "1/16000"), ("frames", "0.01"), ("tokens", "seconds")])
def test_other_units_are_refused_with_what_to_do(unit: str, remedy: str) -> None:
    with pytest.raises(ResultError, match=f"NeMo counts seconds, but the lengths count {unit}") as caught:
        render(made_sweep(unit=unit))
    assert remedy in str(caught.value.hint)


def with_model(probe: Probe, **fields: float) -> Probe:
    model = probe.models.peak_bytes
    assert model is not None
    changed = msgspec.structs.replace(model, **fields)
    return msgspec.structs.replace(probe, models=Models(peak_bytes=changed, step_seconds=None))


def batches_within(limit: DurationLimit, durations: Iterable[float]) -> list[list[float]]:
    """What Lhotse makes of a bucket's examples, in this order, with the constraint that NeMo gives the limit to."""
    lhotse = pytest.importorskip("lhotse")
    base = importlib.import_module("lhotse.dataset.sampling.base")
    dynamic = importlib.import_module("lhotse.dataset.sampling.dynamic")
    constraint = base.TimeConstraint(
        max_cuts=limit.batch_size, max_duration=limit.batch_duration, quadratic_duration=limit.quadratic_duration
    )
    cuts = [lhotse.MonoCut(id=str(i), start=0, duration=float(d), channel=0) for i, d in enumerate(durations)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [[cut.duration for cut in batch] for batch in dynamic.DurationBatcher(cuts, constraint=constraint)]


def limit_of(probe: Probe) -> DurationLimit | None:
    return duration_limit(probe, recommended(proven_sweep()).boundaries)


def probe_of(sizes: Iterable[tuple[float, int]], **model: float) -> Probe:
    """A probe of lengths from 1 to 20 s, by (length, batch size)."""
    made = proven_probe()
    points = [
        msgspec.structs.replace(made.frontier[0], length=length, batch_size=size, trial=0) for length, size in sizes
    ]
    lengths = msgspec.structs.replace(made.lengths, min=1.0, max=20.0)
    return with_model(msgspec.structs.replace(made, frontier=points, lengths=lengths), **model)


class TestDurationLimit:
    @given(data=st.data())
    @settings(deadline=None, max_examples=75)
    def test_lhotses_batches_are_no_larger_than_one_that_was_run(self, data: st.DataObject) -> None:
        lengths = [*sorted(data.draw(st.sets(st.integers(2, 19), max_size=6), label="lengths")), 20]
        sizes = sorted(data.draw(st.lists(st.integers(1, 40), min_size=len(lengths), max_size=len(lengths))))[::-1]
        bins = [*sorted(data.draw(st.sets(st.integers(1, 19), max_size=6), label="bins")), 20]
        probe = probe_of(
            zip(map(float, lengths), sizes, strict=True), quadratic=data.draw(st.sampled_from([0.0, 1e6, 5e7]))
        )
        limit = duration_limit(probe, [float(end) for end in bins])
        if limit is None:
            return
        values = data.draw(st.lists(st.integers(10, 200), min_size=1, max_size=150), label="durations in 0.1 s")
        for low, high in itertools.pairwise([0, *bins]):
            own = [value / 10 for value in values if low < value / 10 <= high]
            # As they come, and the worst that can come: all the short ones, then a long one.
            for order in (own, sorted(own), [*(min(own, default=1.0) for _ in range(60)), *own[-1:]][: 61 * len(own)]):
                for batch in batches_within(limit, order):
                    proven = max(size for length, size in zip(lengths, sizes, strict=True) if length >= max(batch))
                    assert len(batch) <= proven

    def test_real_proportions_get_a_limit_that_is_of_use(self) -> None:
        limit = limit_of(proven_probe())
        assert limit is not None
        assert (limit.batch_size, limit.fitting(24.525)) == (170, 14)
        # 102 × 3.582 s, as x(L) counts it, would let 102 examples up to 6.025 s come together: 101 were run.
        assert limit.batch_duration == pytest.approx(102 * (3.582 + 3.582**2 / 2100), rel=0.01)

    def test_linear_memory_needs_no_quadratic_duration(self) -> None:
        probe = with_model(proven_probe(), quadratic=0.0)
        limit = limit_of(probe)
        assert limit is not None and limit.quadratic_duration is None
        assert "# quadratic_duration: null" in render(proven_sweep(), probe)

    def test_the_quadratic_duration_is_the_ratio_of_the_coefficients(self) -> None:
        limit = limit_of(with_model(proven_probe(), linear=2e8, quadratic=1e6))
        assert limit is not None and limit.quadratic_duration == 200

    def test_milliseconds_become_seconds(self) -> None:
        probe = proven_probe("ms")
        model = CostModel(floor=0, constant=2e9, linear=2.1e5, quadratic=0.1, relative_error=0.004)
        points = [msgspec.structs.replace(point, length=point.length * 1000) for point in probe.frontier]
        lengths = msgspec.structs.replace(probe.lengths, min=1410.0, max=24525.0)
        changed = msgspec.structs.replace(
            probe, models=Models(peak_bytes=model, step_seconds=None), frontier=points, lengths=lengths
        )
        boundaries = [1000 * boundary for boundary in recommended(proven_sweep()).boundaries]
        assert duration_limit(changed, boundaries) == limit_of(proven_probe())

    def test_the_alternative_says_what_was_run_and_what_it_costs(self) -> None:
        text = render(proven_sweep(), proven_probe())
        settings = alternative(text, "bucket_batch_size")
        assert (settings["bucket_batch_size"], settings["batch_size"]) == (None, 170)
        plain = " ".join(re.sub(r"\n *# ", " ", text).split())
        assert "with these bins and this batch_size every batch is still no larger than one that was run" in plain
        assert "the longest examples come in batches of 14" in plain

    @pytest.mark.parametrize(
        "probe",
        [
            *(
                with_model(proven_probe(), **fields)
                for fields in ({"target_linear": 1.0}, {"cross": 1.0}, {"linear": 0.0})
            ),
            made_probe(),
            msgspec.structs.replace(proven_probe(), frontier=proven_probe().frontier[:-1]),
            # With one bucket's worth of short examples, Lhotse could put 3 s among what it took for 1 s.
            probe_of([(3.0, 12), (20.0, 10)]),
        ],
        ids=["targets", "both lengths", "no growth", "interrupted", "not all lengths", "too little is left"],
    )
    def test_where_none_can_be_derived_a_comment_says_so(self, probe: Probe) -> None:
        bounds = [3.0, 24.525] if probe.lengths.max == 20 else recommended(proven_sweep()).boundaries
        assert duration_limit(probe, bounds) is None
        if probe.lengths.max > 20:
            assert "can't be derived here" in render(proven_sweep(), probe)

    def test_without_a_probe_there_is_no_such_alternative(self) -> None:
        assert "quadratic_duration:" not in render(made_sweep())


def test_a_batch_never_exceeds_the_proven_size_of_its_bucket() -> None:
    sweep = proven_sweep()
    few = [msgspec.structs.replace(use, examples=9) if i == 0 else use for i, use in enumerate(sweep.buckets)]
    sizes = train_ds(render(msgspec.structs.replace(sweep, buckets=few)))["bucket_batch_size"]
    assert sizes == [9, *recommended(sweep).batch_sizes[1:]]


class TestTwoDimensions:
    def test_pairs_and_their_gain_stand_in_comments(self) -> None:
        text = render(msgspec.structs.replace(made_sweep(), two_dimensional=[TWO]))
        settings = alternative(text, "num_buckets")
        assert settings["bucket_duration_bins"] == [[4, 10], [4, 20], [9, 25]]
        assert (settings["bucket_batch_size"], settings["bucketing_2d_strict_mode"]) == ([3, 2, 1], False)
        plain = " ".join(re.sub(r"\n *# ", " ", text).split())
        assert "3 bins, 900 batches an epoch, where the best table over durations alone with as many" in plain
        assert "bins needs 1000 (3 min 20 s instead of 3 min 50 s)" in plain

    def test_long_lists_stay_in_comments(self) -> None:
        many = msgspec.structs.replace(
            TWO, buckets=[(float(i), 2.0 * i) for i in range(1, 41)], batch_sizes=list(range(40, 0, -1)), num_buckets=40
        )
        text = render(msgspec.structs.replace(made_sweep(), two_dimensional=[TWO, many]))
        assert train_ds(text) == train_ds(render(made_sweep()))
        lots = msgspec.structs.replace(many, estimated_epoch_seconds=10.0)
        text = render(msgspec.structs.replace(made_sweep(), two_dimensional=[TWO, lots]))
        assert len(alternative(text, "num_buckets")["bucket_duration_bins"]) == 40

    @pytest.mark.parametrize(
        ("unproven", "said"),
        [
            (0, "Every batch size was run, or is no larger than one that was."),
            (2, "Of these, 2 of 3 batch sizes are not proven to fit."),
            (None, "Whether these batches fit was not measured."),
        ],
    )
    def test_what_was_run_is_said(self, unproven: int | None, said: str) -> None:
        row = msgspec.structs.replace(TWO, unproven=unproven)
        text = render(msgspec.structs.replace(made_sweep(), two_dimensional=[row]))
        assert said in " ".join(re.sub(r"\n *# ", " ", text).split())
