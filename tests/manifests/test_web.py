"""Web servers that answer other than they should: no more is read of them than was asked for, nor for long."""

import gzip
import threading
from contextlib import contextmanager

import pytest
from manifests.range_server import Handler, served

from batchtune.errors import ManifestError
from batchtune.manifests import load_lengths, storage
from batchtune.manifests.storage import _filesystem

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

SIZE = 64 * 1024 * 1024
PIECE = bytes(1024 * 1024)
MOST = 2 * 1024 * 1024


@contextmanager
def server_of(answer):
    """Serve files of 64 MiB, of which GET is answered so: the URL of one, and what is set when an answer broke off."""
    broke_off = threading.Event()

    class Answering(Handler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(SIZE))
            self.end_headers()

        def do_GET(self):
            try:
                answer(self)
            except OSError:
                broke_off.set()
            self.close_connection = True

    with served(Answering) as url:
        yield f"{url}/a", broke_off
    _filesystem.cache_clear()


def begin(handler, status, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def endless(handler):
    while True:
        handler.wfile.write(PIECE)


def ranges_ignored(handler):
    begin(handler, 200, Content_Length=str(SIZE))
    endless(handler)


def whole_never_ends(handler):
    begin(handler, 200)
    endless(handler)


def range_never_ends(handler):
    asked = handler.headers["Range"].removeprefix("bytes=")
    begin(handler, 206, Content_Range=f"bytes {asked}/{SIZE}")
    endless(handler)


def another_range(handler):
    begin(handler, 206, Content_Range=f"bytes 7-2054/{SIZE}", Content_Length="2048")
    handler.wfile.write(bytes(2048))


def no_range(handler):
    begin(handler, 206, Content_Length="2048")
    handler.wfile.write(bytes(2048))


def expands(handler):
    asked = handler.headers["Range"].removeprefix("bytes=")
    body = gzip.compress(bytes(SIZE), 1)
    begin(
        handler,
        206,
        Content_Encoding="gzip",
        Content_Length=str(len(body)),
        Content_Range=f"bytes {asked}/{SIZE}",
    )
    handler.wfile.write(body)


def error_never_ends(handler):
    begin(handler, 503)
    endless(handler)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ranges_ignored, "more than 2 MiB at once, as it ignores ranges"),
        (whole_never_ends, "more than 2 MiB at once, as it ignores ranges"),
        (range_never_ends, r"more than 2 KiB at once, .* or never ends"),
        (another_range, "not send the bytes that were asked for, 0 to 2047"),
        (no_range, "not send the bytes that were asked for, 0 to 2047"),
        (expands, "more than 2 KiB at once"),
        (error_never_ends, "503"),
    ],
)
def test_no_more_is_read_than_was_asked_for(answer, message, monkeypatch):
    monkeypatch.setattr(storage, "_LARGEST_WHOLE", MOST)
    with server_of(answer) as (url, broke_off):
        with pytest.raises(ManifestError, match=message):
            load_lengths(url)
        if "end" in answer.__name__:
            assert broke_off.wait(60)


def test_a_listing_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(storage, "_LARGEST_PAGE", MOST)
    with (
        server_of(whole_never_ends) as (url, broke_off),
        pytest.raises(ManifestError, match="more than 2 MiB at once"),
    ):
        load_lengths(f"{url}/*.csv")
    assert broke_off.wait(60)


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    # Its size is asked for first, in two ways.
    assert storage._SILENT_SECONDS * max(2, 1 + storage._ATTEMPTS) <= 60
    monkeypatch.setattr(storage, "_SILENT_SECONDS", 0.1)
    asked = []
    released = threading.Event()

    def silent(handler):
        asked.append(handler.path)
        released.wait(60)

    with server_of(silent) as (url, _):
        with pytest.raises(ManifestError, match=r"can't be read: .*[Tt]imeout"):
            load_lengths(url)
        released.set()
    assert asked == 3 * ["/a"]
