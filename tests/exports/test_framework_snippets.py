"""The snippets for PyTorch and its trainers, run: the batches they train on are those of the sweep."""

import warnings

import numpy as np
import pytest
import torch
from buckets.speech import swept
from exports.stream_runs import executed, rendered, write_config

from batchtune import sampler_from_config

# Frameworks warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS = 2
# An example is its own index.
EXAMPLES = [torch.tensor([float(index)]) for index in range(900)]


class Tiny(torch.nn.Module):
    """Its forward pass is a loss; it keeps the batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, x):
        self.seen.append(list(map(int, x.flatten().tolist())))
        return {"loss": self.layer(x / 1e5).mean()}


def stacked(examples):
    return {"x": torch.stack(examples)}


def loss_of(model, batch):
    return model(**batch)["loss"]


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).integers(1, 40, 900).astype(np.float64)


@pytest.fixture(scope="module", params=["optimal", "pooled"])
def made(request, lengths):
    pool_sizes = (300,) if request.param == "pooled" else ()
    options = {"strategies": (request.param,), "pool_sizes": pool_sizes}
    return swept(lengths, 600, num_buckets=(13,), **options)


@pytest.fixture(scope="module")
def config(made, tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("run"), made)


@pytest.fixture
def run(made, config):
    """The snippet for a framework, executed: its names."""

    def of_framework(framework):
        return executed(rendered(framework, made, config=config))

    return of_framework


@pytest.fixture
def hold(config, lengths):
    """Checks batches of two epochs: the sampler's own, as many as the sampler says."""

    def check(seen):
        sampler = sampler_from_config(config, lengths)
        assert len(seen) == EPOCHS * len(sampler)
        assert seen == [batch for _ in range(EPOCHS) for batch in sampler]

    return check


@pytest.mark.parametrize("framework", ["pytorch", "accelerate"])
def test_a_loop_of_ones_own(run, hold, lengths, framework):
    if framework == "accelerate":
        pytest.importorskip("accelerate")
    names = run(framework)
    model = Tiny()
    with warnings.catch_warnings():
        # Such as that the table was tuned on other lengths.
        warnings.simplefilter("error", UserWarning)
        loader = names["train_loader"](EXAMPLES, lengths, stacked, num_workers=0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    names["train"](model, optimizer, loss_of, loader, EPOCHS)
    hold(model.seen)


def test_lightning(run, hold, lengths, tmp_path):
    lightning = pytest.importorskip("lightning")
    names, tiny = run("lightning"), Tiny()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.tiny = tiny

        def training_step(self, batch, _):
            return loss_of(self.tiny, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    data = names["TunedDataModule"](EXAMPLES, lengths, stacked, num_workers=0)
    names["fit"](
        Module(),
        data,
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    hold(tiny.seen)


@pytest.mark.process
@pytest.mark.usefixtures("torchaudio_or_none")
def test_transformers(run, hold, lengths, tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        num_train_epochs=EPOCHS,
    )
    trainer = run("transformers")["TunedTrainer"](
        model=Tiny(),
        args=arguments,
        train_dataset=EXAMPLES,
        data_collator=stacked,
        lengths=lengths,
    )
    trainer.train()
    hold(trainer.model.seen)
