"""A manifest → its lengths in the manifest's own order: those of a data set whose example i is row i."""

from __future__ import annotations

from dataclasses import dataclass

from batchtune.errors import UsageError
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.options import ReadOptions
from batchtune.manifests.reading import Manifest, read_in_order

_DEFAULTS = ReadOptions()


@dataclass(frozen=True, slots=True, eq=False)
class OrderedLengths:
    """Lengths by index of the example.

    Attributes:
        values: Shape (count,), positive and finite, in the order of the manifest.
        targets: Shape (count,), the target length of the same example, or None.
        unit: What `values` count, or None where nothing says it.
    """

    values: FloatArray
    targets: FloatArray | None
    unit: Unit | None


def load_ordered_lengths(manifest: Manifest, options: ReadOptions = _DEFAULTS) -> OrderedLengths:
    """Reads the lengths of a data set so that entry i is the length of example i.

    Args:
        manifest: As for `load_lengths`.
        options: What the user says about it; nothing that leaves examples out.

    Raises:
        ManifestError: It can't be read as asked; the message says what is wrong and where.
        UsageError: The options leave examples out, name no known format, or one column twice.
    """
    wanted = {
        "--skip-invalid": options.skip_invalid,
        "--min-length": options.min_length is not None,
        "--max-length": options.max_length is not None,
    }
    if leaving := [name for name, is_set in wanted.items() if is_set]:
        raise UsageError(
            f"{' and '.join(leaving)} would leave out examples that the data set still has: entry i of the lengths "
            "would no longer be that of example i",
            "Leave them out of the data set and its manifest instead.",
        )
    plan, found = read_in_order(manifest, options)
    return OrderedLengths(found.lengths, found.targets, plan.unit)
