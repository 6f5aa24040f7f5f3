"""NumPy's .npy, as documented in `numpy.lib.format`, versions 1.0 to 3.0."""

from __future__ import annotations

import ast
import math
import re
import warnings

from batchtune.manifests.headers.payload import HeaderError, Payload

# NumPy's own limit: Python's parser is safe up to there, as `ast.literal_eval` warns that it is not for any text.
_LONGEST_HEADER = 10_000
_NUMBERS = re.compile(r"[<>|=]?([biufcmMSVU])(\d{1,9})(?:\[\w{1,20}\])?")


def npy_shape(payload: Payload) -> tuple[int, ...]:
    """The shape of an array. Of objects too: they are not unpickled.

    Raises:
        HeaderError: No .npy file, damaged, or another size than its header says.
    """
    prefix = payload.read(0, 12)
    if len(prefix) < 12 or prefix[6] not in (1, 2, 3):
        raise HeaderError("a damaged .npy header")
    start, width = (10, 2) if prefix[6] == 1 else (12, 4)
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    if length > _LONGEST_HEADER:
        raise HeaderError("a damaged .npy header", f"a header of {length:,} bytes")
    header = payload.read(start, length)
    if len(header) < length:
        raise HeaderError("truncated .npy")
    shape, kind = _parsed(header.decode("utf-8" if prefix[6] == 3 else "latin-1", errors="replace"))
    _check_size(payload.size - start - length, shape, kind)
    return shape


def _parsed(header: str) -> tuple[tuple[int, ...], object]:
    """The shape and the type as the header describes it."""
    try:
        with warnings.catch_warnings():  # of what Python would no longer write so
            warnings.simplefilter("ignore")
            fields = ast.literal_eval(header.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise HeaderError("a damaged .npy header") from None
    shape = fields.get("shape") if isinstance(fields, dict) else None
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size for size in shape):
        raise HeaderError("a damaged .npy header", "a header without a shape")
    return shape, fields.get("descr")


def _check_size(available: int, shape: tuple[int, ...], kind: object) -> None:
    """Raises HeaderError where the data have another size than such an array; records and objects pass."""
    match = _NUMBERS.fullmatch(kind) if isinstance(kind, str) else None
    if match is None:
        return
    needed = math.prod(shape) * int(match[2]) * (4 if match[1] == "U" else 1)
    if needed > available:
        raise HeaderError("truncated .npy", f"{available:,} bytes of data, fewer than its header tells")
    if needed < available:
        raise HeaderError("a damaged .npy", f"{available:,} bytes of data where its header tells {needed:,}")
