"""Batches that are drawn from a script's own examples: of any shape, as its collate function makes them."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from made_data import CASES, padded, to_multiple_of_8

from batchtune.lengths import RowLength
from batchtune.results import BatchShape
from batchtune.scripts.drawing import Drawn
from batchtune.scripts.learning import Unclear
from batchtune.scripts.trees import flatten, sizes


def shapes(batch):
    """The type and shape of every leaf; of lists of arrays each shape."""
    found = {}
    for path, (leaf,) in flatten([batch], stops={"xs", "ys"}).items():
        shape = sizes(leaf)
        if isinstance(leaf, list):
            shape = tuple(sizes(item) for item in leaf)
        found[path] = getattr(leaf, "dtype", type(leaf)), shape
    return found


def rows_of(lengths, targets):
    given = targets or [None] * len(lengths)
    return list(map(RowLength, range(len(lengths)), lengths, given))


def drawn_by(
    data,
    collate,
    lengths,
    targets=None,
    **options,
):
    """What draws by a manifest of these lengths, in the order of the data set."""
    drawn = Drawn(data, collate, **options)
    assert drawn.follows(rows_of(lengths, targets), 1.0, {})
    return drawn


def drawn_of(name, seed):
    """Draws by its own measurements."""
    case = CASES[name]
    examples = case.random(seed)
    drawn = Drawn(examples, case.collate, length_key=case.length_key)
    assert drawn.follows(rows_of(drawn.lengths, drawn.targets), 1.0, {})
    return drawn


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_batch_has_the_shapes_of_a_collated_one(name, seed):
    """Of the longest example, with the longest target, as equal examples would have them."""
    drawn = drawn_of(name, seed)
    assert drawn.packed == (name == "packed")
    longest = max(drawn.lengths)
    target = None if drawn.targets is None else max(drawn.targets)
    shape = BatchShape(7, longest, target)
    if drawn.packed:
        shape = BatchShape.packed([longest] * 7)
    case = CASES[name]._replace(length=longest, target_length=target)
    made = shapes(drawn.make(shape))
    expected = shapes(case.collate(case.equal(7)))
    if name == "graphs":  # which add up: no less than seven of the largest
        assert all(
            made[path][1][axis] >= expected[path][1][axis]
            for path, axis in (("x", 0), ("edge_index", 1))
        )
    elif name == "ragged":
        assert [max(made[path][1]) for path in made] == [(longest,), (target,)]
    else:
        assert made == expected


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"graphs", "ragged", "packed"}))
def test_a_twin_has_the_shapes_of_the_own_batch(name):
    shape, own, made = next(drawn_of(name, 0).twins(5))
    assert shapes(own) == shapes(made)
    assert shape.batch_size == 5


def test_lines_say_what_batches_are_made_of():
    assert drawn_of("padded batch", 0).lines == (
        "id: [B] list",
        "sig.data: [B, L] float32",
        "sig.lengths: [B] float32",
        "tokens.data: [B, T] int64",
        "tokens.lengths: [B] float32",
        "duration: [B] float64",
        "spk: [B] int64",
    )
    assert drawn_of("subsampled", 0).lines[5] == "5: [B, …] float32"
    assert drawn_of("ragged", 0).lines[0] == "xs: [B, L] list"
    assert drawn_of("graphs", 0).lines[:2] == (
        "x: [ΣL, 8] float32",
        "edge_index: [2, ΣT] int64",
    )


def test_batches_may_be_padded_to_a_multiple():
    examples = CASES["packed"].random(0)
    lengths = [len(one["input_ids"]) for one in examples]
    drawn = drawn_by(examples, to_multiple_of_8, lengths)
    assert drawn.lines == ("input_ids: [B, L] int64",)
    assert drawn.scale.per_unit == 1
    longest = max(lengths)
    made = drawn.make(BatchShape(3, longest))
    assert made["input_ids"].shape == (3, longest + -longest % 8)


# Which examples are drawn


class Numbered:
    """Example i is as long as the i-th length, with the i-th target, and holds nothing but its number."""

    def __init__(self, lengths, targets):
        self.sizes = list(zip(lengths, targets, strict=True))

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, number):
        length, target = self.sizes[number]
        return {"x": torch.full((length,), number), "y": torch.full((target,), number)}


def pad_numbered(examples):
    return {
        key: padded([example[key] for example in examples], -1) for key in ("x", "y")
    }


RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.permutation(np.arange(50, 550)).tolist()
TARGETS = RANDOM.permutation(np.arange(5, 505)).tolist()
NUMBERED = Numbered(LENGTHS, TARGETS)


def numbers_of(drawn, *shape):
    """The examples of a batch of this shape, which it has."""
    batch = drawn.make(BatchShape(*shape))
    assert batch["x"].shape == shape[:2]
    return batch["x"][:, 0].tolist()


def test_the_longest_is_drawn_with_the_target_and_padding():
    drawn = drawn_by(NUMBERED, pad_numbered, LENGTHS, TARGETS)
    longest = LENGTHS.index(300)
    within = [t for t, n in zip(TARGETS, LENGTHS, strict=True) if n <= 300]
    target = max(within)
    assert numbers_of(drawn, 4, 300, target) == [longest] * 3 + [TARGETS.index(target)]
    own = TARGETS[longest]
    shorter, *others = numbers_of(drawn, 4, 300, own)
    assert others == [longest] * 3 and LENGTHS[shorter] == max(
        n for t, n in zip(TARGETS, LENGTHS, strict=True) if n <= 270 and t <= own
    )
    assert numbers_of(drawn, 1, 300, target) == [longest]


def test_a_multiple_that_lengths_are_padded_to_stands_for_them():
    lengths = [n for n in LENGTHS if n % 16 > 2]
    data = [torch.ones(n) for n in lengths]
    drawn = drawn_by(data, padded, lengths)
    assert drawn.make(BatchShape(4, 304)).shape == (4, 303)
    assert drawn.make(BatchShape(4, 560)).shape == (4, max(lengths))


def test_of_very_many_rows_the_next_longer_one_is_drawn():
    drawn = Drawn([torch.ones(n) for n in LENGTHS], padded)
    measured = {LENGTHS[index] for index in drawn.indices}
    lacking = next(n for n in range(100, 500) if not measured & {n, n + 1})
    rows = rows_of(LENGTHS, None)
    rows = [row for row in rows if row.length not in (lacking, lacking + 1)]
    assert drawn.follows(rows, 1.0, {})
    assert drawn.make(BatchShape(4, lacking)).shape == (4, lacking + 2)


def test_without_targets_in_the_manifest_measured_ones_count():
    drawn = drawn_by(NUMBERED, pad_numbered, LENGTHS, length_key="x")
    measured = [TARGETS[i] for i in drawn.indices if LENGTHS[i] <= 300]
    *_, last = numbers_of(drawn, 4, 300)
    assert TARGETS[last] == max(measured)


def test_the_manifest_may_hold_the_other_length():
    """Of an encoder-decoder whose targets are longer than its inputs."""
    inputs = [n // 2 for n in TARGETS]
    drawn = drawn_by(Numbered(inputs, LENGTHS), pad_numbered, inputs, LENGTHS)
    assert drawn.lines == ("x: [B, L] int64", "y: [B, T] int64")


@pytest.mark.parametrize("lengths", [LENGTHS[1:] + LENGTHS[:1], LENGTHS[:100]])
def test_a_manifest_in_another_order_is_noticed(lengths):
    assert not Drawn(NUMBERED, pad_numbered).follows(rows_of(lengths, None), 1.0, {})


def test_numbers_that_belong_together_stay_so():
    """As the durations of phonemes, which add up to the frames."""
    data = [
        {"durations": RANDOM.integers(1, 9, count)}
        for count in RANDOM.permutation(np.arange(10, 130))
    ]
    data = [{**one, "mel": torch.rand(int(one["durations"].sum()), 8)} for one in data]

    def collate(examples):
        for example in examples:
            assert example["durations"].sum() == len(example["mel"])
        return padded([example["mel"] for example in examples])

    lengths = [len(one["mel"]) for one in data]
    drawn = drawn_by(data, collate, lengths)
    for length in sorted(lengths)[::10]:
        assert drawn.make(BatchShape(6, length)).shape == (6, length, 8)


# Of the scripts that could not be tuned


def test_a_mask_that_is_true_at_padding_is_no_length():
    def collate(examples):
        x = padded(examples)
        return x, x.eq(0)

    data = [torch.ones(length, dtype=torch.long) for length in LENGTHS]
    drawn = drawn_by(data, collate, LENGTHS)
    assert drawn.lines == ("0: [B, L] int64", "1: [B, L] bool")
    x, mask = drawn.make(BatchShape(6, 300))
    assert x.shape == (6, 300) and mask.any()


def test_targets_that_only_collating_knows_are_drawn():
    def tokenizing(examples):
        ids = [torch.zeros(len(example["text"])) for example in examples]
        sig = [example["sig"] for example in examples]
        return {"sig": padded(sig), "ids": padded(ids)}

    data = [
        {"sig": np.zeros(100 + number), "text": "a" * (7 * number % 31 + 1)}
        for number in range(50)
    ]
    targets = [len(one["text"]) for one in data]
    drawn = drawn_by(data, tokenizing, range(100, 150), targets)
    assert drawn.lines == ("sig: [B, L] float64", "ids: [B, T] float32")
    batch = drawn.make(BatchShape(3, 120, max(targets[:21])))
    assert batch["ids"].shape == (3, max(targets[:21]))


def test_any_hop_of_a_spectrogram_is_found():
    seconds = RANDOM.uniform(1, 10, 300).round(3).tolist()
    frames = [int(one * 24000) // 256 + 1 for one in seconds]
    data = [torch.zeros(count, 20) for count in frames]
    drawn = Drawn(data, padded)
    assert drawn.follows(rows_of(seconds, None), 0.001, {})
    assert drawn.scale.per_unit == pytest.approx(93.75, rel=1e-3)
    assert drawn.make(BatchShape(4, max(seconds))).shape == (4, max(frames), 20)


def test_a_chat_model_gets_padding_to_mask():
    """A Hugging Face model makes its mask only where something is padded."""
    chats = [{"input_ids": [5] * length} for length in LENGTHS]

    def collate(rows):
        ids = padded([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    drawn = drawn_by(chats, collate, LENGTHS)
    for shape in (BatchShape(2, 400), BatchShape(9, 549)):
        mask = drawn.make(shape)["attention_mask"]
        assert mask.shape == (shape.batch_size, shape.length)
        assert mask.all(1).tolist() == [False] + [True] * (shape.batch_size - 1)


# What examples show


def test_collating_may_change_examples_in_place():
    def extending(examples):
        for example in examples:
            example["turns"][0].append(1)
            example["ids"] += [0]
        return {"ids": padded([example.pop("ids") for example in examples])}

    examples = [{"ids": [1] * n, "turns": [[1], [2]]} for n in range(5, 50)]
    drawn = drawn_by(examples, extending, range(5, 50))
    made = [drawn.make(BatchShape(3, 20))["ids"].shape for _ in range(2)]
    assert made == [(3, 21)] * 2
    assert examples[0] == {"ids": [1] * 5, "turns": [[1], [2]]}


def test_examples_are_released():
    class Samples(np.ndarray[Any, Any]):
        """An array that can be referred to weakly."""

    alive = []

    class Data:
        def __len__(self):
            return 45

        def __getitem__(self, number):
            example = np.zeros(5 + number).view(Samples)
            alive.append(weakref.ref(example))
            return example

    drawn = Drawn(Data(), lambda rows: padded(list(rows)))
    gc.collect()
    assert drawn.lengths and not any(one() is not None for one in alive)


def speech(samples, tokens, **more):
    return {"sig": np.zeros(samples), "tokens": [1] * tokens, **more}


def pads(examples):
    return {key: padded([one[key] for one in examples]) for key in ("sig", "tokens")}


def varied(seed=0):
    random = np.random.default_rng(seed)
    return [
        speech(int(n), int(random.integers(5, 40)))
        for n in random.integers(800, 4800, 50)
    ]


def test_a_target_that_follows_the_length_is_none():
    examples = [speech(8 * n, n) for n in range(100, 150)]
    assert Drawn(examples, pads).targets is None
    assert Drawn(examples, pads, target_key="tokens").targets is None


def test_keys_say_which_leaf_is_the_length():
    examples = varied()
    tokens = [len(example["tokens"]) for example in examples]
    assert Drawn(examples, pads).targets == tokens
    for keys in ({"length_key": "tokens"}, {"target_key": "sig"}):
        assert Drawn(examples, pads, **keys).lengths == tokens
    assert Drawn(examples, pads, length_key="duration_in_manifest").targets == tokens
    # Its own size never varies.
    drawn = Drawn(SAME_SIGNAL, pads, length_key="duration")
    assert drawn.lengths == list(range(10, 60))


def with_column(name, item):
    """Examples with one more list, as long as no other leaf."""
    return [
        {**example, name: [item] * (7 * number % 31 + 1)}
        for number, example in enumerate(varied())
    ]


def test_words_of_a_transcript_are_no_length():
    assert Drawn(with_column("words", "word"), pads).targets is not None


def fills_rows(examples):
    tokens = sum(example["sig"].size for example in examples)
    return torch.zeros(-(-tokens // 4000), 4000)


def crops(examples):
    return torch.stack([torch.zeros(100) for _ in examples])


def fails(examples):
    raise KeyError("path")


COARSER = [speech(8 * n + n % 8, n) for n in range(100, 150)]
SAME_SIGNAL = [speech(16, n, duration=np.ones(1)) for n in range(10, 60)]


@pytest.mark.parametrize(
    ("examples", "collate", "length_key", "message"),
    [
        (COARSER, pads, "tokens", "follows a finer size"),
        (
            SAME_SIGNAL,
            pads,
            "sig",
            r"--length-key sig .* length never varies: sig axis 1",
        ),
        (varied(), crops, None, "no size of the script's collated batches"),
        (varied(), fills_rows, None, "rows of a fixed length"),
        (varied(), fails, None, "KeyError: 'path'"),
    ],
    ids=["coarser", "no length", "cropped", "rows", "failing"],
)
def test_what_examples_do_not_tell_is_unclear(examples, collate, length_key, message):
    with pytest.raises(Unclear, match=message):
        Drawn(examples, collate, length_key=length_key)


def test_a_third_length_needs_a_key():
    def pads_all(examples):
        return {**pads(examples), "notes": padded([one["notes"] for one in examples])}

    with pytest.raises(Unclear, match="notes axis 1 from 1 to 31") as raised:
        Drawn(with_column("notes", 0), pads_all)
    assert "--length-key" in str(raised.value.hint)
