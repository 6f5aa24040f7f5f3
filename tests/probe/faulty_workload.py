"""Workloads that go wrong in one way each, for real."""

import contextlib
import ctypes
import os
import resource
import signal
import time

import numpy as np
import torch


class Good:
    def setup(self, device):
        self.weight = torch.ones(4, requires_grad=True)

    def make_batch(self, shape):
        return shape

    def step(self, batch):
        (self.weight * batch.batch_size).sum().backward()


class TrainsNothing(Good):
    """Forgets the optimizer's step."""

    def setup(self, device):
        self.model = torch.nn.Linear(64, 64)

    def step(self, batch):
        self.model(torch.ones(batch.batch_size, 64)).sum().backward()


class ForksAndHangs(Good):
    """Starts a child of its own, as a data loader does, and says which."""

    def step(self, batch):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        with open("child", "w") as file:
            file.write(str(child))
        time.sleep(1000)


def start_daemon():
    """A grandchild in a session of its own, whose parent has ended: nothing leads from it to the worker."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)


class StartsDaemons(Good):
    """Starts one in its setup and one in each step; of batches of two it dies, of larger ones it hangs."""

    def setup(self, device):
        super().setup(device)
        start_daemon()

    def step(self, batch):
        start_daemon()
        super().step(batch)
        if batch.batch_size == 2:
            os._exit(3)
        if batch.batch_size > 2:
            open("hanging", "w").close()
            time.sleep(1000)


class KillsItsParent(Good):
    """Of one example, kills the process above it, as one does that cleans up by name."""

    def step(self, batch):
        if batch.batch_size == 1:
            start_daemon()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        super().step(batch)


class Faulty(Good):
    """Has another fault for each batch size; a batch of one has none."""

    def step(self, batch):
        super().step(batch)
        faults = {
            3: self.run_out_in_numpy,
            4: self.run_out,
            5: self.catch,
            6: self.read_from_nowhere,
            7: self.fork_and_leave,
            8: self.scribble,
            9: self.hang,
        }
        if batch.batch_size in faults:
            faults[batch.batch_size]()

    def run_out_in_numpy(self):
        np.ones(4 << 30, dtype=np.uint8)

    def run_out(self):
        torch.ones(4 << 30, dtype=torch.uint8)

    def catch(self):
        with contextlib.suppress(RuntimeError):
            self.run_out()

    def read_from_nowhere(self):
        ctypes.string_at(0)

    def fork_and_leave(self):
        """Leave a child behind that holds every descriptor open."""
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(3)

    def scribble(self):
        """Write to descriptors that are not its own."""
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, b"debug: 7\n")

    def hang(self):
        time.sleep(1000)


class _HungryBackward(torch.autograd.Function):
    """Its backward pass takes four times what its input takes."""

    @staticmethod
    def forward(ctx, features):
        ctx.shape = features.shape
        return features.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(4, *ctx.shape).sum(0) * gradient


class TwoLosses(Good):
    """Takes 1 MiB a unit of length for its features, from which two losses follow: one's backward pass runs out first.

    So autograd still has the other's to do when it fails, with all that its graph holds.
    """

    def step(self, batch):
        features = self.weight.sum() * torch.ones(
            batch.batch_size, int(batch.length * (1 << 18))
        )
        waiting = features.square().sum()
        (_HungryBackward.apply(features) + waiting).backward()


class KeepsItsFeatures(Good):
    """Takes 1 MiB a unit of length, and keeps it until the next step has made its own."""

    def step(self, batch):
        self.features = torch.ones(batch.batch_size, int(batch.length * (1 << 18)))
        torch.ones(4, *self.features.shape)
        self.features = torch.ones(1)


class TakesEveryByte(Good):
    """Runs out of memory with small pieces: nothing is left to tell of it while the failed step's variables live."""

    def step(self, batch):
        held = []
        while True:
            held.append(bytearray(4096))


class LowersLimit(Good):
    """Allows its process less memory than the probe does, in its setup or in its steps."""

    def __init__(self, where, fails=False):
        self.where, self.fails = where, fails

    def setup(self, device):
        super().setup(device)
        if self.where == "setup":
            self.lower()

    def step(self, batch):
        super().step(batch)
        if self.where == "step":
            self.lower()

    def lower(self):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 20, hard))
        if self.fails:
            torch.zeros(64 << 20)
