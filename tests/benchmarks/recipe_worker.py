"""One contender's training process, which `recipes.py` starts and asks over its standard streams, a JSON line each.

It runs under the memory limit of everybody, set and measured as a probe of batchtune does it. Like any training, it
loads a sampler and reads its batches from a DataLoader, and nothing else is held. A probe keeps
room for such a process, so what it has proven fits here.

An OOM ends an epoch, as it ends a training; a search goes on after one.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from benchmarks import recipe_models
from torch.utils.data import DataLoader

from batchtune import BatchShape
from batchtune.probe.devices import backend_for
from batchtune.probe.failures import error_verdict
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.worker import drain_autograd

# A failure that leaves more than this part of the limit in use costs the worker of a search.
HELD_SHARE = 0.002
# A disguised one names another cause: oneDNN "could not create a primitive".
OUT_OF_MEMORY = ("oom", "disguised")


class Trainer:
    """The training, its limited device, and its data."""

    def __init__(self, asked):
        self.lengths = asked["lengths"]
        self.targets = asked["targets"]
        self.held_out = asked["held_out"]
        make = getattr(recipe_models, asked["training"])
        self.training = make(**asked["options"])
        settings = ProbeSettings(workload="", options={}, device=asked["device"])
        self.meter = backend_for(asked["device"]).open(
            asked["device"], settings, asked["limit_bytes"]
        )
        importlib.import_module("batchtune.sampler.micro_batches")
        self.meter.limit()
        self.reset(0, 1e-3)
        self.meter.settle(0, 0)
        # What is done only once is neither timed nor measured, and the optimizer's state is complete.
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        for _ in range(2):
            self.train([[[shortest]]])
        self.rest_bytes = self.meter.in_use()
        self.is_damaged = False

    def reset(self, seed, lr):
        """Begin a training anew."""
        torch.manual_seed(seed)
        self.training.setup(self.meter.torch_device)
        for group in self.training.optimizer.param_groups:
            group["lr"] = lr
        gc.collect()
        self.meter.release()
        return {}

    def batch_of(self, indices):
        """Make a batch of examples."""
        lengths = [self.lengths[index] for index in indices]
        targets = [self.targets[index] for index in indices]
        return self.training.batch_of(indices, lengths, targets)

    def loaded(self, batches):
        """Read batches from a DataLoader."""
        examples = range(len(self.lengths))
        return iter(
            DataLoader(examples, batch_sampler=batches, collate_fn=self.batch_of)
        )

    def run_step(self, batches, count):
        """Accumulate so many micro-batches, and let the optimizer step.

        Returns its seconds, without those that making the batches takes, its peak in bytes, and its mean loss.
        """
        seconds = 0.0
        peak = 0
        summed = 0.0
        items = 0
        for left in range(count - 1, -1, -1):
            batch = next(batches)
            self.meter.reset()
            self.meter.synchronize()
            started = time.perf_counter()
            loss, its_items = self.training.accumulate(batch)
            summed += loss
            items += its_items
            if left == 0:
                self.training.finish(items)
            self.meter.synchronize()
            seconds += time.perf_counter() - started
            peak = max(peak, self.meter.peak() or 0)
            del batch
        return seconds, peak, summed / items

    def train(self, steps):
        """Train on the micro-batches of steps until memory runs out, which ends a training; describe each step."""
        ran = []
        loader = self.loaded([batch for step in steps for batch in step])
        for step in steps:
            outcome = self.tried(loader, len(step))
            if outcome is None:
                return {"steps": ran, "oom": True}
            ran.append(outcome)
        return {"steps": ran, "oom": False}

    def tried(self, batches, count):
        """Run a step; None if memory ran out."""
        try:
            return self.run_step(batches, count)
        except (RuntimeError, MemoryError) as error:
            verdict = error_verdict(error)
            if verdict not in OUT_OF_MEMORY:
                raise
            # oneDNN never recovers from one.
            self.is_damaged = self.is_damaged or verdict == "disguised"
            traceback.clear_frames(error.__traceback__)
        self.clear()
        return None

    def clear(self):
        """Give back what the last steps hold."""
        drain_autograd()
        self.training.optimizer.zero_grad(set_to_none=False)
        gc.collect()
        self.meter.release()

    def fits(self, batches):
        """Train on batches, a step each, until one does not fit."""
        return self.verdict(not self.train([[batch] for batch in batches])["oom"])

    def fits_shape(self, batch_size, length, target):
        """Train on made batches of a shape, two steps as OOMptimizer does."""
        shape = BatchShape(batch_size, length, target)
        made = (self.training.make_batch(shape) for _ in range(2))
        fits = all(self.tried(made, 1) is not None for _ in range(2))
        return self.verdict(fits)

    def verdict(self, fits):
        """Return a trial's outcome, and whether a failure left so much behind that the next would not compare."""
        left = self.meter.in_use() - self.rest_bytes
        held_too_much = left > HELD_SHARE * self.meter.device.limit_bytes
        return {"fits": fits, "worn": self.is_damaged or (not fits and held_too_much)}

    def evaluate(self):
        """Return the mean loss of the examples that are held out."""
        summed = 0.0
        items = 0
        self.training.model.eval()
        with torch.no_grad():
            for indices in self.held_out:
                loss, its_items = self.training.loss(self.batch_of(indices))
                summed += loss.item()
                items += int(its_items)
        self.training.model.train()
        return {"loss": summed / max(1, items)}


def main():
    """Answer requests until there are no more. What libraries print goes to stderr."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainer = None
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        if trainer is None:
            trainer = Trainer(asked)
            reply = {"held_bytes": trainer.meter.in_use()}
        else:
            reply = getattr(trainer, name)(**asked)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
