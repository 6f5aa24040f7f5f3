"""The shape of an array file: NumPy's .npy, or one tensor of torch.save, whose pickle is read but never unpickled.

Since torch 1.6 the latter is a zip archive. Its pickle (`data.pkl`) calls `torch._utils._rebuild_tensor_v2` with the
tensor's storage, offset, size and stride; the storage is a file of its own, `data/KEY`. `torch.serialization` and
`torch/_utils.py` are the only documentation of it.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import tokenize
import warnings
import zipfile
import zlib

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
    """Return the shape of an array, by the file's header; the suffix, in lower case, only helps to explain a fault."""
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


# A tensor's pickle by `_tokens`: the calls, the storage, offset, shape and strides.
_HOOKS = r"(?:newtrue|newfalse) 'collections OrderedDict' tuple reduce (?:'torch \w+' )?tuple reduce "
_TENSOR = re.compile(
    r"(?:'torch\._utils _rebuild_parameter' )?'torch\._utils _rebuild_tensor_v[23]' "
    r"'storage' '(?:torch )?(?P<storage>[^']*)' '(?P<key>[^']*)' '[^']*' (?P<count>\d+) tuple binpersid "
    rf"(?P<offset>\d+) (?P<shape>(?:\d+ )*)tuple (?P<strides>(?:\d+ )*)tuple {_HOOKS}(?:{_HOOKS})?stop"
)
_OUTERMOST = {"EMPTY_DICT": "a dict", "EMPTY_LIST": "a list", "MARK": "a tuple"}


def _torch_shape(payload: Payload) -> tuple[int, ...]:
    """Return the shape of the one tensor in an archive of torch.save."""
    stream = PayloadStream(payload, _MOST_BYTES)
    try:
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(names) != 1:
                raise Unreadable("a zip archive, but not of torch.save")
            with archive.open(names[0]) as member:
                tensor = _tensor(_tokens(member.read(_LARGEST_PICKLE)))
            shape, strides = (tuple(map(int, tensor[name].split())) for name in ("shape", "strides"))
            last = int(tensor["offset"]) + sum((one - 1) * step for one, step in zip(shape, strides, strict=True))
            count = max(0 if 0 in shape else last + 1, int(tensor["count"]))
            storage = f"{names[0].removesuffix('.pkl')}/{tensor['key']}"
            if storage not in archive.namelist():
                raise Unreadable("truncated .pth", "a tensor without its numbers")
            size, needed = archive.getinfo(storage).file_size, count * _ITEM_SIZES.get(tensor["storage"], 1)
            if size < needed:
                raise Unreadable("truncated .pth", f"{size:,} of {needed:,} bytes of the tensor")
    except _ZIP_ERRORS:
        stream.check()
        raise Unreadable("a damaged .pth") from None
    return shape


def _tokens(data: bytes) -> str:
    """Return what a pickle pushes and calls as one line, without its marks and memos; nothing is unpickled."""
    tokens: list[str] = []
    memo: dict[object, str] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if not tokens and name in _OUTERMOST:
            raise _other(_OUTERMOST[name])
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = tokens[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            tokens.append(memo[argument] if memo[argument].startswith("'") else name.lower())
        elif name == "STACK_GLOBAL":
            tokens[-2:] = ["'{} {}'".format(*(token.strip("'") for token in tokens[-2:]))]
        elif isinstance(argument, (str, int)) and name not in ("PROTO", "FRAME"):
            tokens.append(repr(argument))
        elif name not in ("PROTO", "FRAME", "MARK"):
            tokens.append("tuple" if "TUPLE" in name else name.lower())
    return " ".join(tokens)


def _tensor(tokens: str) -> re.Match[str]:
    if found := _TENSOR.fullmatch(tokens):
        return found
    if tokens.endswith("tuple stop"):
        raise _other("a tuple")
    called = re.match(r"'(\S* \S*?)'(?: |$)", tokens)
    if called is None:
        raise _other()
    if called[1].startswith(("torch._utils _rebuild_tensor_v", "torch._utils _rebuild_parameter")):
        raise Unreadable("a damaged .pth")
    raise _other("a dict") if called[1] == "collections OrderedDict" else _other(calls=called[1])


def _other(what: str = "something else", calls: str | None = None) -> Unreadable:
    return Unreadable(f"holds {what}, not a tensor", f"a pickle that calls {calls[:80]!r}" if calls else "")
