"""The shape of an array file, whatever its format."""

from __future__ import annotations

from batchtune.manifests.headers.npy import npy_shape
from batchtune.manifests.headers.payload import HeaderError, Payload
from batchtune.manifests.headers.torch_zip import torch_shape

# Lower case, without the dot.
ARRAY_SUFFIXES = frozenset(("npy", "pth", "pt"))


def array_shape(payload: Payload, suffix: str) -> tuple[int, ...]:
    """The shape of an array, by the file's header: NumPy's .npy, or one tensor saved by torch.save.

    Args:
        payload: The file.
        suffix: Of its name, in lower case, without the dot. The content decides; this only where it has no magic.

    Raises:
        HeaderError: It can't be told: no array, damaged, truncated, or something else than one array.
    """
    try:
        head = payload.read(0, 8)
        if head.startswith(b"\x93NUMPY"):
            return npy_shape(payload)
        if head.startswith(b"PK\x03\x04"):
            return torch_shape(payload)
    except OSError as error:
        raise HeaderError("can't be read", error.strerror or str(error)) from None
    if not head:
        raise HeaderError("an empty file")
    if suffix in ("pth", "pt") and head.startswith(b"\x80"):
        raise HeaderError("legacy .pth: save it again with torch.save")
    raise HeaderError("no array header", f"a file that begins with {head[:4]!r}")
