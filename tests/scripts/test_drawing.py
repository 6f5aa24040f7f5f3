"""Batches that are drawn from a script's own examples: of any shape, as its collate function makes them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from made_data import CASES, padded, random_examples, to_multiple_of_8
from torch.utils.data import DataLoader, IterableDataset

from batchtune.scripts.drawing import Drawn, Pool
from batchtune.scripts.learning import Axes, Unclear
from batchtune.scripts.trees import flatten, sizes


def shapes(batch: Any) -> dict[str, Any]:
    """The type and shape of every leaf; of lists of arrays each shape."""
    found: dict[str, Any] = {}
    for path, (leaf,) in flatten([batch], stops={"xs", "ys"}).items():
        shape = sizes(leaf)
        if isinstance(leaf, list):
            shape = tuple(sizes(item) for item in leaf)
        found[path] = getattr(leaf, "dtype", type(leaf)), shape
    return found


def drawn_of(name: str, seed: int) -> tuple[list[Any], Drawn]:
    case = CASES[name]
    examples = random_examples(case, seed)
    return examples, Drawn.from_dataset(
        examples, case.collate, length_key=case.length_key
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_batch_has_the_shapes_of_a_collated_one(name: str, seed: int) -> None:
    case = CASES[name]
    _, drawn = drawn_of(name, seed)
    assert drawn.packed == (name == "packed")
    axes = Axes(7, case.length, case.target_length)
    if drawn.packed:
        axes = Axes.packed([case.length] * 7)
    assert shapes(drawn.make(axes)) == shapes(case.collate(case.equal(7)))


@pytest.mark.parametrize("name", CASES)
def test_a_twin_has_the_shapes_of_the_own_batch(name: str) -> None:
    examples, drawn = drawn_of(name, 0)
    loader = DataLoader(examples, batch_size=5, collate_fn=CASES[name].collate)
    axes, own, made = next(drawn.twins(loader, []))
    longest = max(drawn.lengths[:5])
    if name not in ("graphs", "ragged"):  # whose examples stay as long as they are
        assert shapes(own) == shapes(made)
        assert (axes.batch_size, axes.length) == (5, longest)


def test_sizes_of_the_examples_are_known() -> None:
    examples, drawn = drawn_of("waves", 0)
    assert drawn.lengths == tuple(len(one["input_values"]) for one in examples)
    assert drawn.targets == tuple(len(one["labels"]) for one in examples)


def test_lines_say_what_batches_are_made_of() -> None:
    _, drawn = drawn_of("padded batch", 0)
    assert drawn.lines == (
        "id: [B] list",
        "sig.data: [B, L] float32",
        "sig.lengths: [B] float32",
        "tokens.data: [B, T] int64",
        "tokens.lengths: [B] float32",
        "duration: [B] float64",
        "spk: [B] int64",
    )
    examples = random_examples(CASES["packed"], 0)
    padded_up = Drawn.from_dataset(examples, to_multiple_of_8)
    assert padded_up.lines == ("input_ids: [B, L to a multiple of 8] int64",)


# Which examples are drawn


class Numbered:
    """Example i is as long as the i-th length, with the i-th target, and holds nothing but its number."""

    def __init__(self, lengths: Sequence[int], targets: Sequence[int]) -> None:
        self.sizes = list(zip(lengths, targets, strict=True))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length, target = self.sizes[number]
        x = torch.full((length,), number)
        return {"x": x, "y": torch.full((target,), number)}


def pad_numbered(examples: list[Any]) -> dict[str, torch.Tensor]:
    return {
        key: padded([example[key] for example in examples], -1) for key in ("x", "y")
    }


def test_examples_of_the_manifest_s_rows_are_drawn() -> None:
    """The longest, one with the target, and one with padding where these two have none."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.arange(50, 550)).tolist()
    targets = random.permutation(np.arange(5, 505)).tolist()
    drawn = Drawn.from_dataset(Numbered(lengths, targets), pad_numbered)
    drawn.use(Pool.of(range(500), lengths, targets))
    longest = lengths.index(300)
    target = max(t for t, length in zip(targets, lengths, strict=True) if length <= 300)
    batch = drawn.make(Axes(4, 300, target))
    assert batch["x"].shape == (4, 300) and batch["y"].shape == (4, target)
    assert batch["x"][:, 0].tolist() == [longest] * 3 + [targets.index(target)]
    own_target = targets[longest]
    batch = drawn.make(Axes(4, 300, own_target))
    numbers = batch["x"][:, 0].tolist()
    assert numbers[1:] == [longest] * 3 and lengths[numbers[0]] <= 270
    assert drawn.make(Axes(1, 300, own_target))["x"][:, 0].tolist() == [longest]


def test_without_the_order_of_the_data_set_an_example_is_cropped() -> None:
    lengths = list(range(50, 550, 2))
    targets = np.random.default_rng(0).permutation(lengths).tolist()
    numbered = Numbered(lengths, targets)
    drawn = Drawn.from_dataset(numbered, pad_numbered, length_key="x")
    batch = drawn.make(Axes(5, 301, 77))
    assert batch["x"].shape == (5, 301) and batch["y"].shape == (5, 77)
    assert (batch["x"] == -1).any(1).tolist() == [True] + [False] * 4


def test_a_stream_has_examples_too() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(length) for length in range(50, 90)])

    loader = DataLoader(Stream(), batch_size=4, collate_fn=padded)
    drawn = Drawn.from_dataset(loader.dataset, padded)
    assert drawn.indices is None and drawn.make(Axes(3, 200)).shape == (3, 200)
    axes, own, made = next(drawn.twins(loader, []))
    assert axes == Axes(4, 53) and own.shape == made.shape == (4, 53)


def test_numbers_that_belong_together_stay_so() -> None:
    """As the durations of phonemes, which add up to the frames: no cropped example is made where a real one exists."""
    random = np.random.default_rng(0)
    data = [
        {"durations": random.integers(1, 9, count)}
        for count in random.permutation(np.arange(10, 130))
    ]
    data = [{**one, "mel": torch.rand(int(one["durations"].sum()), 8)} for one in data]

    def collate(examples: list[Any]) -> Any:
        for example in examples:
            assert example["durations"].sum() == len(example["mel"])
        return padded([example["mel"] for example in examples])

    lengths = [len(one["mel"]) for one in data]
    drawn = Drawn.from_dataset(data, collate)
    drawn.use(Pool.of(range(120), lengths, None))
    for length in sorted(lengths)[::10]:
        assert drawn.make(Axes(6, length)).shape == (6, length, 8)


# Of the scripts that could not be tuned


def test_a_mask_that_is_true_at_padding_is_no_length() -> None:
    def collate(examples: list[Any]) -> Any:
        x = padded(examples)
        return x, x.eq(0)

    random = np.random.default_rng(0)
    lengths = random.permutation(np.arange(20, 320)).tolist()
    data = [torch.ones(length, dtype=torch.long) for length in lengths]
    drawn = Drawn.from_dataset(data, collate)
    assert drawn.lines == ("0: [B, L] int64", "1: [B, L] bool")
    x, mask = drawn.make(Axes(6, 300))
    assert x.shape == (6, 300) and mask.any()


def test_texts_that_are_tokenized_when_collated_are_drawn() -> None:
    def collate(texts: list[str]) -> Any:
        return padded([torch.ones(len(text.split())) for text in texts])

    lengths = np.random.default_rng(0).permutation(np.arange(3, 303)).tolist()
    data = [" ".join(["ab"] * length) for length in lengths]
    drawn = Drawn.from_dataset(data, collate)
    assert drawn.lines == ("batch: [B, L] float32",)
    assert drawn.lengths == tuple(lengths[:200])
    drawn.use(Pool.of(range(300), lengths, None))
    assert drawn.make(Axes(5, 302)).shape == (5, 302)
    with pytest.raises(Unclear, match="no example as long as 303"):
        drawn.make(Axes(5, 303))


def test_targets_that_only_collating_knows_are_drawn() -> None:
    def tokenizing(examples: list[Any]) -> dict[str, Any]:
        ids = [torch.zeros(len(example["text"])) for example in examples]
        sig = [example["sig"] for example in examples]
        return {"sig": padded(sig), "ids": padded(ids)}

    data = [
        {"sig": np.zeros(100 + number), "text": "a" * (7 * number % 31 + 1)}
        for number in range(50)
    ]
    drawn = Drawn.from_dataset(data, tokenizing)
    assert drawn.lines == ("sig: [B, L] float64", "ids: [B, T] float32")
    targets = [len(one["text"]) for one in data]
    drawn.use(Pool.of(range(50), range(100, 150), targets))
    batch = drawn.make(Axes(3, 120, max(targets[:21])))
    assert batch["ids"].shape == (3, max(targets[:21]))


def test_collating_may_change_examples_in_place() -> None:
    def extending(examples: list[Any]) -> Any:
        for example in examples:
            example["turns"][0].append(1)
            example["ids"] += [0]
        return {"ids": padded([example.pop("ids") for example in examples])}

    examples = [{"ids": [1] * n, "turns": [[1], [2]]} for n in range(5, 50)]
    drawn = Drawn.from_dataset(examples, extending)
    assert [drawn.make(Axes(3, 20))["ids"].shape for _ in range(2)] == [(3, 21)] * 2
    assert examples[0] == {"ids": [1] * 5, "turns": [[1], [2]]}


def test_examples_are_released() -> None:
    class Samples(np.ndarray[Any, Any]):
        """An array that can be referred to weakly."""

    alive: list[weakref.ref[Any]] = []

    class Data:
        def __len__(self) -> int:
            return 45

        def __getitem__(self, number: int) -> Any:
            example = np.zeros(5 + number).view(Samples)
            alive.append(weakref.ref(example))
            return example

    drawn = Drawn.from_dataset(Data(), lambda rows: padded(list(rows)))
    gc.collect()
    assert sum(one() is not None for one in alive) == 1
    assert drawn.make(Axes(2, 9)).shape == (2, 9)


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
    assert Drawn.from_dataset(examples, pads).targets is None
    assert Drawn.from_dataset(examples, pads, target_key="tokens").targets is None


def test_keys_say_which_leaf_is_the_length() -> None:
    examples = varied()
    tokens = tuple(len(example["tokens"]) for example in examples)
    assert Drawn.from_dataset(examples, pads).targets == tokens
    for keys in ({"length_key": "tokens"}, {"target_key": "sig"}):
        assert Drawn.from_dataset(examples, pads, **keys).lengths == tokens
    drawn = Drawn.from_dataset(examples, pads, length_key="duration_in_manifest")
    assert drawn.targets == tokens


def test_a_key_of_the_coarser_leaf_is_unclear() -> None:
    examples = [speech(8 * n + n % 8, n) for n in range(100, 150)]
    with pytest.raises(Unclear, match="follows a finer size"):
        Drawn.from_dataset(examples, pads, length_key="tokens")


def test_a_key_of_a_leaf_that_does_not_vary_is_unclear() -> None:
    examples = [speech(16, tokens, duration=np.ones(1)) for tokens in range(10, 60)]
    with pytest.raises(
        Unclear, match=r"--length-key sig .* always as long: sig axis 0"
    ):
        Drawn.from_dataset(examples, pads, length_key="sig")
    drawn = Drawn.from_dataset(examples, pads, length_key="duration")
    assert drawn.lengths == tuple(range(10, 60))


def test_three_independent_lengths_are_unclear() -> None:
    def pads_all(examples: list[Any]) -> dict[str, Any]:
        return {**pads(examples), "notes": padded([one["notes"] for one in examples])}

    examples = [
        {**example, "notes": [0] * (7 * number % 31 + 1)}
        for number, example in enumerate(varied())
    ]
    with pytest.raises(Unclear, match="notes axis 0 from 1 to 31") as raised:
        Drawn.from_dataset(examples, pads_all)
    assert "--length-key" in str(raised.value.hint)


def test_words_of_a_transcript_are_no_length() -> None:
    examples = [
        {**example, "words": ["word"] * (7 * number % 31 + 1)}
        for number, example in enumerate(varied())
    ]
    assert Drawn.from_dataset(examples, pads).targets is not None


def test_batches_that_hide_the_length_are_unclear() -> None:
    def cropping(examples: list[Any]) -> Any:
        return torch.stack([torch.zeros(100) for _ in examples])

    with pytest.raises(Unclear, match="no size of the script's collated batches"):
        Drawn.from_dataset(varied(), cropping)


def test_a_failing_collate_function_is_reported() -> None:
    def failing(examples: list[Any]) -> Any:
        raise KeyError("path")

    with pytest.raises(Unclear, match="KeyError: 'path'"):
        Drawn.from_dataset(varied(), failing)
