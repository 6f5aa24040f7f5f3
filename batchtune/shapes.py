"""The shape of a batch: all that its memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a padded batch.

    Attributes:
        batch_size: Number of examples, at least 1.
        length: Length of the longest example, in the manifest's unit; all examples are padded to it.
        target_length: Length of the longest target (such as the tokens of a transcript); None without targets.
    """

    batch_size: int
    length: float
    target_length: float | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self.length > 0:
            raise ValueError(f"length must be positive, got {self.length}")

    @property
    def padded_length(self) -> float:
        """Batch size × length of the longest example."""
        return self.batch_size * self.length

    def contains(self, other: BatchShape) -> bool:
        """Return whether it is at least as large in every respect, and larger in one."""
        no_less = (
            self.batch_size >= other.batch_size
            and self.length >= other.length
            and (self.target_length or 0.0) >= (other.target_length or 0.0)
        )
        return no_less and self != other

    def __str__(self) -> str:
        return f"{self.batch_size} × {self.length:g}"
