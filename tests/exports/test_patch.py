"""A recommendation put into a user's own SpeechBrain YAML: the numbers change, comments and tags stay."""

from __future__ import annotations

import difflib
import random
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_lengths import librispeech_seconds
from report_records import made_sweep, with_recommended, without_recommendation

from batchtune.buckets.sweep import sweep
from batchtune.buckets.sweep_settings import SweepSettings
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.samplers import speechbrain_boundaries
from batchtune.epochs.table import batch_sizes_for
from batchtune.errors import ResultError
from batchtune.exports.base import Tuned
from batchtune.exports.speechbrain import patch_speechbrain
from batchtune.lengths import Lengths
from batchtune.results import BucketUse, Row, Sweep

RECIPES = Path(__file__).parent / "recipes"
BOUNDARIES = [2.0, 3.5, 24.525]
SIZES = [300, 171, 24]
LIST = "[2.0, 3.5, 24.525]"


def row_of(boundaries: list[float], sizes: list[int], strategy: str = "optimal", batches: int = 700) -> Row:
    row = made_sweep().recommended_row
    assert row is not None
    return msgspec.structs.replace(
        row, boundaries=boundaries, batch_sizes=sizes, strategy=strategy, num_buckets=len(boundaries), batches=batches
    )


def swept(most: int | None = None, unit: str | None = "s") -> Sweep:
    """Recommends 3 buckets under 600 s; the best of SpeechBrain's own has 4."""
    own = speechbrain_boundaries(4, 600).tolist()
    rows = [
        row_of(BOUNDARIES, batch_sizes_for(BOUNDARIES, 600, most).tolist()),
        row_of(own, batch_sizes_for(own, 600, most).tolist(), "speechbrain", 1400),
    ]
    lengths = msgspec.structs.replace(made_sweep().lengths, unit=unit)
    result = msgspec.structs.replace(made_sweep(timed=False), rows=rows, recommended=0, lengths=lengths)
    return msgspec.structs.replace(result, settings={"max_batch_size": most})


def patched(text: str, result: Sweep | None = None, key_path: str | None = None) -> str:
    tuned = Tuned(sweep=result or swept())
    found = patch_speechbrain(text, tuned, key_path=key_path, name="train.yaml").text
    assert patch_speechbrain(found, tuned, key_path=key_path).text == found
    return found


def changes(before: str, after: str) -> list[str]:
    """The lines that went (-) and came (+)."""
    lines = difflib.ndiff(before.splitlines(keepends=True), after.splitlines(keepends=True))
    return [line for line in lines if line.startswith(("+ ", "- "))]


def loaded(text: str, **overrides: Any) -> dict[str, Any]:
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(hyperpyyaml.load_hyperpyyaml(text, overrides))


def recipe(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


class TestRecipes:
    def test_a_recipe_of_today(self) -> None:
        text = recipe("current")
        after = patched(text)
        assert "\nmax_batch_length_train: 600\n" in after
        assert f"\n    bucket_boundaries: {LIST} # how many\n" in after
        assert [line for line in text.splitlines() if line.startswith("#") and line not in after] == []
        before, found = loaded(text, data_folder="here"), loaded(after, data_folder="here")
        assert found["dynamic_batch_sampler_train"] == {
            "max_batch_length": 600,
            "bucket_boundaries": BOUNDARIES,
            "shuffle": True,
            "batch_ordering": "random",
            "max_batch_ex": 256,
        }
        assert found["dynamic_batch_sampler_valid"] == before["dynamic_batch_sampler_valid"]
        assert (found["counter"], found["betas"]) == (before["counter"], before["betas"])

    def test_a_recipe_with_old_names_gets_num_buckets_and_a_comment(self) -> None:
        text = recipe("legacy")
        after = patched(text)
        assert sorted(line for line in changes(text, after) if "#" not in line) == [
            "+ max_batch_len: 600\n",
            "+ num_bucket: 4\n",
            "- max_batch_len: 150\n",
            "- num_bucket: 60\n",
        ]
        comments = [line for line in changes(text, after) if "#" in line]
        assert all(line.startswith("+    # ") for line in comments)
        said = re.sub(r"\s*\+    # ", " ", "".join(comments))
        assert "knows no bucket_boundaries" in said
        assert "700 batches" in said and "1400 batches" in said
        assert loaded(after)["dynamic_batch_sampler"]["num_buckets"] == 4

    def test_a_sampler_that_is_gone_is_refused(self) -> None:
        with pytest.raises(ResultError, match=r"train\.yaml, line 5: left_bucket_len belongs to an old sampler"):
            patched(recipe("gone"))

    def test_frames_are_told_from_seconds(self) -> None:
        text = recipe("legacy").replace("   max_batch_len_val", "   feats_hop_size: 0.01\n   max_batch_len_val")
        with pytest.raises(ResultError, match=r"line 8: max_batch_len counts frames here") as caught:
            patched(text)
        assert "--unit frames" in str(caught.value.hint)
        assert "max_batch_len: 600" in patched(text, swept(unit="frames"))

    def test_boundaries_on_lines_of_their_own_become_one_line(self) -> None:
        text = recipe("boundaries")
        after = patched(text)
        assert f"  bucket_boundaries: {LIST} # in seconds\n# short\n" in after
        assert "\n  # the last\n" in after and "\n  max_batch_length: 600   # tuned by hand\n" in after
        assert loaded(after)["sampler"]["bucket_boundaries"] == BOUNDARIES

    def test_a_block_in_braces(self) -> None:
        text = recipe("flow").replace("   # short", " # short")
        assert patched(text) == text.replace("100", "600").replace("num_buckets: 10", f"bucket_boundaries: {LIST}")

    def test_line_ends_are_kept(self) -> None:
        text = recipe("legacy")
        assert patched(text.replace("\n", "\r\n")) == patched(text).replace("\n", "\r\n")

    def test_comments_and_anchors_stay(self) -> None:
        text = (
            "# top\na: &a 1.0e-5 # rate\nb: *a\n# before\nc:\n  # in c\n  max_batch_length: 1 # s\n\n# end\nd: !x {}\n"
        )
        after = patched(text)
        assert after == text.replace("h: 1 #", "h: 600 #").replace(
            "  max_batch", f"  bucket_boundaries: {LIST}\n  max_batch"
        )


def test_the_patched_recipe_makes_the_rows_number_of_batches(sampler: Any) -> None:
    values = librispeech_seconds()[::4]
    chosen = SweepSettings(strategies=("optimal",), num_buckets=(10,))
    result = sweep(Lengths.of(values, unit="s"), 600, chosen, Costs())
    block = loaded(patched(recipe("current"), result), data_folder="here")["dynamic_batch_sampler_train"]
    row = result.recommended_row
    assert row is not None
    assert len(sampler([None] * len(values), lengths_list=values.tolist(), **block)) == row.batches


class TestValues:
    def test_a_source_that_is_used_elsewhere_stays(self) -> None:
        text = "most: 100\nb:\n  max_batch_length: !ref <most>  # s\n  bucket_boundaries: [1]\nlog: !ref <most>\n"
        assert patched(text) == text.replace("!ref <most>  # s", "600          # s").replace("[1]", LIST)

    def test_arithmetic_is_replaced_in_place(self) -> None:
        text = "most: 100\nb: {max_batch_length: !ref <most> * 2, num_buckets: 3}\n"
        assert "b: {max_batch_length: 600, " in patched(text)
        assert patched(text).startswith("most: 100\n")

    def test_a_chain_of_references_is_followed_to_its_end(self) -> None:
        text = "a: {m: 1}\nmost: !ref <a[m]>\nb:\n  max_batch_length: !ref <most>\n  bucket_boundaries: [1]\n"
        assert patched(text) == text.replace("m: 1", "m: 600").replace("[1]", LIST)

    def test_a_chain_that_is_used_on_the_way_is_cut_there(self) -> None:
        text = "a: 1\nmost: !ref <a>\nother: !ref <a>\nb:\n  max_batch_length: !ref <most>\n  bucket_boundaries: [1]\n"
        assert patched(text) == text.replace("most: !ref <a>", "most: 600").replace("[1]", LIST)

    def test_a_placeholder_is_filled_in(self) -> None:
        after = patched("b:\n  max_batch_length: !PLACEHOLDER # yours\n  num_buckets: !PLACEHOLDER\n")
        assert loaded(after)["b"] == {"max_batch_length": 600, "bucket_boundaries": BOUNDARIES}
        assert "# yours\n" in after

    def test_an_alias_is_replaced_by_the_number(self) -> None:
        text = "m: &m 100\nb:\n  max_batch_length: *m\n  num_buckets: 3\n"
        assert patched(text) == f"m: &m 100\nb:\n  max_batch_length: 600\n  bucket_boundaries: {LIST}\n"

    @pytest.mark.parametrize(("anchor", "use"), [("&m ", "*m"), ("", "!ref <b[max_batch_length]>")])
    def test_a_value_that_is_used_elsewhere_is_refused(self, anchor: str, use: str) -> None:
        with pytest.raises(ResultError, match=r"log refers to b\.max_batch_length, which has to change"):
            patched(f"b:\n  max_batch_length: {anchor}100\n  num_buckets: 3\nlog: {use}\n")

    def test_settings_that_are_missing_are_added(self) -> None:
        assert loaded(patched("b: {max_batch_length: 100}"))["b"] == {
            "max_batch_length": 600,
            "bucket_boundaries": BOUNDARIES,
        }

    def test_an_empty_value_is_filled(self) -> None:
        assert "  max_batch_length: 600\n" in patched("b:\n  max_batch_length:\n  num_buckets: 3\n")

    @pytest.mark.parametrize("value", ["|\n    100", "{a: 1}", ">-\n    100"])
    def test_what_is_no_number_is_refused(self, value: str) -> None:
        with pytest.raises(ResultError, match="line 2: max_batch_length is not a number or a list"):
            patched(f"b:\n  max_batch_length: {value}\n  num_buckets: 3\n")

    def test_a_reference_to_nothing_is_refused(self) -> None:
        with pytest.raises(ResultError, match=r"line 2: <most> is not in the file"):
            patched("b:\n  max_batch_length: !ref <most>\n  num_buckets: 3\n")

    def test_settings_at_the_top(self) -> None:
        assert patched("max_batch_length: 1\nnum_buckets: 2\n") == f"max_batch_length: 600\nbucket_boundaries: {LIST}\n"

    def test_letters_of_any_script_and_a_byte_order_mark_stay(self) -> None:
        text = "\ufeff# 語 \U0001f600 é\nname: 語\U0001f600\nb: {max_batch_length: 1, num_buckets: 2}\n"
        assert patched(text).startswith(text[: text.index("b:")])


class TestLargestBatchSize:
    def test_a_cap_that_changes_nothing_stays(self) -> None:
        text = "b:\n  max_batch_length: 600\n  num_buckets: 3\n  max_batch_ex: 300\n"
        assert changes(text, patched(text)) == ["-   num_buckets: 3\n", f"+   bucket_boundaries: {LIST}\n"]

    @pytest.mark.parametrize("value", ["null", "~", ""])
    def test_no_cap_stays_where_none_is_needed(self, value: str) -> None:
        text = patched(f"b:\n  max_batch_length: 100\n  num_buckets: 3\n  max_batch_ex: {value}\n")
        assert loaded(text)["b"]["max_batch_ex"] is None

    @pytest.mark.parametrize("value", ["256", "None", "0", "!ref <x> * 100", "!apply:max [8]", "2.5", "301"])
    def test_a_cap_that_is_needed_is_written(self, value: str) -> None:
        text = f"x: 8\nb:\n  max_batch_length: 100\n  num_buckets: 3\n  max_batch_ex: {value}\n"
        block = loaded(patched(text, swept(most=200)))["b"]
        assert block["max_batch_ex"] == 200

    def test_a_lower_cap_is_kept_and_its_cost_is_told(self) -> None:
        uses = [
            BucketUse(boundary=b, batch_size=1, examples=600, batches=1, length=1, padded_length=1) for b in BOUNDARIES
        ]
        result = msgspec.structs.replace(swept(), buckets=uses)
        text = "cap: 100\nb:\n  max_batch_length: 600\n  num_buckets: 3\n  max_batch_ex: !ref <cap>\n"
        found = patch_speechbrain(text, Tuned(sweep=result, config="runs/a b/sampler.yaml"))
        assert loaded(found.text)["b"]["max_batch_ex"] == loaded(found.text)["cap"] == 100
        sizes = batch_sizes_for(BOUNDARIES, 600, None).tolist()
        capped, full = (sum(-(-600 // min(most, size)) for size in sizes) for most in (100, 600))
        assert found.notes == (
            f"max_batch_ex: 100 is kept. It cuts {sum(size > 100 for size in sizes)} of 3 batch sizes, the largest "
            f"from 300: {capped} batches an epoch instead of {full}. `batchtune sweep-buckets MANIFEST "
            "--max-batch-size 100 --run 'runs/a b'` finds the best table under it; for the larger batches take it out. "
            "Then patch again.",
        )
        assert capped > full

    @pytest.mark.parametrize(
        ("value", "note"),
        [
            ("301", "lowered from 301 to 200"),
            ("!ref <x> * 100", "lowered from 800 to 200"),
            ("many", "'many', which is not a number"),
        ],
    )
    def test_a_cap_that_changes_is_told(self, value: str, note: str) -> None:
        text = f"x: 8\nb:\n  max_batch_length: 100\n  num_buckets: 3\n  max_batch_ex: {value}\n"
        (told,) = patch_speechbrain(text, Tuned(sweep=swept(most=200))).notes
        assert note in told

    def test_a_cap_is_added_where_there_is_none(self) -> None:
        block = loaded(patched("b:\n  max_batch_length: 100\n  num_buckets: 3\n", swept(most=200)))["b"]
        assert block == {"max_batch_length": 600, "bucket_boundaries": BOUNDARIES, "max_batch_ex": 200}


class TestBlocks:
    TWO = "a:\n  max_batch_length: 1\n  num_buckets: 2\nc: {d: {max_batch_length: 1, num_buckets: 2}}\n"

    def test_of_two_the_key_path_chooses(self) -> None:
        with pytest.raises(ResultError, match=r"has 2 blocks of batching settings: a, c\.d"):
            patched(self.TWO)
        assert patched(self.TWO, key_path="c.d").startswith(self.TWO[:40])
        assert patched(self.TWO, key_path="a").endswith(self.TWO[-30:])

    @pytest.mark.parametrize("path", ["x", "a.x", "a.num_buckets", ""])
    def test_a_key_path_to_nothing_is_refused(self, path: str) -> None:
        with pytest.raises(ResultError, match="has no settings at"):
            patched(self.TWO, key_path=path)

    def test_a_key_path_to_something_else_is_refused(self) -> None:
        with pytest.raises(ResultError, match="line 4: c holds no settings of a DynamicBatchSampler"):
            patched(self.TWO, key_path="c")

    @pytest.mark.parametrize("text", ["a: 1\n", "batch_size: 16\n", "max_batch_length: 3\n"])
    def test_a_file_without_the_block_is_refused(self, text: str) -> None:
        with pytest.raises(ResultError, match="has no settings of a DynamicBatchSampler") as caught:
            patched(text)
        assert "--to speechbrain" in str(caught.value.hint)

    def test_a_block_in_another_file_is_refused(self) -> None:
        text = "b: !include:x.yaml\n  max_batch_length: 1\n  num_buckets: 2\n"
        with pytest.raises(ResultError, match="line 1: the settings are in another file"):
            patched(text)

    @pytest.mark.parametrize(
        "valid", ["valid: *t", "other: {<<: *t, num_buckets: 4}", "other: {<<: [*t]}", "valid: !ref <train>"]
    )
    def test_a_block_that_validation_shares_is_refused(self, valid: str) -> None:
        text = f"train: &t\n  max_batch_length: 1\n  num_buckets: 2\n{valid}\n"
        with pytest.raises(ResultError, match=r"takes the settings of train and would change with them"):
            patched(text)

    def test_settings_from_a_merge_are_refused(self) -> None:
        text = "base: &base {max_batch_length: 1, num_buckets: 2}\ntrain:\n  <<: *base\n  max_batch_len: 3\n"
        with pytest.raises(ResultError, match="line 3: the settings are merged"):
            patched(text, key_path="train")

    def test_lengths_in_another_unit_leave_a_comment(self) -> None:
        text = "a: 1\nb:\n  max_batch_length: 1\n  num_buckets: 2\n"
        added = [line for line in changes(text, patched(text, swept(unit="ms"))) if line.startswith("+   #")]
        assert "it must return ms" in re.sub(r"\s*\+   # ", " ", " ".join(added))
        flow = "a: 1\nb: {max_batch_length: 1, num_buckets: 2}\n"
        assert patched(flow, swept(unit="ms")).splitlines()[1].startswith("# ")

    def test_a_hostile_unit_stays_in_its_comment(self) -> None:
        after = patched("b: {max_batch_length: 1, num_buckets: 2}\n", swept(unit="x\nevil: 1\u2028evil: 2"))
        assert loaded(after).keys() == {"b"}


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


class TestDamage:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("- 1\n", "no settings by name"),
            ("a: 1\n--- \nb: 2\n", "expected a single document"),
            ("a: [1\n", "is not a readable YAML file"),
            ("b:\n\tmax_batch_length: 1\n", "is not a readable YAML file"),
            (
                "b:\n  max_batch_length: 1\n  max_batch_length: 2\n",
                "line 3: the file has the key 'max_batch_length' a",
            ),
            (
                "b: {max_batch_length: *x, num_buckets: 1}\n",
                "found undefined alias 'x'",
            ),
            ("a: " + "[" * 2000 + "]" * 2000, "nests too many levels"),
            ("a: " + "x" * 200_000, "200,003 characters"),
            ("a: \x00\n", "is not a readable YAML file"),
        ],
    )
    def test_each_has_its_message(self, text: str, message: str) -> None:
        with pytest.raises(ResultError, match=message):
            patched(text)

    def test_a_sweep_that_recommends_nothing_is_refused(self) -> None:
        with pytest.raises(ResultError, match="recommends nothing"):
            patched(recipe("flow"), without_recommendation(made_sweep()))

    def test_a_recipe_with_old_names_needs_a_row_of_speechbrains_own(self) -> None:
        only = [row for row in with_recommended(swept(), "optimal", 3).rows if row.strategy == "optimal"]
        with pytest.raises(ResultError, match="holds no row that SpeechBrain with num_buckets can express"):
            patched(recipe("legacy"), msgspec.structs.replace(swept(), rows=only))

    @settings(deadline=None, max_examples=40)
    @given(st.randoms(use_true_random=False))
    def test_random_damage_raises_only_result_errors(self, generator: random.Random) -> None:
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


def test_sizes_that_are_not_proven_are_named_in_a_comment() -> None:
    result = swept()
    rows = [msgspec.structs.replace(row, unproven=2, used_buckets=3) for row in result.rows]
    after = patched("block:\n  max_batch_length: 100\n", msgspec.structs.replace(result, rows=rows))
    assert "  # 2 of 3 batch sizes are not proven to fit: `batchtune report` says why.\n" in after
