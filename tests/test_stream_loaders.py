"""BucketedStream in DataLoaders with workers, in WebDataset pipelines, on streams of Hugging Face."""

import itertools
from itertools import chain, islice

import pytest
from loader_workers import end_loader_workers
from made_samplers import made_stream_of
from torch.utils.data import DataLoader

# Loaders and their processes warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_worker_stays():
    yield
    end_loader_workers()


IDS = [f"{number:05d}" for number in range(240)]
EXAMPLES = [
    {"id": id_, "length": 1 + 7 * number % 30} for number, id_ in enumerate(IDS)
]


def stream(source=EXAMPLES, **options):
    return made_stream_of(source, **options)


def loaded(made, workers=2, **options):
    return DataLoader(made, batch_size=None, num_workers=workers, **options)


def seen(batches):
    return sorted(chain(*batches))


@pytest.mark.process
def test_a_nominal_epoch_is_dealt_to_workers():
    loader = loaded(stream(split=True, batches_per_epoch=77))
    assert len(loader) == len(list(loader)) == 77


@pytest.mark.process
def test_a_plain_loaders_state_warns():
    made = stream(split=True)
    list(made)
    next(iter(loaded(made)))
    assert made.epoch == 2
    with pytest.warns(UserWarning, match="StatefulDataLoader"):
        state = made.state_dict()
    assert (state["epoch"], state["batches"]) == (2, 0)


@pytest.mark.parametrize(
    "context",
    [
        pytest.param("fork", marks=pytest.mark.process),
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
)
def test_persistent_workers_see_the_epoch(context):
    expected = [list(loaded(stream(split=True, epoch=epoch))) for epoch in (0, 1, 5)]
    assert seen(expected[0]) == seen(expected[1]) == IDS
    made = stream(split=True)
    loader = loaded(made, persistent_workers=True, multiprocessing_context=context)
    assert [list(loader), list(loader)] == expected[:2]
    made.set_epoch(5)
    assert list(loader) == expected[2]


@pytest.mark.slow
@pytest.mark.parametrize("nominal", [None, 120])
def test_a_stateful_loader_resumes_in_mid_epoch(nominal):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(persistent):
        # Unequal parts: at the end one worker has finished, and the other has not.
        source = stream(
            lambda epoch: EXAMPLES[::2], split=True, epoch=2, batches_per_epoch=nominal
        )
        return StatefulDataLoader(
            source, batch_size=None, num_workers=2, persistent_workers=persistent
        )

    whole = list(loader(False))
    places = (0, 1, 20, len(whole) - 2, len(whole) - 1, len(whole))
    for persistent, delivered in itertools.product((True, False), places):
        one = loader(persistent)
        batches = iter(one)
        assert list(islice(batches, delivered)) == whole[:delivered]
        state = one.state_dict()
        after, following = list(batches), list(one)
        other = loader(persistent)
        other.load_state_dict(state)
        assert list(other) == after == whole[delivered:]
        assert list(other) == following


@pytest.mark.process
def test_a_plain_loops_state_is_not_for_workers():
    one, other = stream(), stream()
    next(iter(one))
    other.load_state_dict(one.state_dict())
    with pytest.raises(
        ValueError,
        match="load the state of torchdata's StatefulDataLoader into that loader",
    ):
        list(loaded(other, workers=1))


def of_shards(shards):
    for number in shards:
        yield from EXAMPLES[40 * number : 40 * number + 40]


@pytest.mark.slow
def test_hugging_face_streams_resume_in_workers():
    from torchdata.stateful_dataloader import StatefulDataLoader

    datasets = pytest.importorskip("datasets")
    whole = datasets.IterableDataset.from_generator(
        of_shards, gen_kwargs={"shards": list(range(6))}
    )

    def loader():
        source = whole.shuffle(seed=3, buffer_size=20)
        return StatefulDataLoader(
            stream(source, epoch=4), batch_size=None, num_workers=2
        )

    one, other = loader(), loader()
    batches = iter(one)
    before = list(islice(batches, 33))
    state = one.state_dict()
    after = list(batches)
    assert seen([*before, *after]) == IDS
    other.load_state_dict(state)
    assert list(other) == after
    assert list(other) == list(one)
