"""One tensor as torch.save writes it since torch 1.6: a zip archive with a pickle that is read, never unpickled.

The pickle (`data.pkl`) of a tensor calls `torch._utils._rebuild_tensor_v2` with its storage, offset, size, stride;
the storage stands in a file of its own, `data/KEY`. `torch.serialization` and `torch/_utils.py` are the only
documentation of it.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from dataclasses import dataclass, field

from batchtune.manifests.headers.payload import HeaderError, Payload
from batchtune.manifests.headers.stream import PayloadStream

# That of a tensor has some hundred bytes, and so have the directory and the rest of such an archive.
_LARGEST_PICKLE = 64 * 1024
_MOST_BYTES = 1024 * 1024

_ITEM_SIZES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, KeyError, IndexError, OverflowError, TypeError),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Global:
    """A class or function that a pickle names; here nothing but its name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A tensor's numbers: which file of the archive, how many, how many bytes each has."""

    key: str
    count: int
    item_size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor, but for its numbers: where they stand, and how many bytes that makes at least."""

    shape: tuple[int, ...]
    key: str
    num_bytes: int


class _Hooks:
    """An empty OrderedDict, the hooks of a tensor."""


class _Mark:
    """Where the items of a tuple begin."""


def torch_shape(payload: Payload) -> tuple[int, ...]:
    """The shape of the one tensor in a file of torch.save.

    Raises:
        HeaderError: It holds something else, or is damaged.
    """
    stream = PayloadStream(payload, _MOST_BYTES)
    try:
        with zipfile.ZipFile(stream) as archive:
            prefix, data = _pickle(archive)
            tensor = _read_tensor(data)
            _check_storage(archive, prefix, tensor)
    except _ZIP_ERRORS:
        stream.check()
        raise HeaderError("a damaged .pth") from None
    return tensor.shape


def _pickle(archive: zipfile.ZipFile) -> tuple[str, bytes]:
    """The archive's top folder and the pickle in it."""
    found = [
        info for info in archive.infolist() if info.filename.count("/") == 1 and info.filename.endswith("/data.pkl")
    ]
    if len(found) != 1:
        raise HeaderError("a zip archive, but not of torch.save")
    with archive.open(found[0]) as member:
        return found[0].filename.removesuffix("/data.pkl"), member.read(_LARGEST_PICKLE)


def _check_storage(archive: zipfile.ZipFile, prefix: str, tensor: _Tensor) -> None:
    try:
        size = archive.getinfo(f"{prefix}/data/{tensor.key}").file_size
    except KeyError:
        raise HeaderError("truncated .pth", "a tensor without its numbers") from None
    if size < tensor.num_bytes:
        raise HeaderError("truncated .pth", f"{size:,} of {tensor.num_bytes:,} bytes of the tensor")


def _read_tensor(data: bytes) -> _Tensor:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        machine.step(opcode.name, argument)
    result = machine.stack.pop() if len(machine.stack) == 1 else None
    if not isinstance(result, _Tensor):
        raise _other("something else")
    return result


def _other(what: str, detail: str = "") -> HeaderError:
    return HeaderError(f"holds {what}, not a tensor", detail)


@dataclass(slots=True)
class _Machine:
    """Follows a pickle as far as a tensor needs: names stay names, and what is called is only looked at.

    The memo can make tuples of tuples that share their items: nothing here compares, hashes or prints a tuple
    whole, which would take exponential time.
    """

    stack: list[object] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def step(self, name: str, argument: object) -> None:
        """One operation. Raises HeaderError for any that a tensor does not need."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "EMPTY_DICT" | "EMPTY_LIST" if not stack:
                raise _other("a dict" if name == "EMPTY_DICT" else "a list")
            case "MARK":
                if not stack:
                    raise _other("a tuple")
                stack.append(_Mark())
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "NONE":
                stack.append(None)
            case "BINPUT" | "LONG_BINPUT":
                assert isinstance(argument, int)
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                assert isinstance(argument, int)
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(_Global(str(argument)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_Global(f"{module} {attribute}" if type(module) is type(attribute) is str else ""))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._take_tuple(len(stack) - int(name[-1]))
            case "TUPLE":
                marks = (at for at in reversed(range(len(stack))) if isinstance(stack[at], _Mark))
                mark = next(marks, -1)
                self._take_tuple(mark + 1)
                del stack[mark]
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(_called(called, arguments))
                if len(stack) == 1 and isinstance(stack[0], _Hooks):
                    raise _other("a dict")
            case _:
                raise _other("something else", f"a pickle with the operation {name}")

    def _take_tuple(self, start: int) -> None:
        if start < 0:
            raise HeaderError("a damaged .pth")
        if start == 0:
            raise _other("a tuple")
        items = tuple(self.stack[start:])
        del self.stack[start:]
        self.stack.append(items)


def _called(called: object, arguments: object) -> object:
    """What a call gives, of the three that a tensor's pickle makes."""
    if not isinstance(called, _Global) or type(arguments) is not tuple:
        raise HeaderError("a damaged .pth")
    match called.name, len(arguments):
        case ("collections OrderedDict", 0):
            return _Hooks()
        case ("torch._utils _rebuild_parameter", 3) if isinstance(arguments[0], _Tensor):
            return arguments[0]
        case ("torch._utils _rebuild_tensor_v2" | "torch._utils _rebuild_tensor_v3", _) if len(arguments) >= 4:
            return _tensor(*arguments[:4])
    raise _other("something else", f"a pickle that calls {called.name[:80]!r}")


def _tensor(storage: object, offset: object, shape: object, strides: object) -> _Tensor:
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(strides) is not tuple:
        raise HeaderError("a damaged .pth")
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)):
        raise HeaderError("a damaged .pth", "a tensor without a shape")
    assert isinstance(offset, int)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    needed = 0 if 0 in shape else last + 1
    return _Tensor(shape, storage.key, max(needed, storage.count) * storage.item_size)


def _storage(reference: object) -> _Storage:
    """The storage of `("storage", class, key, device, number of items)`."""
    if type(reference) is not tuple or len(reference) != 5:
        raise HeaderError("a damaged .pth")
    _, kind, key, _, count = reference
    if not isinstance(kind, _Global) or type(key) is not str or type(count) is not int or count < 0:
        raise HeaderError("a damaged .pth")
    return _Storage(key, count, _ITEM_SIZES.get(kind.name.removeprefix("torch "), 1))
