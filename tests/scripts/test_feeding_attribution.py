"""Which batch a measured step trains on, in loops that accumulate and that fetch batches ahead."""

import threading
from itertools import pairwise

import pytest
from scripts.made_training import Training, fed_by

from batchtune.results import BatchShape
from batchtune.scripts.feeding import Loop


def trained(accumulation, look_ahead):
    """A loop that has found out how many batches its steps have, and the script as a workload."""
    loop = Loop()
    loop.batches_before_forward = 1 + look_ahead
    training = Training(loop, accumulation, look_ahead)
    loop.train(lambda: "own", accumulation)
    assert loop.train(lambda: "own", accumulation) == accumulation
    return training, fed_by(loop, accumulation)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("look_ahead", [0, 1, 4])
def test_a_measured_step_trains_on_what_was_asked_for(accumulation, look_ahead):
    training, fed = trained(accumulation, look_ahead)
    fed.fill(BatchShape(1, 1.0))
    for size, length in [(4, 10.0), (9, 2.0), (1, 30.0), (1, 30.0), (7, 5.0)]:
        batch = fed.make_batch(BatchShape(size, length))
        for _ in range(3):
            before = len(training.steps)
            fed.step(batch)
            assert training.steps[before:] == [[(size, int(length))] * accumulation]


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_a_step_trains_on_different_batches(look_ahead):
    training, fed = trained(4, look_ahead)
    fed.step(fed.make_batch(BatchShape(9, 2.0)))
    before = len(training.steps)
    sizes = [1, 2, 3, 4]
    for _ in range(2):
        first, *fed.others = [BatchShape(size, 3.0) for size in sizes]
        fed.step(fed.make_batch(first))
    batches = [batch for step in training.steps[before:] for batch in step]
    wanted = [(9, 2)] * look_ahead + [(size, 3) for size in sizes] * 2
    assert batches == wanted[: len(batches)]
    assert len(training.steps) == before + 2
    # What the loop trained on last: where it fails, that batch has failed.
    assert (fed.trained[0].batch_size, fed.trained[0].length) == batches[-1]


@pytest.mark.parametrize("look_ahead", range(9))
def test_a_trial_fills_a_step_of_many_batches_with_small_ones(look_ahead):
    training, fed = trained(8, look_ahead)
    fed.fill(BatchShape(1, 1.0))
    trial = fed.for_trials
    trial._seconds = [0.1] * 3
    batch = trial.make_batch(BatchShape(9, 2.0))

    def step():
        trial.step(batch)
        return [batch == (9, 2) for batch in training.steps[-1]]

    step()
    are_whole = step()
    assert sum(are_whole) == 3
    # Gradients are there by then, and what the loop keeps of the one before.
    assert (True, True) in pairwise(are_whole)
    trial._seconds = [0.1] * 3
    assert trial.whole_step_seconds(0.4) == pytest.approx(0.1 + 8 * 0.1)
    # Cheap ones need no others.
    trial.whole_step_seconds(0.2)
    step()
    assert all(step())


def test_a_loop_without_an_optimizer_step_is_no_training():
    loop = Loop()

    def go_on():
        while True:
            loop.next_batch()

    threading.Thread(target=go_on, daemon=True).start()
    with pytest.raises(Exception, match="24 batches without an optimizer step"):
        loop.train(lambda: "own")
