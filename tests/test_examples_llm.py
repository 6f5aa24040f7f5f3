"""The example of a language model: its chats are counted as in training, and its step trains a Hugging Face model."""

import json
from pathlib import Path

import pytest
import torch
from started import python
from torch.nn.utils import parameters_to_vector

from batchtune.manifests import ReadOptions, load_lengths
from batchtune.results import BatchShape
from batchtune.workloads import load_workload

FOLDER = Path(__file__).parents[1] / "examples" / "llm"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm") / "chats"
    ran = python(FOLDER / "make_chats.py", folder, "--most", 60)
    assert ran.stdout == "60 chats\n"
    return folder


@pytest.mark.process
def test_chats_are_counted_as_transformers_renders_them(chats):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(chats)
    lines = (chats / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    rendered = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)
        for line in lines
    ]
    found = load_lengths(chats / "chats.jsonl", ReadOptions(tokenizer=str(chats)))
    assert found.values.tolist() == sorted(map(len, rendered), reverse=True)


@pytest.mark.usefixtures("torchaudio_or_none")
def test_the_step_trains_a_model_from_the_hub(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    step = load_workload(
        f"{FOLDER / 'finetune.py'}:FineTuning", {"model": str(tmp_path)}
    )
    step.setup(torch.device("cpu"))
    before = parameters_to_vector(step.model.parameters()).detach()
    step.step(step.make_batch(BatchShape(batch_size=2, length=7.0)))
    assert not torch.equal(before, parameters_to_vector(step.model.parameters()))
