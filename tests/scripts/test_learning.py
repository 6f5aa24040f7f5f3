"""What is learned of a script's examples and batches: made ones equal what the script's own code would collate."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from made_data import CASES, Case, padded, to_multiple_of_8

from batchtune.scripts.learning import Axes, Learned, Unclear
from batchtune.scripts.trees import flatten, numeric, sizes

BATCH_SIZES = [3, 4, 5, 3, 6, 4]


def facts(batch: Any) -> dict[str, Any]:
    """The type and shape of every leaf; of lists of arrays each shape, of short ones all values."""
    found: dict[str, Any] = {}
    for path, (leaf,) in flatten([batch], stops={"xs", "ys"}).items():
        kind = getattr(leaf, "dtype", type(leaf))
        values = numeric(leaf)
        if isinstance(leaf, list):
            found[path] = kind, [sizes(item) for item in leaf]
        elif values is not None and values.ndim < 2:
            found[path] = kind, np.round(values, 3).tolist()
        else:
            found[path] = kind, sizes(leaf)
    return found


def random_batches(case: Case, seed: int) -> list[Any]:
    examples = case.random(seed)
    return [case.collate([examples.pop() for _ in range(size)]) for size in BATCH_SIZES]


def of_columns(make: Callable[[int, int], Any], seed: int = 0) -> list[Any]:
    """Batches that are made of their number of rows and of columns, 50 to 499."""
    random = np.random.default_rng(seed)
    return [make(rows, int(random.integers(50, 500))) for rows in BATCH_SIZES]


def same_as_collated(case: Case, learned: Learned) -> bool:
    axes = Axes(7, case.length, case.target_length)
    made = learned.make(axes)
    seen = learned.axes_of(made)
    assert (seen.row, seen.target_length) == (axes.row, axes.target_length)
    return facts(made) == facts(case.collate(case.equal(7)))


def check_seed(seed: int) -> int:
    """Learns every case both ways and returns how often whole batches told enough."""
    understood = 0
    for name, case in CASES.items():
        examples = case.random(seed)
        learned = Learned.from_examples(
            examples, case.collate, length_key=case.length_key
        )
        assert same_as_collated(case, learned), (name, seed)
        try:
            learned = Learned.from_batches(random_batches(case, seed))
        except Unclear:
            continue
        assert same_as_collated(case, learned), (name, seed)
        understood += 1
    return understood


def test_made_batches_equal_collated_ones() -> None:
    assert sum(map(check_seed, range(3))) >= 18


@pytest.mark.slow
def test_made_batches_equal_collated_ones_for_many_seeds() -> None:
    assert sum(map(check_seed, range(30))) >= 180


def test_axes_of_real_batches_are_their_longest() -> None:
    case = CASES["waves"]
    examples = case.random(0)
    learned = Learned.from_examples(examples, case.collate)
    longest = max(len(example["input_values"]) for example in examples[:5])
    target = max(len(example["labels"]) for example in examples[:5])
    batch = case.collate(copy.deepcopy(examples[:5]))
    assert learned.axes_of(batch) == Axes(5, longest, target)
    assert learned.lengths == tuple(len(one["input_values"]) for one in examples)
    assert learned.targets == tuple(len(one["labels"]) for one in examples)


def test_axes_of_batches_padded_to_a_multiple() -> None:
    examples = CASES["packed"].random(0)
    learned = Learned.from_examples(examples, to_multiple_of_8)
    assert learned.lines == ("input_ids: [B, L to a multiple of 8] int64 < 100",)
    assert learned.axes_of(learned.make(Axes(3, 101))) == Axes(3, 104)


def test_lines_say_what_was_learned() -> None:
    case = CASES["padded batch"]
    learned = Learned.from_examples(case.random(0), case.collate)
    assert learned.lines == (
        "id: [B] list",
        "sig.data: [B, L] float32",
        "sig.lengths: [B] float32",
        "tokens.data: [B, T] int64 < 30",
        "tokens.lengths: [B] float32",
        "duration: [B] float64, value 1/16000·L",
        "spk: [B] int64 < 2",
    )


def test_collating_may_change_examples_in_place() -> None:
    def extending(examples: list[Any]) -> Any:
        for example in examples:
            example["turns"][0].append(1)
            example["ids"] += [0]
        return {"ids": padded([example.pop("ids") for example in examples])}

    examples = [{"ids": [1] * n, "turns": [[1], [2]]} for n in range(5, 50)]
    learned = Learned.from_examples(examples, extending)
    assert [learned.make(Axes(3, 20))["ids"].shape for _ in range(2)] == [(3, 21)] * 2
    assert examples[0] == {"ids": [1] * 5, "turns": [[1], [2]]}


def test_examples_are_released() -> None:
    class Samples(np.ndarray[Any, Any]):
        """An array that can be referred to weakly."""

    examples = [np.zeros(n).view(Samples) for n in range(5, 50)]
    alive = [weakref.ref(example) for example in examples]
    learned = Learned.from_examples(examples, lambda rows: padded(list(rows)))
    del examples
    gc.collect()
    assert sum(one() is not None for one in alive) == 1
    assert learned.make(Axes(2, 9)).shape == (2, 9)


def speech(samples: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"sig": np.zeros(samples), "tokens": [1] * tokens, **more}


def pads(examples: list[Any]) -> dict[str, Any]:
    return {key: padded([one[key] for one in examples]) for key in ("sig", "tokens")}


def varied(seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        speech(int(n), int(random.integers(5, 40)))
        for n in random.integers(800, 4800, 50)
    ]


def test_a_target_that_follows_the_length_is_none() -> None:
    examples = [speech(8 * n, n) for n in range(100, 150)]
    assert Learned.from_examples(examples, pads).targets is None
    assert Learned.from_examples(examples, pads, target_key="tokens").targets is None


def test_keys_say_which_leaf_is_the_length() -> None:
    examples = varied()
    tokens = tuple(len(example["tokens"]) for example in examples)
    assert Learned.from_examples(examples, pads).targets == tokens
    for keys in ({"length_key": "tokens"}, {"target_key": "sig"}):
        assert Learned.from_examples(examples, pads, **keys).lengths == tokens
    learned = Learned.from_examples(examples, pads, length_key="duration_in_manifest")
    assert learned.targets == tokens


def with_column(name: str, item: Any) -> list[dict[str, Any]]:
    """Examples with one more list, as long as no other leaf."""
    return [
        {**example, name: [item] * (7 * number % 31 + 1)}
        for number, example in enumerate(varied())
    ]


def test_words_of_a_transcript_are_no_length() -> None:
    examples = with_column("words", "word")
    assert Learned.from_examples(examples, pads).targets is not None


def crops(examples: list[Any]) -> Any:
    return torch.stack([torch.zeros(100) for _ in examples])


def tokenizes(examples: list[Any]) -> Any:
    ids = [torch.zeros(len(example["text"])) for example in examples]
    return {"sig": padded([example["sig"] for example in examples]), "ids": padded(ids)}


def fails(examples: list[Any]) -> Any:
    raise KeyError("path")


COARSER = [speech(8 * n + n % 8, n) for n in range(100, 150)]
SAME_SIGNAL = [speech(16, n, duration=np.ones(1)) for n in range(10, 60)]
TEXTS = [{"sig": np.zeros(100 + n), "text": "a" * (7 * n % 31 + 1)} for n in range(50)]


@pytest.mark.parametrize(
    ("examples", "collate", "length_key", "message"),
    [
        (COARSER, pads, "tokens", "follows a finer size"),
        (
            SAME_SIGNAL,
            pads,
            "sig",
            r"--length-key sig .* always as long: sig axis 0",
        ),
        (varied(), crops, None, "no size of the script's collated batches"),
        (TEXTS, tokenizes, None, "ids axis 1"),
        (varied(), fails, None, "KeyError: 'path'"),
    ],
    ids=["coarser", "no length", "cropped", "tokenized", "failing"],
)
def test_what_examples_do_not_tell_is_unclear(
    examples: list[Any],
    collate: Callable[[list[Any]], Any],
    length_key: str | None,
    message: str,
) -> None:
    with pytest.raises(Unclear, match=message):
        Learned.from_examples(examples, collate, length_key=length_key)


def test_a_third_length_needs_a_key() -> None:
    with pytest.raises(Unclear, match="notes axis 0 from 1 to 31") as raised:
        Learned.from_examples(with_column("notes", 0), pads)
    assert "--length-key" in str(raised.value.hint)


def test_a_key_of_a_leaf_that_varies_is_taken() -> None:
    learned = Learned.from_examples(SAME_SIGNAL, pads, length_key="duration")
    assert learned.lengths == tuple(range(10, 60))


def test_single_rows_and_few_batches_are_unclear() -> None:
    rows = [{"x": torch.ones(1, n), "y": torch.ones(1, n)} for n in range(50, 56)]
    with pytest.raises(Unclear, match="every batch has 1 rows"):
        Learned.from_batches(rows)
    with pytest.raises(Unclear, match="5 whole batches"):
        Learned.from_batches(rows[:5])


def test_batches_of_one_size_are_understood_unless_doubtful() -> None:
    random = np.random.default_rng(0)
    sizes_seen = random.integers(50, 500, 6).tolist()
    batches = [
        {"x": torch.rand(8, n), "y": torch.randint(0, 9, (8,))} for n in sizes_seen
    ]
    made = Learned.from_batches(batches).make(Axes(3, 77))
    assert made["x"].shape == (3, 77) and made["y"].shape == (3,)
    with pytest.raises(
        Unclear, match=r"every batch has 8 rows: .* \(heads \(value\)\)"
    ):
        Learned.from_batches([{**batch, "heads": 8} for batch in batches])


def test_a_size_that_may_follow_the_length_is_unclear() -> None:
    def batch(rows: int, length: int) -> dict[str, Any]:
        mask = torch.ones(rows, -(-length // 3))
        return {"x": torch.zeros(rows, length, 40), "mask": mask}

    shapes = zip(BATCH_SIZES, [31, 33, 32, 33, 31, 32], strict=True)
    with pytest.raises(Unclear, match="mask axis 1, always 11, follows the length"):
        Learned.from_batches([batch(*shape) for shape in shapes])
    shapes = zip(BATCH_SIZES, [31, 93, 62, 93, 31, 42], strict=True)
    learned = Learned.from_batches([batch(*shape) for shape in shapes])
    assert sizes(learned.make(Axes(2, 99))["mask"]) == (2, 33)


def test_a_batch_size_key_settles_a_tie() -> None:
    def make(rows: int, columns: int) -> dict[str, Any]:
        return {"x": torch.rand(rows, columns), "order": torch.ones(columns)}

    batches = of_columns(make)
    with pytest.raises(Unclear, match=r"the first axis .* is not the same") as raised:
        Learned.from_batches(batches)
    assert "--batch-size-key" in str(raised.value.hint)
    made = Learned.from_batches(batches, batch_size_key="x").make(Axes(2, 60))
    assert made["x"].shape == (2, 60) and made["order"].shape == (60,)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("prompt", [0, 3])
def test_made_rows_have_no_padding(left: bool, prompt: int) -> None:
    def side(rows: list[Any], value: int) -> torch.Tensor:
        if not left:
            return padded(rows, value)
        return padded([row.flip(0) for row in rows], value).flip(1)

    random = np.random.default_rng(0)
    batches = []
    for count in BATCH_SIZES:
        rows = [torch.arange(n) % 7 + 3 for n in random.integers(20, 80, count)]
        labels = [torch.cat([torch.full((prompt,), -100), row]) for row in rows]
        masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        batches.append(
            {
                "ids": side(rows, 0),
                "labels": side(labels, -100),
                "mask": side(masks, 0),
            }
        )
    made = Learned.from_batches(batches).make(Axes(3, 100))
    assert made["mask"].all() and (made["ids"] >= 3).all()
    assert made["labels"].shape == (3, 100)
    assert made["mask"].shape == (3, 100 - prompt)


def test_lengths_of_batches_padded_to_a_multiple_are_whole() -> None:
    def make(rows: int, longest: int) -> dict[str, Any]:
        lengths = longest - torch.arange(rows)
        return {"x": torch.rand(rows, longest + -longest % 8), "lengths": lengths}

    made = Learned.from_batches(of_columns(make)).make(Axes(3, 304))
    assert made["x"].shape == (3, 304) and made["lengths"].tolist() == [304] * 3


def test_numbers_of_speakers_are_no_lengths() -> None:
    def make(rows: int, columns: int) -> dict[str, Any]:
        speakers = torch.randint(0, 40, (rows,))
        return {"x": torch.rand(rows, columns), "speakers": speakers}

    for seed in range(20):
        torch.manual_seed(seed)
        try:
            made = Learned.from_batches(of_columns(make, seed)).make(Axes(3, 5000))
        except Unclear:
            continue
        assert made["speakers"].max() < 40
