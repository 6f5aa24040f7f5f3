"""The shape of an array file: NumPy's .npy, or one tensor of torch.save, whose pickle is read but never unpickled.

Since torch 1.6 the latter is a zip archive. Its pickle (`data.pkl`) calls `torch._utils._rebuild_tensor_v2` with the
tensor's storage, offset, size and stride; the storage is a file of its own, `data/KEY`. `torch.serialization` and
`torch/_utils.py` are the only documentation of it.
"""

from __future__ import annotations

import io
import math
import pickletools
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from numpy.lib import format as npy

from batchtune.manifests.headers import Payload, PayloadStream
from batchtune.manifests.values import Unreadable

# Lower case, without the dot.
ARRAY_SUFFIXES = frozenset(("npy", "pth", "pt"))

# NumPy's own limit: Python's parser is safe up to there, as `ast.literal_eval` warns that it is not for any text.
_LONGEST_NPY_HEADER = 10_000
# A tensor's pickle has some hundred bytes, and so have the directory and the rest of such an archive.
_LARGEST_PICKLE = 64 * 1024
_MOST_BYTES = 1024 * 1024

_ITEM_SIZES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_NPY_ERRORS = (
    *(ValueError, TypeError, SyntaxError, KeyError, MemoryError, RecursionError, OverflowError),
    tokenize.TokenError,
)
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, KeyError, IndexError, OverflowError, TypeError),
)


def array_shape(payload: Payload, suffix: str) -> tuple[int, ...]:
    """Return the shape of an array, by the file's header; the suffix, in lower case, only helps to explain a fault.

    Raises:
        Unreadable: No array, damaged, truncated, or something else than one array.
    """
    head = payload.read(0, 8)
    if head.startswith(b"\x93NUMPY"):
        return _npy_shape(payload)
    if head.startswith(b"PK\x03\x04"):
        return _torch_shape(payload)
    if not head:
        raise Unreadable("an empty file")
    if suffix in ("pth", "pt") and head.startswith(b"\x80"):
        raise Unreadable("legacy .pth: save it again with torch.save")
    raise Unreadable("no array header", f"a file that begins with {head[:4]!r}")


def _npy_shape(payload: Payload) -> tuple[int, ...]:
    """Return the shape of an array by NumPy itself; of objects too, which are not unpickled."""
    prefix = payload.read(0, 12)
    if len(prefix) < 12 or prefix[6] not in (1, 2, 3):
        raise Unreadable("a damaged .npy header")
    start, width = (10, 2) if prefix[6] == 1 else (12, 4)
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    if length > _LONGEST_NPY_HEADER:
        raise Unreadable("a damaged .npy header", f"a header of {length:,} bytes")
    data = payload.read(8, width + length)
    if len(data) < width + length:
        raise Unreadable("truncated .npy")
    read = npy.read_array_header_1_0 if prefix[6] == 1 else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():  # of what Python would no longer write so
            warnings.simplefilter("ignore")
            shape, _, kind = read(io.BytesIO(data))
    except _NPY_ERRORS:
        raise Unreadable("a damaged .npy header") from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise Unreadable("a damaged .npy header", "a header without a shape")
    if not kind.hasobject:
        available, needed = payload.size - start - length, math.prod(shape) * kind.itemsize
        if needed > available:
            raise Unreadable("truncated .npy", f"{available:,} bytes of data, fewer than its header tells")
        if needed < available:
            raise Unreadable("a damaged .npy", f"{available:,} bytes of data where its header tells {needed:,}")
    return tuple(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Global:
    """The name of a class or function in a pickle."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor without its numbers: the file that holds them, and how many bytes that has at least."""

    shape: tuple[int, ...]
    key: str
    num_bytes: int


_MARK, _HOOKS = object(), object()  # where the items of a tuple begin; an empty OrderedDict, the hooks of a tensor
_OUTERMOST = {"EMPTY_DICT": "a dict", "EMPTY_LIST": "a list", "MARK": "a tuple"}
_CONSTANTS = frozenset("BINUNICODE SHORT_BINUNICODE BININT BININT1 BININT2 LONG1 NEWTRUE NEWFALSE NONE".split())


def _torch_shape(payload: Payload) -> tuple[int, ...]:
    """Return the shape of the one tensor in an archive of torch.save."""
    stream = PayloadStream(payload, _MOST_BYTES)
    try:
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(names) != 1:
                raise Unreadable("a zip archive, but not of torch.save")
            with archive.open(names[0]) as member:
                tensor = _read_tensor(member.read(_LARGEST_PICKLE))
            storage = f"{names[0].removesuffix('.pkl')}/{tensor.key}"
            if storage not in archive.namelist():
                raise Unreadable("truncated .pth", "a tensor without its numbers")
            size = archive.getinfo(storage).file_size
            if size < tensor.num_bytes:
                raise Unreadable("truncated .pth", f"{size:,} of {tensor.num_bytes:,} bytes of the tensor")
    except _ZIP_ERRORS:
        stream.check()
        raise Unreadable("a damaged .pth") from None
    return tensor.shape


def _other(what: str = "something else", detail: str = "") -> Unreadable:
    return Unreadable(f"holds {what}, not a tensor", detail)


def _read_tensor(data: bytes) -> _Tensor:
    """Follow a pickle as far as a tensor needs: names stay names, and what is called is only looked at.

    Its tuples may share their items: to compare, hash or print one whole would take exponential time.
    """
    stack: list[Any] = []
    memo: dict[object, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if not stack and name in _OUTERMOST:
            raise _other(_OUTERMOST[name])
        if name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Global(str(argument)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Global(f"{module} {attribute}" if type(module) is type(attribute) is str else ""))
        elif name == "TUPLE":
            mark = next(at for at in reversed(range(-1, len(stack))) if at < 0 or stack[at] is _MARK)
            if mark <= 0:
                raise Unreadable("a damaged .pth") if mark < 0 else _other("a tuple")
            stack[mark:] = [tuple(stack[mark + 1 :])]
        elif name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            start = len(stack) - (int(name[-1]) if name[-1].isdigit() else 0)
            if start <= 0 and name != "EMPTY_TUPLE":
                raise Unreadable("a damaged .pth") if start < 0 else _other("a tuple")
            stack[start:] = [tuple(stack[start:])]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_called(called, arguments))
            if stack == [_HOOKS]:
                raise _other("a dict")
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _other(detail=f"a pickle with the operation {name}")
    if len(stack) != 1 or not isinstance(stack[0], _Tensor):
        raise _other()
    return stack[0]


def _called(called: object, arguments: object) -> object:
    """Return the result of one of the three calls that a tensor's pickle makes."""
    match called, arguments:
        case _Global("collections OrderedDict"), ():
            return _HOOKS
        case _Global("torch._utils _rebuild_parameter"), (_Tensor() as tensor, _, _):
            return tensor
        case (
            _Global("torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor_v3"),
            (_Tensor() as storage, offset, tuple() as shape, tuple() as strides, *_),
        ):
            if not all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)):
                raise Unreadable("a damaged .pth", "a tensor without a shape")
            last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            (count,) = storage.shape
            item_size = storage.num_bytes // count if count else 1
            return _Tensor(shape, storage.key, max(0 if 0 in shape else last + 1, count) * item_size)
        case _Global(name), tuple() if not name.startswith("torch._utils _rebuild_tensor_v"):
            raise _other(detail=f"a pickle that calls {name[:80]!r}")
    raise Unreadable("a damaged .pth")


def _storage(reference: object) -> _Tensor:
    """Return the storage of `("storage", class, key, device, number of items)`, as a tensor of one dimension."""
    match reference:
        case (_, _Global(name), str() as key, _, int() as count) if count >= 0:
            return _Tensor((count,), key, count * _ITEM_SIZES.get(name.removeprefix("torch "), 1))
    raise Unreadable("a damaged .pth")
