"""How sizes follow lengths: what collate functions and models do to a length is found again."""

import math

import numpy as np
import pytest

from batchtune.scripts.relations import AxisShape, fitted

SIZES = {
    "L": lambda length: length,
    "L-1": lambda length: length - 1,
    "160·L": lambda length: 160 * length,
    "1/4·L": lambda length: length // 4,
    "1/3·L": lambda length: math.ceil(length / 3),
    "1/10·L+1": lambda length: length // 10 + 1,
    "L to a multiple of 8": lambda length: length + -length % 8,
}


@pytest.mark.parametrize("word", SIZES)
def test_plain_relations_are_found_exactly(word):
    random = np.random.default_rng(0)
    base = random.integers(50, 900, 100).astype(float)
    seen = np.array([SIZES[word](int(length)) for length in base], float)
    relation = fitted("L", base, seen)
    assert relation.sure and str(relation) == word
    for length in range(50, 900):
        size = relation.at(AxisShape(1, length))
        assert size == SIZES[word](length)
        longest = relation.term_of(size)
        assert (
            relation.at(AxisShape(1, longest))
            == size
            < relation.at(AxisShape(1, longest + 100))
        )
        assert longest >= length


def test_sizes_that_are_even_by_chance_are_no_multiples():
    base = np.array([400, 408, 416, 433, 450, 467], float)
    assert fitted("L", base, base // 4).at(AxisShape(1, 406)) == 101


def test_two_roundings_that_both_fit_are_not_sure():
    base = np.array([401, 437, 522, 643, 735, 866], float)
    assert not fitted("L", base, np.ceil(base / 4)).sure
