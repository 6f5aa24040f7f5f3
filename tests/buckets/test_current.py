"""The settings that a user has now: read from words and files, refused with one message, never executed."""

import random
from pathlib import Path

import numpy as np
import pytest
from manifests.samples import damaged
from ruamel.yaml import YAML

from batchtune.buckets.current import current_batching, read_current
from batchtune.errors import BatchtuneError, ResultError, UsageError
from batchtune.lengths import Lengths

CONFIGS = Path(__file__).parent / "current_configs"
LENGTHS = Lengths.of(
    np.random.default_rng(0).lognormal(2, 0.6, 3000).clip(0.2, 60), unit="s"
)
TABLE = "bucket_boundaries=5:10:60,bucket_batch_sizes=20:10:2"


def of_file(tmp_path, text, key_path=""):
    path = tmp_path / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return read_current(f"{path}{key_path}")


def record_of(current):
    return current.settings.record()


def table_of(text):
    return current_batching(read_current(text), LENGTHS).table


# Written out


def test_speechbrains_settings_are_described():
    current = read_current(
        "max_batch_length=600, num_buckets=200,max_batch_ex=64,shuffle=true"
    )
    assert (current.settings.NAME, current.source) == ("speechbrain", "--current")
    assert record_of(current)["shuffle"] is True
    assert (
        current.settings.describe("s")
        == "SpeechBrain, max_batch_length=600 s, num_buckets=200, max_batch_ex=64"
    )


@pytest.mark.parametrize(
    ("text", "boundaries", "sizes"),
    [
        (
            "max_batch_length=100,bucket_boundaries=2:4:8.5,max_batch_ex=40",
            [2, 4, 8.5, LENGTHS.longest],
            [40, 25, 11, 1],
        ),
        (
            "max_batch_length=50*2,num_buckets=7,bucket_boundaries=30:90",
            [30, 90],
            [3, 1],
        ),
        ("batch_size=16", [LENGTHS.longest], [16]),
        (TABLE, [5, 10, 60], [20, 10, 2]),
    ],
    ids=["colons", "boundaries before their number", "fixed", "table"],
)
def test_settings_make_a_table(text, boundaries, sizes):
    found = table_of(text)
    assert found.boundaries.tolist() == boundaries
    assert found.batch_sizes.tolist() == sizes


def test_a_table_of_ones_own_holds_all_lengths():
    current = read_current(TABLE)
    assert current.settings.describe("s") == "batchtune's sampler, 3 buckets"
    said = r"longest example \(61 s\) is beyond the last boundary 60 s"
    with pytest.raises(UsageError, match=said):
        current_batching(current, Lengths.of([61.0], unit="s"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a file nor key=value"),
        ("foo=3", "foo says nothing about the batches"),
        ("max_batch_length=600", "needs num_buckets or bucket_boundaries"),
        (
            "max_batch_length=6,bucket_boundaries=1:2:2",
            "bucket_boundaries must ascend",
        ),
        ("max_batch_length=600,num_buckets=200,colour=3", "unknown field `colour`"),
        (
            "max_batch_length=,num_buckets=3",
            "max_batch_length: must be a number, got `null`",
        ),
        (
            "max_batch_length=600,num_buckets=3,num_buckets=4",
            "the key is given twice",
        ),
        (
            "max_batch_length=0,num_buckets=3",
            "max_batch_length: must be a number of at least 1e-09",
        ),
        (
            "max_batch_length=1e300,num_buckets=3",
            "max_batch_length: must be a number of at most 1e+15",
        ),
        (
            "max_batch_length=600,num_buckets=0",
            "num_buckets: must be a whole number of at least 1",
        ),
        (
            "max_batch_length=600,num_buckets=3,batch_ordering=up",
            "batch_ordering: Invalid enum value 'up'",
        ),
        (f"{TABLE},batch_overhead=1", "batch_overhead goes with pool_size"),
        (
            f"{TABLE},pool_size=500,batch_overhead=-1",
            "batch_overhead: must be a number of at least 0",
        ),
    ],
)
def test_what_is_wrong_gives_one_message_that_names_it(text, message):
    with pytest.raises(UsageError) as caught:
        read_current(text)
    assert message in caught.value.message
    assert caught.value.message.startswith("--current: ")
    assert "Known are max_batch_length with num_buckets" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("2:1,bucket_batch_sizes=3:3", "bucket_boundaries must ascend"),
        ("1:2,bucket_batch_sizes=3", "1 bucket_batch_sizes for 2"),
    ],
)
def test_what_makes_no_table_is_refused(table, said):
    with pytest.raises(UsageError, match=f"--current: .*{said}"):
        table_of(f"bucket_boundaries={table}")


# SpeechBrain's files


def test_the_training_block_is_taken_and_its_references_resolved():
    current = read_current(str(CONFIGS / "recipe.yaml"))
    assert record_of(current) == {
        "max_batch_length": 500,
        "num_buckets": 200,
        "max_batch_ex": 256,
        "shuffle": True,
        "batch_ordering": "random",
    }
    record = current.record("", {})
    assert (record["source"], record["key_path"]) == (
        "recipe.yaml",
        "dynamic_batch_sampler_train",
    )


def test_a_recipe_without_dynamic_batching_has_none(tmp_path):
    text = (
        (CONFIGS / "recipe.yaml")
        .read_text()
        .replace("dynamic_batching: True", "dynamic_batching: False")
    )
    with pytest.raises(
        ResultError, match="has no settings of a DynamicBatchSampler"
    ) as caught:
        of_file(tmp_path, text)
    assert "batch_size" in (caught.value.hint or "")


def test_the_names_of_old_recipes_are_understood():
    record = record_of(read_current(str(CONFIGS / "old_recipe.yaml")))
    assert (record["max_batch_length"], record["shuffle"]) == (30_000, True)


def test_several_blocks_are_listed_with_how_to_choose(tmp_path):
    text = "first: {max_batch_length: 5, num_buckets: 3}\nin: {second: {max_batch_length: 6, num_buckets: 3}}\n"
    with pytest.raises(
        ResultError, match=r"2 blocks of batching settings: first, in\.second"
    ) as caught:
        of_file(tmp_path, text)
    assert caught.value.hint == "Say which one: --current train.yaml:first."
    assert record_of(of_file(tmp_path, text, ":in.second"))["max_batch_length"] == 6


def test_a_block_behind_several_aliases_is_one(tmp_path):
    text = "train: &it {max_batch_length: 5, num_buckets: 3}\nmore: *it\nagain: {deeper: *it}\n"
    assert of_file(tmp_path, text).key_path == "train"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base: &b {num_buckets: 7}\ntrain: {<<: *b, max_batch_length: 5}\n",
            "line 2: the settings are .* merged",
        ),
        (
            "train: !include:other.yaml {max_batch_length: 3, num_buckets: 3}\n",
            "the settings are in another file",
        ),
        (
            "train: {max_batch_length: 3, left_bucket_len: 2}\n",
            "train: needs num_buckets or bucket_boundaries",
        ),
    ],
)
def test_a_block_that_does_not_hold_its_settings_is_refused(tmp_path, text, message):
    with pytest.raises(ResultError, match=message):
        of_file(tmp_path, text)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("!ref <a>", 6),
        ("!ref <a> * <b>", 24),
        ("!ref <in[x]> * 2 * <b>", 20),
        ("!copy <a>", 6),
        ("1.e+1", 10),
    ],
)
def test_references_and_products(tmp_path, formula, value):
    rest = "a: 6\nb: 4\nin: {x: 2.5}\n"
    text = f"{rest}train:\n  num_buckets: 3\n  max_batch_length: {formula}\n"
    assert record_of(of_file(tmp_path, text))["max_batch_length"] == value
    resolved = pytest.importorskip("hyperpyyaml").resolve_references(text).getvalue()
    assert (
        YAML(typ="safe", pure=True).load(resolved)["train"]["max_batch_length"] == value
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("!PLACEHOLDER", "line 6: .*!PLACEHOLDER"),
        ("!apply:os.system [touch owned]", "!apply:os.system"),
        (
            "!!python/object/apply:os.system [ls]",
            "max_batch_length: must be a number, got `array`",
        ),
        ("!ref <gone>", "points to 'gone', which does not exist"),
        ("!ref <round>", "form a circle"),
        ("!ref <object.attribute>", "<object.attribute>"),
        (
            "!ref <one> * __import__('os')",
            "is not a product of numbers and references",
        ),
        ("!ref 9**9**9**9**9", "is not a product of numbers and references"),
        ("!ref <one> + 1", "is not a product of numbers and references"),
        ("!ref <product> * 2", "not a plain number"),
        ("[1, 2]", "max_batch_length: must be a number, got `array`"),
    ],
)
def test_a_value_that_cant_be_read_is_refused(tmp_path, value, message):
    text = "one: 1\nproduct: !ref <one> * 2\nround: !ref <round>\n"
    text += f"train:\n  num_buckets: 3\n  max_batch_length: {value}\nlater: !ref <one> + 1\n"
    with pytest.raises(ResultError, match=message) as caught:
        of_file(tmp_path, text)
    assert caught.value.message.startswith("train.yaml")
    assert not (tmp_path / "owned").exists()


# Any files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"seed: 1\n", "has no settings of a DynamicBatchSampler"),
        (
            b"format: batchtune/sampler\nbucket_boundaries: [1]\n",
            "is a config that batchtune wrote",
        ),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"a: " + b"[" * 150, "not a readable YAML file"),
        (b"a: " + b"[" * 700, "is nested too deeply"),
        (b"a: 1\n" * 500_000, "is larger than 2 MiB"),
        (b"a: 1\n!" + b"!" * 200_000, "line of more than 100,000 characters"),
    ],
)
def test_a_file_that_is_no_configuration_is_told(tmp_path, content, message):
    path = tmp_path / "train.yaml"
    path.write_bytes(content)
    with pytest.raises(ResultError, match=message):
        read_current(str(path))


def test_nothing_from_a_file_can_steer_the_terminal(tmp_path):
    for text in (
        'a: {"\\e[31mred": {max_batch_length: 0, num_buckets: 3}}',
        'a: {max_batch_length: !ref "<\\e[2J>", num_buckets: 3}',
        "a: {max_batch_length: !%1B[2J 3, num_buckets: 3}",
        'a: {max_batch_length: "\\e[2J", num_buckets: 3}',
    ):
        with pytest.raises(ResultError) as caught:
            of_file(tmp_path, text)
        assert f"{caught.value.message}{caught.value.hint}".isprintable()


def test_a_path_with_a_key_path_that_is_not_there():
    for path in ("a.b", "encoder"):
        with pytest.raises(
            ResultError, match=f"has no known batching settings at '{path}'"
        ):
            read_current(f"{CONFIGS / 'recipe.yaml'}:{path}")


def test_a_text_that_no_file_can_be_called_is_refused():
    for text in ("x" * 100_000, "a\0b", ":" * 1000, "\ud800"):
        with pytest.raises(UsageError):
            read_current(text)


@pytest.mark.parametrize(
    ("text", "more", "value"),
    [
        ("a0: &a0 [1]\n", "a{n}: &a{n} [*a{m}, *a{m}, *a{m}]\n", "*a24"),
        ("a0: &a0 {x: 1}\n", "a{n}: &a{n} {{p: *a{m}, q: *a{m}, r: *a{m}}}\n", "5"),
        ("a0: &a0 {x: 1}\n", "a{n}: &a{n} {{<<: [*a{m}, *a{m}], k{n}: 1}}\n", "5"),
        ("a0: 1\n", "a{n}: !ref <a{m}> * <a{m}> * <a{m}>\n", "!ref <a24>"),
    ],
    ids=["lists", "mappings", "merges", "references"],
)
def test_a_bomb_of_aliases_is_no_work(tmp_path, text, more, value):
    for n in range(1, 25):
        text += more.format(n=n, m=n - 1)
    text += f"train: {{num_buckets: 3, max_batch_length: {value}}}\n"
    try:
        of_file(tmp_path, text)
    except ResultError as error:
        assert len(error.message) < 1000


WORDS = (
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\r",
    b"\t",
    b"*a",
    b"&a ",
    b"<<: ",
    b"!ref <",
    b"${",
    b"]",
    b"{",
    b"- ",
    b"? ",
)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_any_damage_gives_settings_or_one_message(path, tmp_path):
    draw = random.Random(path.name)
    whole = path.read_bytes()
    copy = tmp_path / "damaged.yaml"
    for _ in range(200):
        content = damaged(whole, draw, WORDS) or whole
        copy.write_bytes(damaged(content, draw, WORDS))
        try:
            current_batching(read_current(str(copy)), LENGTHS)
        except BatchtuneError as error:
            assert isinstance(error, (ResultError, UsageError))
            assert error.message
            assert error.message.isprintable()
