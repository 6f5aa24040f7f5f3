"""The SpeechBrain export, read by hyperpyyaml and run by SpeechBrain's own sampler."""

import re
import warnings

import numpy as np
import pytest
from buckets.speech import swept
from exports.stream_runs import rendered, write_config
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from real_lengths import librispeech_seconds
from real_speechbrain import load_speechbrain

from batchtune import sampler_from_config
from batchtune.exports import flow_list, number


def loaded(text):
    """The file as a recipe's train.py gets it."""
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(hyperpyyaml.load_hyperpyyaml(text))


@pytest.mark.parametrize("most", [None, 40])
def test_speechbrain_makes_the_rows_number_of_batches(most):
    # The optimal boundaries make use of the cap so that it need not be written.
    strategy = "optimal" if most is None else "quantile"
    tried = {"num_buckets": (10, 15), "strategies": ("speechbrain", strategy)}
    seconds = librispeech_seconds()
    result = swept(seconds, 600, max_batch_size=most, **tried)
    block = loaded(rendered("speechbrain", result))["dynamic_batch_sampler"]
    assert block.get("max_batch_ex") == most
    assert (block["shuffle"], block["batch_ordering"]) == (True, "random")
    sampler = load_speechbrain()[0].DynamicBatchSampler
    batches = sampler([None] * seconds.size, lengths_list=seconds.tolist(), **block)
    assert len(batches) == result.recommended_row.batches


@given(st.lists(st.floats(min_value=1e-7, max_value=1e18), min_size=1, max_size=12))
def test_numbers_survive_hyperpyyaml_exactly(values):
    found = loaded(f"a: {{b: {flow_list(values)}, c: {number(values[0])}}}\n")["a"]
    assert (list(found["b"]), found["c"]) == (values, values[0])


# Pools, which SpeechBrain runs through batchtune's sampler: the lines for train.py in the block's last comment.

POOLED = np.random.default_rng(0).integers(1, 31, 300).astype(np.float64)


def test_speechbrains_loader_runs_the_pools(tmp_path):
    _, dataset, dataloader, _ = load_speechbrain()
    result = swept(POOLED, 60, strategies=("optimal", "pooled"), pool_sizes=(100,))
    pools = [row.pool_size for row in result.rows].index(100)
    pooled = replace(result, recommended=pools, recommended_table=0)
    config = write_config(tmp_path, pooled)
    text = rendered("speechbrain", pooled, config=config)
    block = loaded(text)["dynamic_batch_sampler"]
    assert list(block["bucket_boundaries"]) == result.rows[0].boundaries
    examples = {
        f"utt{index}": {"duration": value, "number": index}
        for index, value in enumerate(POOLED.tolist())
    }
    names = {"train_data": dataset.DynamicItemDataset(examples, output_keys=["number"])}
    said = text[text.index("To run pools") :]
    for_train_py = re.findall(r"^#     ((?!.*asr_brain).*)", said, re.MULTILINE)
    exec("\n".join(for_train_py), names)
    loader = dataloader.make_dataloader(
        names["train_data"], batch_sampler=names["sampler"]
    )
    expected = sampler_from_config(config, POOLED)
    for _ in range(2):
        seen = [batch.number.tolist() for batch in loader]
        assert seen == list(expected)
        assert len(seen) == len(loader)
