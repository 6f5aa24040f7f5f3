"""The batch sampler under torchdata, Lightning, transformers, accelerate and torch.distributed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_samplers import TABLE
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from batchtune import BucketBatchSampler, BucketedStream

# Frameworks warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = np.random.default_rng(0).integers(1, 31, 61).astype(np.float64)


def made(**options):
    return BucketBatchSampler(LENGTHS, **TABLE, **options)


WORKERS = pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.process)]
)


def epoch(number, **options):
    return list(made(epoch=number, **options))


class Examples(Dataset[torch.Tensor]):
    """An example is its own index."""

    def __len__(self):
        return LENGTHS.size

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def indices(batch):
    return [int(index) for index in batch.flatten().tolist()]


def read(loader):
    return [indices(batch) for batch in loader]


def loaded(sampler=None, **options):
    """A plain loader of the examples."""
    return DataLoader(Examples(), batch_sampler=sampler or made(), **options)


# torchdata


def stateful(**options):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Examples(), batch_sampler=made(), **options)


TWO = {"num_workers": 2}
PERSISTENT = {**TWO, "persistent_workers": True}
SNAPSHOTS = {**TWO, "snapshot_every_n_steps": 4}


@pytest.mark.parametrize("taken", [0, 6, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(SNAPSHOTS, marks=pytest.mark.slow),
    ],
)
def test_a_stateful_loader_goes_on_in_mid_epoch(options, taken):
    loader = stateful(**options)
    assert read(loader) == epoch(0)
    running = iter(loader)
    count = len(loader) if taken is None else taken
    before = [indices(next(running)) for _ in range(count)]
    state = loader.state_dict()
    resumed = stateful(**options)
    resumed.load_state_dict(state)
    assert before + read(resumed) == epoch(1)
    assert read(resumed) == epoch(2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.process) for each in (TWO, PERSISTENT)),
    ],
    ids=["0 workers", "2 workers", "2 persistent workers"],
)
def test_a_stateful_loader_goes_on_after_an_abandoned_epoch(options):
    loader = stateful(**options)
    next(iter(loader))
    running = iter(loader)
    state = loader.state_dict()
    assert read(running) == epoch(1)
    resumed = stateful(**options)
    resumed.load_state_dict(state)
    assert read(resumed) == epoch(1)


# Lightning


def lightning_module():
    lightning = pytest.importorskip("lightning")

    class Tiny(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def on_train_epoch_start(self):
            self.seen.append([])

        def training_step(self, batch, _):
            self.seen[-1].append(indices(batch))
            return self.layer(batch / 100).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    return Tiny()


def trainer(tmp_path, **options):
    from lightning import Trainer

    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        use_distributed_sampler=False,
        **options,
    )


def lambda_callback(**hooks):
    from lightning.pytorch.callbacks import LambdaCallback

    return LambdaCallback(**hooks)


def test_lightning_resumes_at_the_epoch_of_the_checkpoint(tmp_path):
    first = trainer(tmp_path, max_epochs=1)
    first.fit(lightning_module(), loaded())
    first.save_checkpoint(tmp_path / "one.ckpt")
    module = lightning_module()
    trainer(tmp_path, max_epochs=2).fit(
        module,
        loaded(),
        ckpt_path=tmp_path / "one.ckpt",
    )
    assert module.seen == [epoch(1)]


@WORKERS
def test_lightning_resumes_in_mid_epoch_with_a_stateful_loader(tmp_path, workers):
    module = lightning_module()
    steps = len(made()) + 4

    def save(*_):
        if first.global_step == steps:
            first.save_checkpoint(tmp_path / "some.ckpt")

    first = trainer(
        tmp_path, max_epochs=2, callbacks=[lambda_callback(on_train_batch_end=save)]
    )
    first.fit(module, stateful(num_workers=workers))
    module = lightning_module()
    module.seen.append([])  # the epoch that is resumed does not start anew
    trainer(tmp_path, max_epochs=3).fit(
        module, stateful(num_workers=workers), ckpt_path=tmp_path / "some.ckpt"
    )
    assert module.seen == [epoch(1)[4:], epoch(2)]


@WORKERS
def test_lightning_with_a_plain_loader_keeps_the_samplers_place(tmp_path, workers):
    sampler, module, states = made(), lightning_module(), []
    keep = lambda_callback(
        on_train_batch_end=lambda *_: states.append(sampler.state_dict())
    )
    loader = loaded(sampler, num_workers=workers)
    trainer(tmp_path, max_epochs=2, callbacks=[keep]).fit(module, loader)
    count = len(sampler)
    found = [state["epoch"] * count + state["position"] for state in states]
    assert found == list(range(1, 2 * count + 1))


# accelerate


@WORKERS
def test_accelerate_resumes_in_mid_epoch(tmp_path, workers):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata.stateful_dataloader")

    def prepared():
        options = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
        return accelerator, accelerator.prepare(loaded(num_workers=workers))

    accelerator, loader = prepared()
    list(loader)
    for count, _ in enumerate(loader, 1):
        if count == 4:
            accelerator.save_state(str(tmp_path))
            break
    accelerator, loader = prepared()
    accelerator.load_state(str(tmp_path))
    loader.set_epoch(1)
    assert [read(loader), read(loader)] == [epoch(1)[4:], epoch(2)]


@WORKERS
def test_accelerate_with_a_plain_loader_resumes_by_batch_count(workers):
    accelerate = pytest.importorskip("accelerate")
    sampler = made()
    loader = accelerate.Accelerator(cpu=True).prepare(
        loaded(sampler, num_workers=workers)
    )
    for count, _ in enumerate(loader, 1):
        resumed = made()
        resumed.load_state_dict(sampler.state_dict(batches=count))
        both = [*epoch(0), *epoch(1)]
        assert [*resumed, *resumed][: len(sampler)] == both[count:][: len(sampler)]


def test_accelerate_deals_the_batches_of_one_rank_to_processes():
    data_loader = pytest.importorskip("accelerate.data_loader")
    ranks = [
        data_loader.prepare_data_loader(
            loaded(made(rank=0, world_size=1)),
            num_processes=2,
            process_index=rank,
        )
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    found = set(itertools.chain(*read(itertools.chain(*ranks))))
    assert found == set(range(LENGTHS.size))


def sharded(sampler):
    return pytest.importorskip("accelerate.data_loader").prepare_data_loader(
        loaded(sampler),
        num_processes=2,
        process_index=0,
    )


def skipped_then_sharded(sampler):
    data_loader = pytest.importorskip("accelerate.data_loader")
    return sharded(data_loader.SkipBatchSampler(sampler, 1))


def dispatched(sampler):
    loader = pytest.importorskip("accelerate.data_loader").prepare_data_loader(
        loaded(sampler),
        put_on_device=True,
        device=torch.device("cpu"),
        dispatch_batches=True,
    )
    loader.state = SimpleNamespace(num_processes=2, process_index=0)
    return loader


def wrapped(sampler):
    distributed = pytest.importorskip("lightning.fabric.utilities.distributed")
    dealt = distributed.DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
    return loaded(dealt)


@pytest.mark.parametrize(
    "deal",
    [sharded, skipped_then_sharded, dispatched, wrapped],
    ids=lambda f: f.__name__,
)
def test_dealing_twice_is_an_error(deal):
    with pytest.raises(RuntimeError, match="has already dealt them to 2"):
        next(iter(deal(made(rank=0, world_size=2))))


def test_dealing_a_stream_twice_is_an_error():
    shards = pytest.importorskip("accelerate.data_loader")
    stream = BucketedStream(
        LENGTHS.tolist(), length_of=float, rank=0, world_size=2, split=True, **TABLE
    )
    dealt = shards.IterableDatasetShard(stream, num_processes=2)
    with pytest.raises(RuntimeError, match="has already dealt them to 2"):
        next(iter(dealt))


# transformers


def transformers_trainer(tmp_path, **options):
    transformers = pytest.importorskip("transformers")

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def forward(self, x):
            self.seen.append(indices(x))
            return {"loss": self.layer(x / 100).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(
                self.train_dataset,
                batch_sampler=made(),
                collate_fn=lambda examples: {"x": torch.stack(examples)},
            )

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    return Trainer(model=Tiny(), args=arguments, train_dataset=Examples())


@pytest.mark.usefixtures("torchaudio_or_none")
@pytest.mark.parametrize("position", [0, 4])
def test_transformers_resumes(tmp_path, position):
    steps = len(made()) + position
    first = transformers_trainer(
        tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=steps
    )
    first.train()
    resumed = transformers_trainer(tmp_path, num_train_epochs=3, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert resumed.model.seen == (epoch(0) + epoch(1) + epoch(2))[steps:]


# torch.distributed


def test_ranks_are_those_of_the_process_group():
    first = list(made(rank=0, world_size=2))
    sampler = made()  # before the process group, as frameworks let users do
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=1, world_size=2
    )
    try:
        assert (sampler.rank, sampler.world_size) == (1, 2)
        second = list(sampler)
    finally:
        torch.distributed.destroy_process_group()
    assert len(second) == len(first)
    assert sorted(itertools.chain(*first, *second)) == list(range(LENGTHS.size))
