"""`batchtune.Recorder`: records a training from within its own script, to `training.jsonl` in the run folder."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from batchtune.errors import ResultError
from batchtune.results import RUN_FILE, TRAINING_FILE, BatchShape, Run, read_result
from batchtune.scripts.training_log import TrainingLog

Method = TypeVar("Method", bound=Callable[..., None])


def _harmless(method: Method) -> Method:
    """Let a method of `Recorder` do nothing once it has failed: that ends no training."""

    @functools.wraps(method)
    def call(recorder: Recorder, *arguments: Any) -> None:
        if recorder._has_failed:
            return
        try:
            method(recorder, *arguments)
        except ResultError:
            raise
        except Exception as error:
            recorder._has_failed = True
            reason = f"{type(error).__name__}: {error}"
            print(f"Warning: batchtune records no further: {reason}", file=sys.stderr)

    return cast(Method, call)


class Recorder:
    """Records each optimizer step: its batches' shapes, time and peak memory, or that it ran out of memory.

    As a context manager around a loop of your own:

        with batchtune.Recorder("batchtune-run") as recorder:
            for batch in recorder.watch(loader):
                ...

    or `recorder.lightning_callback()`, `recorder.transformers_callback()`, `recorder.follow(brain)` for SpeechBrain;
    anything else can call `begin()` for each epoch, `start(batch)` and `stop()` around each batch. Nothing waits for a
    GPU. torch's own peak statistics are reset after each step.

    If a loop gets more than one batch before it first calls its model, it fetches one ahead, as accelerate and
    Transformers' Trainer do: its steps then have all batches but the last one.

    Args:
        run: The run folder.
        per_unit: How many positions of a tensor's axis make one unit of the manifest's lengths, such as 16000 for
            samples and seconds; by default what the run folder's probe found in the training script, or 1.
        axis: The axis of the length in the batch's tensors; for tensors with fewer axes, their last one.
    """

    # Whether batchtune makes the batches, as in `batchtune run`.
    tuned = False

    def __init__(
        self,
        run: str | Path = "batchtune-run",
        *,
        per_unit: float | None = None,
        axis: int = 1,
    ) -> None:
        folder = Path(run)
        self._per_unit = per_unit or 1.0
        self._target_per_unit = 1.0
        self._packs = False
        path = folder / RUN_FILE
        script = read_result(path, Run).device.script if path.exists() else None
        if script is not None:
            self._per_unit = per_unit or script.per_unit
            self._target_per_unit = script.target_per_unit or 1.0
            self._packs = script.packed
        self._axis = axis
        self._log = TrainingLog(folder / TRAINING_FILE)
        self._hooks: list[Any] = []  # none while the log is closed
        # That the loop got since the last step; None: the row of a packed one is unknown.
        self._batches: list[BatchShape | None] = []
        self._unknown = 0
        self._ahead = 0  # how many of them are of the next step
        self._has_stepped = False
        self._has_failed = False

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches, an epoch. Raises ResultError as `begin` does."""
        self.begin()
        yield from self.watched(loader)

    def watched(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch that has begun."""
        for batch in loader:
            self.start(batch)
            yield batch
            self.stop()

    @_harmless
    def begin(self) -> None:
        """Begin an epoch: what came before belongs to no step. Raises ResultError if the file can't be written."""
        self._end_epoch()
        if not self._hooks:
            self._open()
        self._log.begin_step()

    def _open(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._log.open(tuned=self.tuned)
        self._hooks = [
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_post_hook(self._on_optimizer_step),
        ]
        atexit.register(self.close)
        show = sys.excepthook

        def on_error(kind: Any, error: BaseException, trace: Any) -> None:
            self.failed(error)
            show(kind, error, trace)

        sys.excepthook = on_error

    @_harmless
    def _on_forward(self, *_: Any) -> None:
        if self._batches:
            self._ahead = min(1, len(self._batches) - 1)
            self._hooks[0].remove()

    @_harmless
    def _on_optimizer_step(self, *_: Any) -> None:
        self._has_stepped = True

    @_harmless
    def start(self, batch: Any) -> None:
        """Note that the loop gets a batch; one without a tensor of two axes does not count.

        Its length is the largest size along the axis, its target length the largest of the other sizes along it. A
        packed batch has the lengths that its offsets, positions or numbers of sequences show.
        """
        from batchtune.scripts.packed_rows import hides_row, packed_row
        from batchtune.scripts.trees import flatten, sizes

        leaves = {path: leaf for path, (leaf,) in flatten([batch]).items()}
        row = packed_row(leaves)
        if row is not None and (self._packs or row.size > 1):
            self._packs = True
            lengths = np.maximum(1, np.rint(row / self._per_unit)).astype(int)
            self._batches.append(BatchShape.packed(lengths.tolist()))
            return
        if row is None and hides_row(leaves):
            self._batches.append(None)
            return
        batch_sizes: dict[int, int] = {}
        for leaf in leaves.values():
            axes = sizes(leaf)
            if len(axes) > 1 and all(axes):
                batch_sizes[axes[min(self._axis, len(axes) - 1)]] = axes[0]
        if batch_sizes:
            length, *others = sorted(batch_sizes, reverse=True)
            target_length = others[0] / self._target_per_unit if others else None
            units = length / self._per_unit
            shape = BatchShape(batch_sizes[length], units, target_length)
            if self._packs:  # it shows no sequences: to the model it is a single one
                shape = BatchShape.packed([max(1, round(units))])
            self._batches.append(shape)

    @_harmless
    def stop(self) -> None:
        """Note that the batch is done, and with it a step if an optimizer has stepped."""
        if self._has_stepped:
            self._has_stepped = False
            self._log.end_step(self._take_batches())

    def _take_batches(self) -> list[BatchShape]:
        """Return the batches of the step that was made, or failed, and keep the one ahead."""
        return self._take(max(1, len(self._batches) - self._ahead))

    def _take(self, count: int) -> list[BatchShape]:
        """Return the known ones of so many batches, and count the others."""
        taken = self._batches[:count]
        self._batches = self._batches[count:]
        known = [shape for shape in taken if shape is not None]
        self._unknown += len(taken) - len(known)
        return known

    @_harmless
    def failed(self, error: BaseException) -> None:
        """Record the batch that failed, if the error says that memory ran out."""
        from batchtune.probe.failures import error_verdict
        from batchtune.workloads.loading import first_line

        if self._batches and error_verdict(error) == "oom":
            self._log.write(self._take_batches(), oom=first_line(error))
        self._batches = []

    def _end_epoch(self) -> None:
        """Write the step that was made after the last batch was asked for; its time is not known."""
        if self._has_stepped and self._batches:
            self._log.write(self._take(len(self._batches)))
        self._has_stepped = False
        self._batches = []

    @_harmless
    def close(self) -> None:
        """End the recording."""
        self._end_epoch()
        if self._unknown:
            print(
                f"Warning: batchtune left out {self._unknown:,} packed batches: the lengths of their sequences could "
                "not be read without waiting for the GPU. Use `batchtune record -- COMMAND`, or watch the loader.",
                file=sys.stderr,
            )
            self._unknown = 0
        self._log.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @_harmless
    def refuse(self) -> None:
        """Take the recording back: batchtune ends this training, and an earlier recording stays the last one."""
        self._log.refuse()

    def lightning_callback(self) -> Any:
        """Return a callback for the Trainer of Lightning, which may be imported as `pytorch_lightning`."""
        package = "lightning.pytorch"
        if package not in sys.modules:
            package = "pytorch_lightning"
        base: Any = import_module(package).Callback
        recorder = self

        class Recording(base):  # type: ignore[misc]  # of either package
            """Records a fit."""

            def on_train_epoch_start(self, *_: Any) -> None:
                recorder.begin()

            def on_train_batch_start(
                self, trainer: Any, module: Any, batch: Any, index: int
            ) -> None:
                recorder.start(batch)

            def on_train_batch_end(self, *_: Any) -> None:
                recorder.stop()

        return Recording()

    def transformers_callback(self) -> Any:
        """Return a callback for the Trainer of Transformers, which sees the batches as the model does."""
        import torch

        base: Any = import_module("transformers").TrainerCallback
        recorder = self

        def on_forward(module: Any, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled():  # not in an evaluation
                recorder.start([arguments, named])

        class Recording(base):  # type: ignore[misc]  # an optional package
            """Records a training."""

            def on_train_begin(self, *_: Any, model: Any, **named: Any) -> None:
                recorder.close()
                recorder.begin()
                hook = model.register_forward_pre_hook(on_forward, with_kwargs=True)
                recorder._hooks.append(hook)

            def on_epoch_begin(self, *_: Any, **named: Any) -> None:
                recorder.begin()

            def on_step_end(self, *_: Any, **named: Any) -> None:
                recorder.stop()

        return Recording()

    def follow(self, brain: Any) -> None:
        """Record what a SpeechBrain `Brain` trains on from now on, around its `fit_batch`."""
        self.begin()
        own_fit_batch = brain.fit_batch

        def fit_batch(batch: Any) -> Any:
            self.start(batch)
            loss = own_fit_batch(batch)
            self.stop()
            return loss

        brain.fit_batch = fit_batch
