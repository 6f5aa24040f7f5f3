"""Shapes of array files by their headers: .npy, and tensors saved by torch, which are never unpickled."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy_format

from batchtune.manifests.headers import Payload
from batchtune.manifests.headers.arrays import ARRAY_SUFFIXES, array_shape
from batchtune.manifests.values import Unreadable

SHAPES = [(), (0,), (3,), (2, 3), (0, 5), (1, 2, 3, 4)]


def shape(data: bytes, suffix: str = "pt") -> tuple[int, ...]:
    return array_shape(Payload(len(data), lambda offset, size: data[offset : offset + size]), suffix)


def refused(data: bytes, suffix: str = "pt") -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        shape(data, suffix)
    return caught.value


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    npy_format.write_array(stream, array, version=version)
    return stream.getvalue()


def npy_of(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1")


def saved(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def archive(pickled: bytes, storage: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", storage)
    return stream.getvalue()


# .npy


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_npy_file_has_the_shape_of_its_array(version: tuple[int, int]) -> None:
    for size in SHAPES:
        assert shape(npy(np.zeros(size, dtype=np.float32), version), "npy") == size


def test_an_npy_file_may_hold_anything() -> None:
    for array in [
        np.zeros((2, 3), dtype=">i2"),
        np.zeros((2, 3), dtype=bool),
        np.zeros((2, 3), dtype=np.complex128),
        np.zeros((2, 3), dtype="U5"),
        np.zeros((2, 3), dtype="S7"),
        np.zeros((2, 3), dtype="M8[ns]"),
        np.asfortranarray(np.zeros((2, 3))),
        np.zeros((2, 3), dtype=[("a", "f4"), ("b", "U3", (2,))]),
        np.full((2, 3), None),
    ]:
        assert shape(npy(array), "npy") == (2, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy(np.zeros(100))[:-1], "truncated .npy"),
        (npy(np.zeros(100))[:100], "truncated .npy"),
        (npy(np.zeros(100)) + b"\0", "a damaged .npy"),
        (b"\x93NUMPY\x04" + bytes(100), "a damaged .npy header"),
        (npy_of("{'shape': (-1,)}"), "a damaged .npy header"),
        (npy_of("{'shape': (True,)}"), "a damaged .npy header"),
        (npy_of("{'shape': [1]}"), "a damaged .npy header"),
        (npy_of("{'shape': (1.5,)}"), "a damaged .npy header"),
        (npy_of("{'descr': '<f4'}"), "a damaged .npy header"),
        (npy_of("(1, 2)"), "a damaged .npy header"),
        (npy_of("{'shape': __import__('os').getcwd()}"), "a damaged .npy header"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "a damaged .npy header"),
        (b"", "an empty file"),
        (b"no array", "no array header"),
    ],
)
def test_a_damaged_npy_file_says_so(data: bytes, reason: str) -> None:
    assert refused(data, "npy").reason == reason


def test_a_header_made_to_hurt_the_parser_is_a_damaged_one() -> None:
    for header in [
        "-" * 9999 + "1",
        "(" * 9999,
        "[" * 4000 + "]" * 4000,
        "{'shape': (" + "9" * 9000 + ",)}",
        "1+" * 4900 + "1",
    ]:
        assert refused(npy_of(header), "npy").reason == "a damaged .npy header"


def test_a_header_that_python_warns_of_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    refused(npy_of("{'shape': (0,), 'fortran_order': False, 'descr': '\\d'}"), "npy")
    assert capfd.readouterr() == ("", "")


# torch


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_saved_tensor_has_its_shape(protocol: int) -> None:
    for size in SHAPES:
        assert shape(saved(torch.zeros(size), pickle_protocol=protocol)) == size


def test_a_saved_tensor_may_have_any_type() -> None:
    for kind in (
        *(torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32),
        *(torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn),
    ):
        assert shape(saved(torch.zeros(4, 5).to(kind))) == (4, 5), kind


def test_a_view_or_a_parameter_has_its_own_shape() -> None:
    for tensor, size in [
        (torch.zeros(4, 5).t(), (5, 4)),
        (torch.zeros(4, 6)[1:3, ::2], (2, 3)),
        (torch.zeros(1).expand(7, 8), (7, 8)),
        (torch.zeros(3, 2, requires_grad=True), (3, 2)),
        (torch.nn.Parameter(torch.zeros(3, 2)), (3, 2)),
    ]:
        assert shape(saved(tensor)) == size


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"audio": torch.zeros(2)}, "holds a dict, not a tensor"),
        ({str(index): torch.zeros(1) for index in range(3000)}, "holds a dict, not a tensor"),
        (torch.nn.Linear(2, 3).state_dict(), "holds a dict, not a tensor"),
        (collections.OrderedDict(), "holds a dict, not a tensor"),
        ([torch.zeros(2)], "holds a list, not a tensor"),
        ((torch.zeros(2),), "holds a tuple, not a tensor"),
        ((torch.zeros(2),) * 5, "holds a tuple, not a tensor"),
        (torch.nn.Linear(2, 3), "holds something else, not a tensor"),
        (np.zeros(3), "holds something else, not a tensor"),
        (torch.zeros(2, 2).to_sparse(), "holds something else, not a tensor"),
        (torch.zeros(2, device="meta"), "holds something else, not a tensor"),
        (5, "holds something else, not a tensor"),
        ("text", "holds something else, not a tensor"),
    ],
)
def test_what_is_not_one_tensor_is_no_length(value: object, reason: str) -> None:
    assert refused(saved(value)).reason == reason


def test_a_legacy_file_is_to_be_saved_again() -> None:
    data = saved(torch.zeros(2), _use_new_zipfile_serialization=False)
    assert refused(data).reason == "legacy .pth: save it again with torch.save"


def test_any_other_zip_archive_is_no_tensor() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    assert refused(stream.getvalue()).reason == "a zip archive, but not of torch.save"


def test_a_tensor_without_its_numbers_is_truncated() -> None:
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(100)))) as file:
        pickled = file.read("archive/data.pkl")
    assert refused(archive(pickled, bytes(399))).reason == "truncated .pth"
    assert shape(archive(pickled, bytes(400))) == (100,)


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: (1, 2, 3, evil), lambda evil: {"a": evil}])
def test_a_pickle_that_runs_code_runs_nothing(tmp_path, wrap) -> None:
    for protocol in range(6):
        pickled = pickle.dumps(wrap(Evil(str(tmp_path / "made"))), protocol)
        assert "not a tensor" in refused(archive(pickled)).reason
        assert not (tmp_path / "made").exists()


def test_the_message_names_what_a_pickle_would_call(tmp_path) -> None:
    error = refused(archive(pickle.dumps(Evil(str(tmp_path / "made")))))
    assert error.detail.startswith("a pickle that calls 'posix mkdir'")


def test_a_malformed_pickle_is_refused() -> None:
    for pickled in [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02R.",
        b"\x80\x02h\x05.",
        b"\x80\x02\x85.",
        b"\x80\x02cx\ny\nt.",
        b"\x80\x02cx\ny\n" + b"(" * 30_000 + b"t" * 30_000 + b".",
        b"\x80\x02cx\ny\n" + b"(t" * 30_000 + b".",
        b"\x80\x02cx\ny\n)" + b"q\x00h\x00\x86" * 10_000 + b"R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + b"N" * 4 + b"tR.",
        b"\x80\x02cx\ny\n" + b"\x8a\xff" * 1000,
    ]:
        assert refused(archive(pickled)).reason


def test_a_large_pickle_is_read_in_small_part() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02cx\ny\n" + b"N" * 20_000_000)
    assert refused(stream.getvalue()).reason == "a damaged .pth"


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (saved(torch.zeros(5, 6)), "pt"),
        (saved(torch.zeros(5, 6), pickle_protocol=4), "pth"),
        (npy(np.zeros((5, 6))), "npy"),
        (npy(np.zeros(3, dtype=[("a", "f4")]), (3, 0)), "npy"),
    ],
    ids=["zip", "zip of protocol 4", "npy", "npy of records"],
)
def test_a_file_cut_or_changed_anywhere_is_read_or_refused(data: bytes, suffix: str) -> None:
    chance = random.Random(0)
    for index in range(200):
        damaged = bytearray(data)
        if index % 4 == 0:
            del damaged[chance.randrange(len(damaged)) :]
        for _ in range(0 if index % 4 == 0 else chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        survives(bytes(damaged), suffix)


@given(st.binary(max_size=400), st.sampled_from((b"\x93NUMPY\x01\x00\x60\x00{'shape': (", b"PK\x03\x04", b"")))
def test_any_bytes_are_read_or_refused(rest: bytes, magic: bytes) -> None:
    survives(magic + rest, "npy")


@given(st.binary(max_size=300))
def test_any_pickle_is_read_or_refused(rest: bytes) -> None:
    survives(archive(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + rest), "pt")


def survives(data: bytes, suffix: str) -> None:
    try:
        found = shape(data, suffix)
    except Unreadable as error:
        assert error.reason
    else:
        assert all(size >= 0 for size in found)


@pytest.mark.parametrize("suffix", sorted(ARRAY_SUFFIXES))
def test_a_suffix_that_lies_does_not_matter(suffix: str) -> None:
    assert shape(npy(np.zeros((2, 3))), suffix) == (2, 3)
    assert shape(saved(torch.zeros(2, 3)), suffix) == (2, 3)
