"""Tests of the recorder in a loop of one's own, in the real Lightning and Transformers, and in a made SpeechBrain."""

import made_loops
import pytest
import torch
from made_loops import Trainer, batches
from scripts.test_recording import lengths_in

import batchtune


def test_a_recorder_is_used_again_after_its_end(tmp_path):
    recorder = batchtune.Recorder(tmp_path)
    for _ in range(2):
        with recorder:
            made_loops.plain(Trainer(), recorder.watch(batches(2)), 1)
    assert lengths_in(tmp_path / "training.jsonl") == [[10], [11]] * 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_what_its_callback_records(tmp_path):
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(batch[0].shape[1])
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = LightningTrainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[batchtune.Recorder(tmp_path).lightning_callback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    data = torch.utils.data.DataLoader(batches(5), batch_size=None)
    trainer.fit(module, data)
    seen = module.seen
    assert lengths_in(tmp_path / "training.jsonl") == [
        *(seen[:2], seen[2:4], seen[4:5], seen[5:7], seen[7:9], seen[9:])
    ]


@pytest.mark.filterwarnings("ignore")
def test_transformers_trains_on_what_its_callback_records(tmp_path, torchaudio_or_none):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    config = LlamaConfig(
        vocab_size=30,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )

    def collate(examples):
        ids = torch.ones(len(examples), examples[0], dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        disable_tqdm=True,
    )
    lengths = list(range(10, 16))
    data = lengths
    trainer = TransformersTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        callbacks=[batchtune.Recorder(tmp_path).transformers_callback()],
    )
    trainer.train()
    recorded = lengths_in(tmp_path / "training.jsonl")
    assert [len(step) for step in recorded] == [2, 2, 2]
    assert sorted(length for step in recorded for length in step) == lengths


class Brain:
    """The part of SpeechBrain's `Brain` that trains."""

    def __init__(self):
        self.trainer = Trainer()

    def fit_batch(self, batch):
        self.trainer.train(batch)
        self.trainer.step()
        return 0.5


def test_a_brain_is_followed(tmp_path):
    brain = Brain()
    with batchtune.Recorder(tmp_path) as recorder:
        recorder.follow(brain)
        losses = [brain.fit_batch(batch) for batch in batches(3)]
    assert lengths_in(tmp_path / "training.jsonl") == [[10], [11], [12]]
    assert losses == [0.5] * 3
