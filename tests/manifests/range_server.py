"""A web server on this machine that answers requests for ranges of files, with ETags, and counts what it serves."""

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RangeServer:
    """Serves the files of a folder.

    Attributes:
        url: Of the folder.
        requests: The method and path of each request so far.
        sent: The bytes of all answers.
        status: Path → the status of every answer, such as 403.
        with_ranges: Whether ranges are answered, or ignored as by a simple server.
        on_request: Called with the number of each request, before it is answered.
    """

    def __init__(self, folder):
        self.folder = folder
        self.requests = []
        self.sent = 0
        self.status = {}
        self.with_ranges = True
        self.on_request = lambda number: None
        self.url = ""
        self._lock = threading.Lock()

    def reset(self):
        self.requests.clear()
        self.sent = 0

    def answer(self, handler):
        with self._lock:
            self.requests.append((handler.command, handler.path))
            self.on_request(len(self.requests))
            path = self.folder / handler.path.lstrip("/")
            status = self.status.get(handler.path, 200 if path.is_file() else 404)
        headers = {}
        first = 0
        size = 0
        if status == 200:
            file = path.stat()
            size = file.st_size
            headers["ETag"] = f'"{file.st_mtime_ns}-{size}"'
            asked = re.match(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
            if asked is not None and self.with_ranges:
                status = 206
                first, last = int(asked[1]), min(int(asked[2]), size - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{size}"
                size = last + 1 - first
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        if handler.command == "GET" and size:
            with path.open("rb") as stream:
                stream.seek(first)
                handler.wfile.write(stream.read(size))
            with self._lock:
                self.sent += size


class Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # a body would wait 40 ms behind its header
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass


@contextmanager
def served(handler):
    """Answer requests to a free port of the loopback interface with a handler: the server's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        # By default `shutdown` waits half a second.
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(folder):
    """Serve a folder."""
    files = RangeServer(folder)

    class OfFiles(Handler):
        def do_GET(self):
            files.answer(self)

        do_HEAD = do_GET

    with served(OfFiles) as files.url:
        yield files
