"""The one interface between batchtune and what a user trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from batchtune.shapes import BatchShape

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Workload(Protocol):
    """A training step that can be run at any batch shape.

    The worker process calls `setup` once, then `make_batch` and `step` for one shape after another, larger
    and smaller ones in any order. Between two steps nothing may stay in memory but parameters, gradients and
    the optimizer's state: a loss or an output that is kept keeps its whole graph, and the next shape is then
    measured too large. What a step raises when memory runs out must reach the caller unchanged.
    """

    def setup(self, device: torch.device) -> None:
        """Build the model and its optimizer on the device, once.

        Args:
            device: Where the training runs. Its memory limit is already in force.
        """

    def make_batch(self, shape: BatchShape) -> Any:
        """Make a padded batch of exactly this shape, on the device.

        The values don't matter, the sizes and types do: every example as long as the longest, which is the
        worst that a batch of this shape can be.

        Args:
            shape: `batch_size` examples; `length` and `target_length` are in the manifest's unit (seconds,
                tokens, ...), and turning them into samples or frames is the workload's. `target_length` is
                None where the manifest has no second length.

        Returns:
            Whatever `step` takes.
        """

    def step(self, batch: Any) -> None:
        """Run one full training step: forward, loss, backward, optimizer step.

        Args:
            batch: What `make_batch` returned. The same batch may be passed more than once.
        """
