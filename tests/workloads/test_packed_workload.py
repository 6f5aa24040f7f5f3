"""The built-in language model on packed rows: each sequence trains as if it were alone."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from workloads.test_builtin_workloads import built, gradients_of

from batchtune.results import BatchShape
from batchtune.workloads.builtin import packed_batch

LENGTHS = [9, 1, 5, 5, 2]
packing = partial(built, "transformer-lm", packed=True)


def padded_loss(model, tokens):
    """The same sequences as a padded batch, the padding and the last token of each masked."""
    sequences = tokens[0].split(LENGTHS)
    inputs = pad_sequence(sequences, batch_first=True)
    following = pad_sequence(
        [sequence[1:] for sequence in sequences], batch_first=True, padding_value=-100
    )
    logits = model(inputs)[:, : following.shape[1]]
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_packed_row_trains_as_the_padded_batch(checkpoint):
    workload = packing(dropout=0.0, checkpoint=checkpoint)
    tokens = torch.arange(sum(LENGTHS))[None]
    packed = workload.loss(packed_batch(tokens, LENGTHS))
    packed.backward()
    of_row = gradients_of(workload)
    workload.model.zero_grad()
    padded = padded_loss(workload.model, tokens)
    padded.backward()
    torch.testing.assert_close(packed, padded)
    torch.testing.assert_close(of_row, gradients_of(workload), atol=1e-6, rtol=1e-4)


def test_a_batch_is_one_row_of_exactly_its_sequences():
    workload = packing()
    assert workload.packed
    batch = workload.make_batch(BatchShape.packed(LENGTHS))
    assert batch.tokens.shape == (1, 22)
    positions = [
        place for length in sorted(LENGTHS, reverse=True) for place in range(length)
    ]
    assert batch.spans.positions.tolist() == positions
    assert (batch.following < 0).sum() == len(LENGTHS)
    workload.step(batch)


def test_sequences_of_one_token_leave_nothing_to_predict():
    workload = packing()
    loss = workload.loss(workload.make_batch(BatchShape.packed([1, 1])))
    assert loss.item() == 0.0
