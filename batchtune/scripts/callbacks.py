"""The recorder in training frameworks, by the methods that they call for it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchtune.scripts.recorder import Recorder


def lightning_callback(recorder: Recorder) -> Any:
    """Return a callback of the package that the script uses, `lightning` or `pytorch_lightning`."""
    package = "lightning.pytorch"
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        package = "pytorch_lightning"
    callbacks: Any = import_module(f"{package}.callbacks")

    class Recording(callbacks.Callback):  # type: ignore[misc]  # of either package
        """Records a fit."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            recorder.begin()

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            recorder.start(batch)

        def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
            recorder.stop()

        def on_exception(
            self, trainer: Any, pl_module: Any, exception: BaseException
        ) -> None:
            recorder.failed(exception)
            recorder.close()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            recorder.close()

    return Recording()


def transformers_callback(recorder: Recorder) -> Any:
    """Return a callback that sees the batches as the model does: a Trainer's callbacks get none.

    An out-of-memory error ends the Trainer without a call: `with recorder:` around `trainer.train()` records it.
    """
    import torch

    base: Any = import_module("transformers").TrainerCallback

    def on_forward(module: Any, arguments: Any, named: Any) -> None:
        if torch.is_grad_enabled():  # not in an evaluation
            recorder.start([arguments, named])

    class Recording(base):  # type: ignore[misc]  # an optional package
        """Records a training."""

        def on_train_begin(self, *arguments: Any, model: Any, **named: Any) -> None:
            self.hook = model.register_forward_pre_hook(on_forward, with_kwargs=True)

        def on_epoch_begin(self, *arguments: Any, **named: Any) -> None:
            recorder.begin()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            recorder.stop()

        def on_train_end(self, *arguments: Any, **named: Any) -> None:
            self.hook.remove()
            recorder.close()

    return Recording()


def follow_brain(recorder: Recorder, brain: Any) -> None:
    """Record the batches of `Brain.fit_batch`."""
    own_start = brain.on_fit_batch_start
    own_end = brain.on_fit_batch_end

    def on_fit_batch_start(batch: Any, should_step: bool) -> None:
        recorder.start(batch)
        own_start(batch, should_step)

    def on_fit_batch_end(
        batch: Any, outputs: Any, loss: Any, should_step: bool
    ) -> None:
        own_end(batch, outputs, loss, should_step)
        recorder.stop()

    brain.on_fit_batch_start = on_fit_batch_start
    brain.on_fit_batch_end = on_fit_batch_end
