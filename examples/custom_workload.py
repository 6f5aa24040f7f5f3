"""A workload of your own, for --workload examples/custom_workload.py:TinyTagger."""

from torch import nn, optim, randint


class TinyTagger:
    """Gives each token one of many tags: one layer of a transformer. --set dim=128 makes it wider."""

    def __init__(self, dim: int = 64, vocab: int = 10_000, tags: int = 2000):
        self.dim, self.vocab, self.tags = dim, vocab, tags

    def setup(self, device):
        """Builds the model and its optimizer, once."""
        encode = nn.TransformerEncoderLayer(self.dim, 4, 256, batch_first=True)
        classify = nn.Linear(self.dim, self.tags)
        self.model = nn.Sequential(nn.Embedding(self.vocab, self.dim), encode, classify)
        self.optimizer = optim.AdamW(self.model.to(device).parameters())

    def make_batch(self, shape):
        """Makes a padded batch of that shape on the device; its values do not matter."""
        size = (shape.batch_size, int(shape.length))
        device = self.model[0].weight.device
        return [randint(n, size, device=device) for n in (self.vocab, self.tags)]

    def step(self, batch):
        """Runs one full training step, as your own training does."""
        self.optimizer.zero_grad()
        scores = self.model(batch[0]).flatten(0, 1)
        nn.functional.cross_entropy(scores, batch[1].flatten()).backward()
        self.optimizer.step()
