"""The trainings of `recipes.py`: small models of the kinds that people train, as workloads of batchtune.

Each makes examples of any length whose content can be learned, so that losses mean something: example i is always
the same. A training is a workload for `--workload tests/benchmarks/recipe_models.py:NAME`, and trains on real batches
in a worker of the benchmark. Lengths are in the manifest's unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100


class Training(ABC):
    """A model, its optimizer and its examples.

    Args:
        dim: Width of the model.
        layers: Number of its layers.
    """

    packed = False

    def __init__(self, dim=64, layers=3):
        self.dim = dim
        self.layers = layers

    def setup(self, device):
        """Build the model and AdamW."""
        torch.set_num_threads(1)
        self.device = device
        self.model = self.build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def make_batch(self, shape):
        """Make a batch of examples that all have the length of the shape, or of its sequences."""
        sizes = shape.sequences or [shape.length] * shape.batch_size
        targets = [shape.target_length] * len(sizes)
        return self.batch_of(range(len(sizes)), sizes, targets)

    def batch_of(self, indices, lengths, targets):
        """Make a batch of the examples with these indices, on the device."""
        examples = [
            self.example(length, target, torch.Generator().manual_seed(index))
            for index, length, target in zip(indices, lengths, targets, strict=True)
        ]
        batch = self.collate(examples)
        return {name: values.to(self.device) for name, values in batch.items()}

    def step(self, batch):
        """Train on a batch; return its mean loss."""
        loss, items = self.accumulate(batch)
        self.finish(items)
        return loss / max(items, 1)  # on the emulated device all values are 0

    def accumulate(self, batch):
        """Add the gradient of a micro-batch's loss; return this loss, summed over its items, and their number."""
        loss, items = self.loss(batch)
        loss.backward()
        # On the emulated device nothing is computed, not even their number.
        return loss.item(), max(1, int(items))

    def finish(self, items):
        """Let the optimizer step on the mean over a step's items, however its micro-batches were cut.

        As fairseq does: the gradients are divided by what they sum. They stay allocated, as while accumulating.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= items
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    @abstractmethod
    def build(self):
        """Build the model."""

    @abstractmethod
    def example(self, length, target, generator):
        """Make an example."""

    @abstractmethod
    def loss(self, batch):
        """Return the loss of a batch, summed over its items (tokens, frames), and how many these are."""

    def collate(self, examples):
        """Pad the examples; labels with IGNORED."""
        batch = {}
        for name in examples[0]:
            values = [example[name] for example in examples]
            padding = IGNORED if name == "labels" else 0
            batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
            batch[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
        return batch


def transformer_layer(dim, kind=nn.TransformerEncoderLayer):
    """Return a layer of torch's transformer encoder, or decoder, normed first, without dropout."""
    return kind(
        dim,
        nhead=max(1, dim // 32),
        dim_feedforward=4 * dim,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )


def is_padding(lengths, longest):
    """Return which positions are padding, of shape (batch, longest)."""
    return torch.arange(longest, device=lengths.device) >= lengths[:, None]


class Encoder(nn.Module):
    """Halves the frames, then runs layers of a transformer over them."""

    def __init__(self, features, dim, layers):
        super().__init__()
        self.halve = nn.Conv1d(features, dim, 5, stride=2, padding=2)
        # Where a frame is, it learns from its neighbours: any length will do.
        self.place = nn.Conv1d(dim, dim, 15, padding=7, groups=dim)
        self.blocks = nn.ModuleList(transformer_layer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, frames, lengths):
        """Return what it makes of frames (batch, length, features), and how long that is."""
        hidden = self.halve(frames.transpose(1, 2))
        halved = (lengths + 1) // 2
        padding = is_padding(halved, hidden.shape[2])
        # What an example comes to must not depend on how far it is padded.
        hidden = hidden.masked_fill(padding[:, None], 0.0)
        hidden = (hidden + self.place(hidden)).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return self.norm(hidden), halved


class Speech(Training):
    """Trains on made speech: each token has a sound of its own."""

    FRAMES_PER_SECOND = 25
    TOKENS_PER_SECOND = 3.0
    FEATURES = 40
    TOKENS = 64

    def example(self, length, target, generator):
        """Make the frames of seconds of speech, and its tokens."""
        count = max(1, int(length * self.TOKENS_PER_SECOND))
        if target is not None:
            count = max(1, int(target))
        tokens = torch.randint(1, self.TOKENS, (count,), generator=generator)
        num_frames = max(2, int(length * self.FRAMES_PER_SECOND))
        spoken = torch.arange(num_frames) * count // num_frames
        noise = torch.randn(num_frames, self.FEATURES, generator=generator)
        frames = self.sounds()[tokens[spoken]] + 0.5 * noise
        return {"frames": frames, "tokens": tokens}

    def sounds(self):
        """Return the sound of each token."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.TOKENS, self.FEATURES, generator=generator)


class CtcTraining(Speech):
    """Recognizes speech by CTC; lengths in seconds."""

    def build(self):
        """Build an encoder and a classifier."""
        encoder = Encoder(self.FEATURES, self.dim, self.layers)
        classify = nn.Linear(self.dim, self.TOKENS)
        return nn.ModuleDict({"encoder": encoder, "classify": classify})

    def loss(self, batch):
        """Return the CTC loss, and the number of tokens."""
        hidden, lengths = self.model["encoder"](
            batch["frames"], batch["frames_lengths"]
        )
        scores = self.model["classify"](hidden).log_softmax(-1).transpose(0, 1)
        summed = nn.functional.ctc_loss(
            scores,
            batch["tokens"],
            lengths,
            batch["tokens_lengths"],
            reduction="sum",
            zero_infinity=True,
        )
        return summed, batch["tokens_lengths"].sum()


class EncoderDecoderTraining(Speech):
    """Transcribes speech with an encoder and a decoder; lengths in seconds, targets in characters."""

    def build(self):
        """Build both halves."""
        layer = transformer_layer(self.dim, nn.TransformerDecoderLayer)
        return nn.ModuleDict(
            {
                "encoder": Encoder(self.FEATURES, self.dim, self.layers),
                "embed": nn.Embedding(self.TOKENS, self.dim),
                "decoder": nn.TransformerDecoder(layer, self.layers),
                "classify": nn.Linear(self.dim, self.TOKENS),
            }
        )

    def loss(self, batch):
        """Return the loss of the next characters."""
        source, lengths = self.model["encoder"](
            batch["frames"], batch["frames_lengths"]
        )
        tokens = batch["tokens"]
        # 0 pads, and begins each transcript.
        previous = nn.functional.pad(tokens[:, :-1], (1, 0))
        hidden = self.model["embed"](previous)
        length = tokens.shape[1]
        hidden = self.model["decoder"](
            hidden,
            source,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(
                length, device=self.device
            ),
            memory_key_padding_mask=is_padding(lengths, source.shape[1]),
            tgt_is_causal=True,
        )
        scores = self.model["classify"](hidden).flatten(0, 1)
        summed = cross_entropy(
            scores, tokens.flatten(), ignore_index=0, reduction="sum"
        )
        return summed, batch["tokens_lengths"].sum()


class MaskedTraining(Training):
    """Fills in masked tokens of code; lengths in tokens."""

    TOKENS = 500
    MASKED = 0.15

    def build(self):
        """Build an encoder of tokens."""
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(self.TOKENS, self.dim),
                "place": nn.Conv1d(self.dim, self.dim, 15, padding=7, groups=self.dim),
                "blocks": nn.ModuleList(
                    transformer_layer(self.dim) for _ in range(self.layers)
                ),
                "classify": nn.Linear(self.dim, self.TOKENS),
            }
        )

    def example(self, length, target, generator):
        """Make tokens that follow from the first, of which some are masked by 1."""
        count = max(2, int(length))
        first = int(torch.randint(self.TOKENS, (), generator=generator))
        tokens = (first + 7 * torch.arange(count)) % (self.TOKENS - 2) + 2
        masked = torch.rand(count, generator=generator) < self.MASKED
        masked[0] = True
        return {
            "tokens": torch.where(masked, 1, tokens),
            "labels": torch.where(masked, tokens, IGNORED),
        }

    def loss(self, batch):
        """Return the loss of the masked tokens."""
        tokens = batch["tokens"]
        padding = is_padding(batch["tokens_lengths"], tokens.shape[1])
        hidden = self.model["embed"](tokens).masked_fill(padding[:, :, None], 0.0)
        hidden = hidden.transpose(1, 2)
        hidden = (hidden + self.model["place"](hidden)).transpose(1, 2)
        for block in self.model["blocks"]:
            hidden = block(hidden, src_key_padding_mask=padding)
        scores = self.model["classify"](hidden).flatten(0, 1)
        labels = batch["labels"].flatten()
        summed = cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        return summed, (labels != IGNORED).sum()


class ChatTraining(Training):
    """Fine-tunes a small Llama of Transformers on padded chats; lengths in tokens."""

    TOKENS = 1000

    def build(self):
        """Build Transformers' own model, with attention that can also run packed rows."""
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("rows", attention_of_rows)
        config = LlamaConfig(
            vocab_size=self.TOKENS,
            hidden_size=self.dim,
            intermediate_size=3 * self.dim,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.dim // 32),
            max_position_embeddings=8192,
            use_cache=False,
            attn_implementation="rows",
        )
        return LlamaForCausalLM(config)

    def example(self, length, target, generator):
        """Make tokens each of which follows from the one before."""
        first = torch.randint(100, (), generator=generator)
        tokens = (first + 7 * torch.arange(max(2, int(length)))) % 100 + 3
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, batch):
        """Return the loss of the next tokens. Padding is on the right: causal attention never sees it."""
        return self.summed(batch)

    def summed(self, batch, **rows):
        """Return the loss that Transformers' model computes: a sum, if it is to be divided by one token."""
        labels = batch["labels"]
        made = self.model(
            input_ids=batch["input_ids"], labels=labels, num_items_in_batch=1, **rows
        )
        return made.loss, (labels[:, 1:] != IGNORED).sum()


class PackedChatTraining(ChatTraining):
    """The same on rows of chats without padding, as with `DataCollatorWithFlattening`."""

    packed = True

    def collate(self, examples):
        """Lay the examples in one row; the first token of each is no label."""
        tokens = [example["input_ids"] for example in examples]
        labels = [nn.functional.pad(one[1:], (1, 0), value=IGNORED) for one in tokens]
        places = [torch.arange(len(one)) for one in tokens]
        ends = torch.tensor([0, *(len(one) for one in tokens)]).cumsum(0)
        return {
            "input_ids": torch.cat(tokens)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat(places)[None],
            "ends": ends,
        }

    def loss(self, batch):
        """Return the loss of the next tokens."""
        return self.summed(
            batch, position_ids=batch["position_ids"], cu_seq_lens_q=batch["ends"]
        )


def attention_of_rows(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    cu_seq_lens_q=None,
    **options,
):
    """Attend causally in each sequence of a row by itself, as FlashAttention does on a GPU.

    Queries, keys and values are (batch, heads, length, dim). Without `cu_seq_lens_q` each row is one sequence.
    """
    if cu_seq_lens_q is None:
        sequences = [query.shape[2]]
    else:
        sequences = cu_seq_lens_q.diff().tolist()
    parts = zip(
        *(part.split(sequences, dim=2) for part in (query, key, value)), strict=True
    )
    attended = [
        scaled_dot_product_attention(
            *part, is_causal=True, scale=scaling, enable_gqa=True
        )
        for part in parts
    ]
    return torch.cat(attended, dim=2).transpose(1, 2), None
