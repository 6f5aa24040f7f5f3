"""Fine-tuning a causal language model of Hugging Face, for --workload examples/llm/finetune.py:FineTuning."""

import torch
from transformers import AutoModelForCausalLM


class FineTuning:
    """One step of full fine-tuning; --set model=FOLDER names the model (or its name on the Hub)."""

    def __init__(self, model: str, checkpointing: bool = False):
        self.name, self.checkpointing = model, checkpointing

    def setup(self, device):
        """Builds the model and its optimizer, once."""
        self.model = (
            AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.bfloat16)
            .to(device)
            .train()
        )
        if self.checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def make_batch(self, shape):
        """Makes a padded batch of that shape on the device; which tokens it holds does not matter."""
        size = (shape.batch_size, int(shape.length))
        return torch.randint(
            self.model.config.vocab_size, size, device=self.model.device
        )

    def step(self, tokens):
        """Runs one full training step."""
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
