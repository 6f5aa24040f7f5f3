"""A recommendation put into a user's own SpeechBrain YAML: the numbers change, comments and tags stay."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_lengths import librispeech_seconds
from report_records import made_sweep, without_recommendation

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError
from batchtune.exports.base import Tuned
from batchtune.exports.speechbrain import patch_speechbrain
from batchtune.lengths import Lengths
from batchtune.results import Sweep, SweepSettings

RECIPES = Path(__file__).parent / "recipes"
BOUNDARIES = [2.0, 3.5, 24.525]
LIST = "[2.0, 3.5, 24.525]"


TWO_BLOCKS = "a:\n  max_batch_length: 1\n  num_buckets: 2\nc: {d: {max_batch_length: 1, num_buckets: 2}}\n"


def swept(most: int | None = None, unit: str | None = "s") -> Sweep:
    """Recommends 3 buckets under 600 s."""
    made = made_sweep(timed=False, unit=unit)
    row = msgspec.structs.replace(
        made.rows[0],
        boundaries=BOUNDARIES,
        batch_sizes=batch_sizes_for(BOUNDARIES, 600, most).tolist(),
        num_buckets=3,
    )
    return msgspec.structs.replace(
        made, rows=[row], recommended=0, settings={"max_batch_size": most}
    )


def patched(text: str, result: Sweep | None = None, key_path: str | None = None) -> str:
    tuned = Tuned(sweep=result or swept())
    found = patch_speechbrain(text, tuned, key_path=key_path, name="train.yaml").text
    assert patch_speechbrain(found, tuned, key_path=key_path).text == found
    return found


def loaded(text: str, **overrides: Any) -> dict[str, Any]:
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(hyperpyyaml.load_hyperpyyaml(text, overrides))


def recipe(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def test_a_recipe_of_today() -> None:
    text = recipe("current")
    after = patched(text)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert all(comment in after for comment in comments)
    assert f"\n    bucket_boundaries: {LIST} # how many\n" in after
    before = loaded(text, data_folder="here")
    found = loaded(after, data_folder="here")
    assert found.pop("dynamic_batch_sampler_train") == {
        "max_batch_length": 600,
        "bucket_boundaries": BOUNDARIES,
        "shuffle": True,
        "batch_ordering": "random",
        "max_batch_ex": 256,
    }
    assert all(found[name] == before[name] for name in found if name != "activation")


def test_the_patched_recipe_makes_the_rows_number_of_batches(sampler: Any) -> None:
    values = librispeech_seconds()[::4]
    chosen = SweepSettings(strategies=("optimal",), num_buckets=(10,))
    result = sweep(Lengths.of(values, unit="s"), 600, chosen, Costs())
    block = loaded(patched(recipe("current"), result), data_folder="here")[
        "dynamic_batch_sampler_train"
    ]
    row = result.recommended_row
    assert row is not None
    assert (
        len(sampler([None] * len(values), lengths_list=values.tolist(), **block))
        == row.batches
    )


def test_a_block_in_braces() -> None:
    text = recipe("flow").replace("   # short", " # short")
    assert patched(text) == text.replace("100", "600").replace(
        "num_buckets: 10", f"bucket_boundaries: {LIST}"
    )


def test_comments_and_anchors_stay() -> None:
    text = "# 語\na: &a 1.0e-5 # rate\nb: *a\n# before\nc:\n  # in c\n  max_batch_length: 1 # s\n\nd: !x {}\n"
    after = text.replace("h: 1 #", "h: 600 #").replace(
        "  max_batch", f"  bucket_boundaries: {LIST}\n  max_batch"
    )
    assert patched(text) == after


def test_a_comment_that_would_get_lost_is_refused() -> None:
    with pytest.raises(
        ResultError,
        match="is written so that its numbers can't be replaced safely",
    ):
        patched(recipe("boundaries"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("legacy", "line 7: max_batch_len is of SpeechBrain before 1.0"),
        ("gone", "line 4: max_batch_len is of Speech"),
    ],
)
def test_a_recipe_with_old_names_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ResultError, match=problem) as caught:
        patched(recipe(name))
    assert "--to speechbrain" in str(caught.value.hint)


def test_frames_are_told_from_seconds() -> None:
    text = "b:\n  feats_hop_size: 0.01\n  max_batch_length: 100\n"
    with pytest.raises(
        ResultError,
        match=r"line 2: lengths are frames here \(feats_hop_size\), but s in the",
    ) as caught:
        patched(text)
    assert "--unit frames" in str(caught.value.hint)
    assert "max_batch_length: 600" in patched(text, swept(unit="frames"))


@pytest.mark.parametrize(
    ("value", "rest"),
    [
        ("!ref <most>  # s", ""),
        ("!ref <most> * 2", ""),
        ("!PLACEHOLDER", ""),
        ("", ""),
        ("*m", ""),
        ("!ref <most>", "log: !ref <most>\n"),
        ("!ref <nothing>", ""),
    ],
)
def test_the_number_takes_the_place_of_any_value(value: str, rest: str) -> None:
    text = f"most: &m 100\nb:\n  max_batch_length: {value}\n  num_buckets: 3\n{rest}"
    after = patched(text)
    assert loaded(after)["b"] == {
        "max_batch_length": 600,
        "bucket_boundaries": BOUNDARIES,
    }
    assert after.startswith("most: &m 100\n") and after.endswith(rest)
    assert ("# s" in after) == ("# s" in text)


@pytest.mark.parametrize(
    "text", ["b: {max_batch_length: 100}", "max_batch_length: 1\nnum_buckets: 2\n"]
)
def test_settings_that_are_missing_are_added_wherever_they_stand(text: str) -> None:
    found = loaded(patched(text))
    assert found.get("b", found) == {
        "max_batch_length": 600,
        "bucket_boundaries": BOUNDARIES,
    }


@pytest.mark.parametrize("value", ["|\n    100", "{a: 1}", ">-\n    100"])
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(
        ResultError, match="line 2: max_batch_length is not a number or a list"
    ):
        patched(f"b:\n  max_batch_length: {value}\n  num_buckets: 3\n")


@pytest.mark.parametrize(
    "value", ["", "  max_batch_ex: 300\n", "  max_batch_ex: null\n"]
)
def test_a_cap_that_changes_nothing_stays(value: str) -> None:
    text = f"b:\n  max_batch_length: 600\n  num_buckets: 3\n{value}"
    assert patched(text) == text.replace("num_buckets: 3", f"bucket_boundaries: {LIST}")


@pytest.mark.parametrize(
    "value", ["", "256", "null", "!ref <x> * 100", "!apply:max [8]", "301"]
)
def test_a_cap_that_is_needed_is_written(value: str) -> None:
    text = f"x: 8\nb:\n  max_batch_length: 100\n  num_buckets: 3\n  max_batch_ex: {value}\n"
    assert loaded(patched(text, swept(most=200)))["b"]["max_batch_ex"] == 200


def test_a_lower_cap_is_kept() -> None:
    text = "cap: 100\nb:\n  max_batch_length: 600\n  num_buckets: 3\n  max_batch_ex: !ref <cap>\n"
    found = patch_speechbrain(text, Tuned(sweep=swept()))
    assert loaded(found.text)["b"]["max_batch_ex"] == 100
    assert found.notes == (
        "max_batch_ex: 100 is kept: batches only get smaller. --max-batch-size sweeps with it.",
    )


def test_of_two_blocks_the_key_path_chooses() -> None:
    with pytest.raises(
        ResultError, match=r"has 2 blocks of batching settings: a, c\.d"
    ):
        patched(TWO_BLOCKS)
    assert patched(TWO_BLOCKS, key_path="c.d").startswith(TWO_BLOCKS[:40])
    assert patched(TWO_BLOCKS, key_path="a").endswith(TWO_BLOCKS[-30:])


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("x", "has no settings at 'x'"),
        ("a.num_buckets", "has no settings at"),
        ("", "has no settings at"),
        ("c", "line 4: c has no settings of a DynamicBatchSampler"),
    ],
)
def test_a_key_path_to_something_else_is_refused(path: str, problem: str) -> None:
    with pytest.raises(ResultError, match=problem):
        patched(TWO_BLOCKS, key_path=path)


@pytest.mark.parametrize(
    "text", ["a: 1\n", "batch_size: 16\n", "max_batch_length: 3\n"]
)
def test_a_file_without_the_block_is_refused(text: str) -> None:
    with pytest.raises(
        ResultError, match="has no settings of a DynamicBatchSampler"
    ) as caught:
        patched(text)
    assert "--to speechbrain" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train: &t {B}\nvalid: *t\n", "valid takes train and would change with it"),
        (
            "train: &t {B}\nother: {<<: *t, num_buckets: 4}\n",
            "takes train and would change",
        ),
        ("train: &t {B}\nother: {<<: [*t]}\n", "takes train and would change"),
        ("train: {B}\nvalid: !ref <train>\n", "valid takes train and would change"),
        (
            "train: {B}\nlog: !ref <train[num_buckets]>\n",
            "log takes train.num_buckets and would change",
        ),
        (
            "train: {max_batch_length: &m 1, num_buckets: 2}\nlog: *m\n",
            "log takes train.max_batch_length and would",
        ),
        (
            "train: !include:x.yaml\n  max_batch_length: 1\n  num_buckets: 2\n",
            "line 1: the settings are in another f",
        ),
        (
            "base: &b {B}\ntrain:\n  <<: *b\n  max_batch_length: 3\n",
            "line 3: the settings are .* merged",
        ),
    ],
)
def test_settings_that_others_share_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ResultError, match=problem):
        patched(
            text.replace("{B}", "{max_batch_length: 1, num_buckets: 2}"),
            key_path="train",
        )


def test_notes_say_what_a_length_is_and_what_is_not_proven() -> None:
    result = swept(unit="ms")
    rows = [
        msgspec.structs.replace(row, unproven=2, used_buckets=3) for row in result.rows
    ]
    tuned = Tuned(sweep=msgspec.structs.replace(result, rows=rows))
    notes = patch_speechbrain("b: {max_batch_length: 1, num_buckets: 2}\n", tuned).notes
    assert notes == (
        "2 of 3 batch sizes are not proven to fit: `batchtune report` says why.",
        "length_func must return ms; most recipes' returns seconds, for example x['duration'] * 1000.",
    )


PIECES = [
    *"\t\n :-{}[]#'\"|>@,x%\r\u2028\x85\x00",
    "&a ",
    "*a",
    "!ref <",
    "? ",
    "<<: ",
    "!!",
    "---",
    "max_batch_length: ",
    "",
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- 1\n", "no settings by name"),
        ("a: 1\n--- \nb: 2\n", "expected a single document"),
        (
            "b:\n  max_batch_length: 1\n  max_batch_length: 2\n",
            "numbers can't be replaced safely",
        ),
        ("b: {max_batch_length: *x, num_buckets: 1}\n", "found undefined alias 'x'"),
        ("a: " + "[" * 700 + "]" * 700, "not a readable YAML file"),
        ("a: " + "x" * 200_000, "line of more than 100,000 characters"),
        ("a: \x00\n", "is not a readable YAML file"),
    ],
)
def test_damage_has_its_message(text: str, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        patched(text)


def test_a_sweep_that_recommends_nothing_is_refused() -> None:
    with pytest.raises(ResultError, match="recommends nothing"):
        patched(recipe("flow"), without_recommendation(made_sweep()))


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False))
def test_random_damage_raises_only_result_errors(generator: random.Random) -> None:
    """A damaged recipe is patched, once and for all, or refused with a message."""
    text = recipe(generator.choice(["current", "legacy", "boundaries", "flow", "gone"]))
    for _ in range(generator.randint(1, 4)):
        start = generator.randrange(len(text) + 1)
        end = min(len(text), start + generator.choice([0, 0, 1, 1, 3, 20]))
        text = text[:start] + generator.choice(PIECES) + text[end:]
    tuned = Tuned(sweep=swept())
    try:
        after = patch_speechbrain(text, tuned).text
    except ResultError:
        return
    assert patch_speechbrain(after, tuned).text == after
