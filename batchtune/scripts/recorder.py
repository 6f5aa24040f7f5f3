"""`batchtune.Recorder`: records a training from within its own script, to `training.jsonl` in the run folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from batchtune.results import TRAINING_FILE, RecordedBatch
from batchtune.scripts.training_log import TrainingLog, sizes_of


class Recorder:
    """Records each optimizer step: its batches' sizes, time and peak memory, or that it ran out of memory.

    As a context manager around a loop of your own:

        with batchtune.Recorder("batchtune-run") as recorder:
            for batch in recorder.watch(loader):
                ...

    or `recorder.lightning_callback()`, `recorder.transformers_callback()`, `recorder.follow(brain)` for SpeechBrain;
    anything else can call `start(batch)` and `stop()` around each batch. Nothing waits for a GPU. torch's own peak
    statistics are reset after each step.

    Args:
        run: The run folder.
        per_unit: How many positions of a tensor's axis make one unit of the manifest's lengths, such as 16000 for
            samples and seconds; by default what the run folder's probe found in the training script, or 1.
        target_per_unit: The same for targets.
        axis: The axis of the length in the batch's tensors; those with fewer axes count with their last.
    """

    def __init__(
        self,
        run: str | Path = "batchtune-run",
        *,
        per_unit: float | None = None,
        target_per_unit: float | None = None,
        axis: int = 1,
    ) -> None:
        self._path = Path(run) / TRAINING_FILE
        self._per_unit = per_unit
        self._target_per_unit = target_per_unit
        self._axis = axis
        self._log: TrainingLog | None = None
        self._batches: list[RecordedBatch] = []  # since the last step

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's batches, which the loop trains on one by one. Raises ResultError as `begin` does."""
        self.begin()
        for batch in loader:
            self.start(batch)
            yield batch
            self.stop()

    def begin(self) -> None:
        """Begin an epoch: what came before belongs to no step. Raises ResultError if the file can't be written."""
        if self._log is None:
            self._log = TrainingLog(self._path, self._per_unit, self._target_per_unit)
        self._end_epoch(self._log)
        self._log.restart()

    def _end_epoch(self, log: TrainingLog) -> None:
        """Write the step that was made after the last batch was done; its time is not known."""
        if log.has_stepped and self._batches:
            log.add(self._batches, None)
        self._batches = []

    def start(self, batch: Any) -> None:
        """Note that the training goes on with a batch: the tensors in it and their containers are looked at."""
        if self._log is None:
            self.begin()
        sizes = sizes_of(batch, self._axis)
        if sizes is not None:
            self._batches.append(sizes)

    def stop(self) -> None:
        """Note that the batch is done, and with it a step if an optimizer has stepped."""
        lap = None if self._log is None else self._log.end_step()
        if self._log is not None and lap is not None:
            self._log.add(self._batches, lap)
            self._batches = []

    def failed(self, error: BaseException) -> None:
        """Record that the batch failed, if the error says that memory ran out."""
        if self._log is not None:
            self._log.add_oom(self._batches, error)
            self._batches = []

    def close(self) -> None:
        """End the recording."""
        if self._log is not None:
            self._end_epoch(self._log)
            self._log.close()
            self._log = None

    def lightning_callback(self) -> Any:
        """Return a callback for the Trainer of Lightning, which may be imported as `pytorch_lightning`."""
        from batchtune.scripts.callbacks import lightning_callback

        return lightning_callback(self)

    def transformers_callback(self) -> Any:
        """Return a callback for the Trainer of Transformers."""
        from batchtune.scripts.callbacks import transformers_callback

        return transformers_callback(self)

    def follow(self, brain: Any) -> None:
        """Record what a SpeechBrain `Brain` trains on, around its `on_fit_batch_start` and `on_fit_batch_end`."""
        from batchtune.scripts.callbacks import follow_brain

        follow_brain(self, brain)
