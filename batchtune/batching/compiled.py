"""The loops over streams that are too slow in Python, compiled by Numba.

All of them are in this one file: Numba caches compiled code next to it (`__pycache__`, or else the user's cache folder)
until this file changes. Import it only where needed: importing Numba takes about 0.3 s, and the first call on a machine
compiles for about 3 s. Random numbers are drawn from Python's Mersenne Twister as `random.Random` draws them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from batchtune.errors import BatchtuneError
from batchtune.lengths import FloatArray, IntArray

try:
    import numba
except ImportError as error:
    raise BatchtuneError(
        f"Streams need the package numba, which can't be imported: {error}",
        "Install it: pip install --upgrade numba.",
    ) from error

F = TypeVar("F", bound=Callable[..., Any])
Slots = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Found = tuple[IntArray, IntArray, IntArray]

# Padding ratios that no batch has: the example can't join; or all lengths are 0, and Python would divide by 0.
_REFUSED, _UNDEFINED = 2.0, 3.0
_ROUNDING = 2.0**-53


def _called(function: F) -> F:
    """Compile a function that Python calls, and cache the code if possible.

    Numba unpickles what it finds in its cache. A .numba_config.yaml in the working folder may say where that is, and
    the folder may be anybody's: only the environment counts.
    """
    configured = vars(numba.config)
    before: dict[str, Any] = {
        name: configured[name] for name in ("CACHE_DIR", "CACHE_LOCATOR_CLASSES") if name in configured
    }
    configured.update({name: os.environ.get(f"NUMBA_{name}", "") for name in before})
    try:
        return cast(F, numba.njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return cast(F, numba.njit(function))
    finally:
        configured.update(before)


def _part(function: F) -> F:
    """Compile a function that only others here call, without a wrapper for Python, in a fifth of the time."""
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(**options)(function))


def words_of(generator: random.Random) -> Words:
    """Return the state of Python's Mersenne Twister, shape (625,): its words, then the place of the next."""
    return np.array(generator.getstate()[1], dtype=np.uint32)


def advance(generator: random.Random, words: Words) -> None:
    """Put a generator into the state of these words, which were drawn from."""
    version, _, next_gauss = generator.getstate()
    generator.setstate((version, tuple(words.tolist()), next_gauss))


@_part
def _word(words: Words) -> Any:
    """Draw 32 bits."""
    place = words[624]
    if place >= 624:
        for k in range(624):
            both = (words[k] & np.uint32(0x80000000)) | (words[(k + 1) % 624] & np.uint32(0x7FFFFFFF))
            twisted = words[(k + 397) % 624] ^ (both >> np.uint32(1))
            if both & np.uint32(1):
                twisted ^= np.uint32(0x9908B0DF)
            words[k] = twisted
        place = np.uint32(0)
    drawn = words[place]
    words[624] = place + np.uint32(1)
    drawn ^= drawn >> np.uint32(11)
    drawn ^= (drawn << np.uint32(7)) & np.uint32(0x9D2C5680)
    drawn ^= (drawn << np.uint32(15)) & np.uint32(0xEFC60000)
    return drawn ^ (drawn >> np.uint32(18))


@_part
def _below(words: Words, number: int) -> int:
    """Draw a whole number as `Random.randint(0, number - 1)` does; number is below 2**31."""
    bits = 0
    while (number >> bits) > 0:
        bits += 1
    while True:
        drawn = np.int64(_word(words) >> np.uint32(32 - bits))
        if drawn < number:
            return int(drawn)


@_called
def shuffled(stream: IntArray, words: Words, buffer_size: int, initial: int) -> IntArray:
    """Return the stream in the order in which WebDataset's `filters.shuffle` passes it on."""
    result, held = np.empty_like(stream), np.empty(buffer_size + 1, np.int64)
    read = count = out = 0
    while read < stream.size or count > 0:
        if read < stream.size:
            held[count] = stream[read]
            count += 1
            read += 1
            if count < buffer_size and read < stream.size:
                held[count] = stream[read]
                count += 1
                read += 1
            if count < initial:
                continue
        place = _below(words, count)
        result[out] = held[place]
        out += 1
        count -= 1
        held[place] = held[count]
    return result


class Rules(NamedTuple):
    """How far a batch grows around its pivot."""

    target: float  # no further once its padded length is as large
    size: int  # the most examples
    numel: float  # the largest padded length
    ratio: float  # the most of it that may be padding
    exact: bool  # whether any sum of the lengths is exact
    compensated: bool  # whether Python's `sum` compensates rounding, as it does from 3.12 on


class Buffer(NamedTuple):
    """The examples that are held, each in a slot, and the order of the slots.

    The order is kept in blocks of 2 ** bits slots, all full but the last, each of them a ring: when an example enters
    or leaves, only part of one block moves, and one slot of each block between.
    """

    order: Slots  # shape (blocks × 2 ** bits,): slots by length, ascending; of equal lengths the earlier first
    heads: Slots  # shape (blocks,): where in its block the first slot is
    bits: int
    lengths: FloatArray  # of the example in each slot
    places: IntArray  # in the stream, of the example in each slot


def buffer_of(stream: FloatArray, room: int) -> Buffer:
    """Return a buffer that holds the first examples of a stream."""
    bits = max(10, (room.bit_length() + 3) // 2)
    order = np.zeros(-(-room >> bits) << bits, np.int32)
    order[:room] = np.argsort(stream[:room], kind="stable")
    return Buffer(order, np.zeros(order.size >> bits, np.int32), bits, stream[:room].copy(), np.arange(room))


@_part
def _index(buffer: Buffer, place: int) -> int:
    """Return where in `order` the slot of a place is."""
    block, mask = place >> buffer.bits, (1 << buffer.bits) - 1
    return int((block << buffer.bits) + ((buffer.heads[block] + place) & mask))


@_part
def _length(buffer: Buffer, place: int) -> float:
    """Return the length of the example in a place."""
    return float(buffer.lengths[buffer.order[_index(buffer, place)]])


@_part
def _move(buffer: Buffer, leaves: int, enters: int) -> None:
    """Move a slot to another place; those between move up or down by one."""
    order, heads, bits, _, _ = buffer
    mask = (1 << bits) - 1
    carried = order[_index(buffer, leaves)]
    block, last = enters >> bits, leaves >> bits
    while block < last:  # turn the ring up, and the part below back down
        heads[block] = (heads[block] - 1) & mask
        pushed = order[_index(buffer, block << bits)]
        _down(buffer, block << bits, enters)
        order[_index(buffer, enters)] = carried
        carried = pushed
        block += 1
        enters = block << bits
    while block > last:  # turn the ring down, and the part above back up
        pushed = order[_index(buffer, block << bits)]
        heads[block] = (heads[block] + 1) & mask
        _up(buffer, enters, (block << bits) + mask)
        order[_index(buffer, enters)] = carried
        carried = pushed
        block -= 1
        enters = (block << bits) + mask
    if enters < leaves:
        _up(buffer, enters, leaves)
    else:
        _down(buffer, leaves, enters)
    order[_index(buffer, enters)] = carried


@_part
def _up(buffer: Buffer, first: int, last: int) -> None:
    """Move slots of one block, from `first` on, up by one, over `last`."""
    order, (base, start, end), size = buffer.order, _stretch(buffer, first, last), 1 << buffer.bits
    if end >= size:
        _shift_up(order[base : base + end - size + 1])
        order[base] = order[base + size - 1]
        end = size - 1
    _shift_up(order[base + start : base + end + 1])


@_part
def _down(buffer: Buffer, first: int, last: int) -> None:
    """Move slots of one block, up to `last`, down by one, over `first`."""
    order, (base, start, end), size = buffer.order, _stretch(buffer, first, last), 1 << buffer.bits
    if end >= size:
        _shift_down(order[base + start : base + size])
        order[base + size - 1] = order[base]
        start, end = 0, end - size
    _shift_down(order[base + start : base + end + 1])


@_part
def _stretch(buffer: Buffer, first: int, last: int) -> tuple[int, int, int]:
    """Return where a block begins in `order`, and where in it two places are; the second may be past its end."""
    block, size = first >> buffer.bits, 1 << buffer.bits
    start = (buffer.heads[block] + first) & (size - 1)
    return block << buffer.bits, start, start + last - first


# Compiled, these two are one `memmove` each.


@_part
def _shift_up(slots: Slots) -> None:
    for i in range(slots.size - 1, 0, -1):
        slots[i] = slots[i - 1]


@_part
def _shift_down(slots: Slots) -> None:
    for i in range(slots.size - 1):
        slots[i] = slots[i + 1]


@_part
def _added(first: float, taken: FloatArray, number: int, compensated: bool) -> float:
    """Return `sum([first, *taken[:number]])` as Python rounds it."""
    total, lost = first, 0.0
    for j in range(number):
        more = taken[j]
        rounded = total + more
        if compensated:
            lost += (total - rounded) + more if abs(total) >= abs(more) else (more - rounded) + total
        total = rounded
    return total + lost


@_part
def _ratio(total: float, number: int, longest: float, numel: float) -> float:
    """Return how much of `number` examples with this total length would be padding."""
    padded = number * longest
    if padded > numel:
        return _REFUSED
    return _UNDEFINED if padded == 0 else 1.0 - total / padded


@_part
def _window(buffer: Buffer, count: int, pivot: int, rules: Rules, taken: FloatArray) -> tuple[int, int]:
    """Return the first and last place in `order` of a batch; the last is -1 if SpeechBrain divides by zero."""
    low = high = pivot
    longest = total = taken[0] = _length(buffer, pivot)
    number = 1
    while number < rules.size and number * longest < rules.target:
        shorter = longer = 0.0
        left = right = _REFUSED
        if low > 0:
            shorter = _length(buffer, low - 1)
            left = _ratio(total + shorter, number + 1, longest, rules.numel)
        if high + 1 < count:
            longer = _length(buffer, high + 1)
            right = _ratio(total + longer, number + 1, longer, rules.numel)
        if left == _UNDEFINED or right == _UNDEFINED:
            return low, -1
        if not rules.exact:
            # Python adds up in another order: if its rounding may decide, add up likewise.
            margin = (2 * number + 8) * _ROUNDING
            close = abs(left - rules.ratio) <= margin or abs(right - rules.ratio) <= margin
            if close or abs(left - right) <= 2 * margin:
                if left != _REFUSED:
                    left = _ratio(_added(shorter, taken, number, rules.compensated), number + 1, longest, np.inf)
                if right != _REFUSED:
                    right = _ratio(_added(longer, taken, number, rules.compensated), number + 1, longer, np.inf)
        if left > rules.ratio:
            left = _REFUSED
        if right > rules.ratio:
            right = _REFUSED
        if left == _REFUSED and right == _REFUSED:
            break
        if left <= right:
            low -= 1
            taken[number] = shorter
            total += shorter
        else:
            high += 1
            taken[number] = longest = longer
            total += longer
        number += 1
    return low, high


@_part
def _after(buffer: Buffer, first: int, last: int, length: float) -> int:
    """Return the first place, from `first` to `last`, of an example of more than this length; `last` if none has."""
    if first >= last:
        return first
    order, heads, bits, lengths, _ = buffer
    block, end = first >> bits, (last - 1) >> bits
    while block < end:
        middle = (block + end + 1) >> 1
        if length < _length(buffer, middle << bits):
            end = middle - 1
        else:
            block = middle
    base, head, mask = block << bits, heads[block], (1 << bits) - 1
    first, last = max(first, base), min(last, base + mask + 1)
    while first < last:
        middle = (first + last) >> 1
        if length < lengths[order[base + ((head + middle) & mask)]]:
            last = middle
        else:
            first = middle + 1
    return first


@_called
def pivot_batches(stream: FloatArray, words: Words, buffer: Buffer, rules: Rules, last: int, found: Found) -> int:
    """Write the batches of a stream into the arrays of `StreamBatches`, and return how many there are.

    The buffer holds the first of the stream, and the batches end when fewer than `last` are left in it. If SpeechBrain
    would divide by zero in batch n, counted from 1, return -n.
    """
    examples, ends, read = found
    order, _, _, lengths, places = buffer
    taken = np.empty(lengths.size, np.float64)
    count = at = lengths.size
    batches = out = 0
    while count >= last:
        low, high = _window(buffer, count, _below(words, count), rules, taken)
        if high < 0:
            return -batches - 1
        for place in range(high, low - 1, -1):
            examples[out] = places[order[_index(buffer, place)]]
            out += 1
        ends[batches] = out
        read[batches] = at
        batches += 1
        # Each example that is read takes the slot of one that left, at the edge of the gap that is nearer to its place.
        while low <= high and at < stream.size:
            length = stream[at]
            if low > 0 and length < _length(buffer, low - 1):
                leaves, enters = low, _after(buffer, 0, low - 1, length)
                low += 1
            else:
                leaves, enters = high, _after(buffer, high + 1, count, length) - 1
                high -= 1
            _move(buffer, leaves, enters)
            slot = order[_index(buffer, enters)]
            lengths[slot], places[slot] = length, at
            at += 1
        while low <= high:
            _move(buffer, high, count - 1)
            high -= 1
            count -= 1
    return batches
