"""Whether a step's gradient depends on its micro-batches: loops whose losses weigh examples in different ways."""

import math
from types import SimpleNamespace

import pytest
import torch
from made_data import padded
from scripts.made_training import MadeScript
from scripts.test_drawing import drawn_by
from torch import nn
from torch.utils.data import DataLoader

from batchtune.results.shared import SAME_GRADIENT
from batchtune.scripts.gradients import Step, beyond, difference, step_gradient

ACCUMULATION = 4
LENGTHS = [3 + 29 * index % 40 for index in range(60)]
ALONE = SimpleNamespace(rank=0, world_size=1, agree=lambda wanted: wanted)


def tokens(index):
    random = torch.Generator().manual_seed(index)
    return torch.randint(1, 20, (LENGTHS[index],), generator=random)


def pack(examples):
    return torch.cat(examples)[None]


class Tagger(nn.Module):
    def __init__(self, *, dropout, batch_norm):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.score = nn.Linear(8, 20)

    def forward(self, batch):
        hidden = self.norm(self.embed(batch).transpose(1, 2))
        return self.score(self.drop(hidden.transpose(1, 2))).transpose(1, 2)


def by_contrast(model, batch):
    weights = (batch > 0).unsqueeze(1) / (batch > 0).sum(1)[:, None, None]
    texts = nn.functional.normalize((model(batch) * weights).sum(2), dim=1)
    scores = 10 * texts @ texts.T
    return nn.functional.cross_entropy(scores, torch.arange(len(batch)))


def loss_of(kind, model, batch, total):
    """The loss of a micro-batch; `total` are the tokens of its step."""
    if kind == "in-batch negatives":
        return by_contrast(model, batch) / ACCUMULATION
    losses = nn.functional.cross_entropy(
        model(batch), batch, ignore_index=0, reduction="none"
    )
    own = (batch > 0).sum(1)
    if kind.endswith("mean of tokens"):
        return losses.sum() / own.sum() / ACCUMULATION
    if kind == "mean of examples":
        return (losses.sum(1) / own).mean() / ACCUMULATION
    return losses.sum() / total


def measured(patch, kind, *, ahead=0, closure=False):
    """What is found of a loop with such a loss, and whether its parameters are as they were."""
    torch.manual_seed(0)
    model = Tagger(
        dropout=0.5 if kind == "tokens" else 0.0, batch_norm=kind == "batch norm"
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def train(loop, batches):
        held = []
        while True:
            while len(held) < ACCUMULATION + ahead:
                held += next(batches)
            step, held = held[:ACCUMULATION], held[ACCUMULATION:]
            total = sum(int((batch > 0).sum()) for batch in step)

            def backward(step=step, total=total):
                optimizer.zero_grad()
                losses = [loss_of(kind, model, batch, total) for batch in step]
                whole = torch.stack(losses).sum()
                whole.backward()
                return whole

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            loop.steps += 1

    data = [tokens(index) for index in range(len(LENGTHS))]
    collate = pack if kind.startswith("packed") else padded
    loader = DataLoader(data, 4, collate_fn=collate)
    loop = MadeScript(patch, train, loader).measured()
    drawn = drawn_by(data, collate, LENGTHS)
    held_ahead = ACCUMULATION + ahead - 1
    loop.train(lambda: collate(data[:4]), ACCUMULATION)
    before = [parameter.clone() for parameter in model.parameters()]
    step = Step(drawn, 4, ACCUMULATION, ALONE)
    found = step_gradient(loop, step, ACCUMULATION, held_ahead, ALONE)
    same = all(map(torch.equal, before, model.parameters()))
    assert model.drop.p == (0.5 if kind == "tokens" else 0.0)
    return found, same


def is_same(change):
    return None if change is None else change <= SAME_GRADIENT


@pytest.mark.parametrize(
    ("kind", "any_counts", "equal_counts", "mates"),
    [
        ("tokens", True, None, None),
        ("mean of examples", False, True, None),
        ("mean of tokens", False, False, True),
        ("in-batch negatives", False, False, False),
        ("packed tokens", True, None, None),
        ("packed, mean of tokens", False, None, None),
        ("batch norm", False, False, False),
    ],
)
def test_a_loss_shows_whether_the_cut_of_a_step_changes_it(
    monkeypatch, kind, any_counts, equal_counts, mates
):
    found, same_parameters = measured(monkeypatch, kind)
    assert found.unknown is None and same_parameters
    assert is_same(found.again)
    assert is_same(found.any_counts) is any_counts
    assert is_same(found.equal_counts) is equal_counts
    assert is_same(found.mates) is mates
    is_normalised = kind == "batch norm"
    assert ("1 × BatchNorm1d" in found.batch_norm) is is_normalised


@pytest.mark.parametrize(("ahead", "closure"), [(5, False), (0, True)])
def test_loops_that_look_ahead_or_give_closures_compare_alike(
    monkeypatch, ahead, closure
):
    plain, _ = measured(monkeypatch, "mean of examples")
    found, same_parameters = measured(
        monkeypatch, "mean of examples", ahead=ahead, closure=closure
    )
    assert same_parameters
    assert found.any_counts == pytest.approx(plain.any_counts, rel=0.1)


def test_a_gradient_that_is_missing_counts_as_zero():
    one = {1: torch.tensor([3.0, 4.0])}
    other = {2: torch.tensor([12.0])}
    assert difference(one, one | other) == 12 / 5
    assert difference(one | other, one) == 12 / 13
    assert math.isnan(difference({}, other))
    assert beyond(other, [{2: torch.zeros(1)}]) == 1
