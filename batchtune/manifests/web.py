"""How the answers of web servers are read: bounded in size and time, and never decompressed on the way."""

from __future__ import annotations

from typing import Any

from batchtune.units import format_size

# Of a server that ignores ranges, which sends an object whole; up to 16 are read at once.
_LARGEST_WHOLE = 128 * 1024 * 1024
_LARGEST_PAGE = 16 * 1024 * 1024
_PIECE_BYTES = 256 * 1024
# A request is made up to three times, and a size asked for in two ways: a server that never answers takes a minute.
_SILENT_SECONDS = 15.0
_LONGEST_SECONDS = 300.0


def client_options() -> dict[str, Any]:
    """Return the options of an aiohttp session, whose answers are read as this module says."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        """An answer that is read no further than was asked for. Raises OSError if it holds anything else."""

        async def read(self) -> bytes:
            """Return the body; of an answer with an error, nothing."""
            if self._body is None:
                try:
                    self._body = await self._bounded()
                except BaseException:
                    self.close()
                    raise
            return self._body

        async def _bounded(self) -> bytes:
            if self.status >= 400:
                self.close()
                return b""
            most = _most_bytes(self)
            seen = self.content_length or 0
            body = bytearray()
            while seen <= most and (piece := await self.content.read(_PIECE_BYTES)):
                body += piece
                seen = max(seen, len(body))
            if seen > most:
                raise OSError(
                    f"the server sends more than {format_size(most)} at once, as it ignores ranges or never ends: "
                    "download it, and name the file"
                )
            return bytes(body)

    return {
        "response_class": Answer,
        # A small body could expand to any size. What is compressed itself is recognised by its first bytes.
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
        "timeout": aiohttp.ClientTimeout(
            total=_LONGEST_SECONDS,
            sock_connect=_SILENT_SECONDS,
            sock_read=_SILENT_SECONDS,
        ),
    }


def _most_bytes(answer: Any) -> int:
    """Return how many bytes an answer may hold. Raises OSError if they are not those that were asked for."""
    asked = answer.request_info.headers.get("Range")
    if asked is None:
        return _LARGEST_PAGE
    if answer.status != 206:
        return _LARGEST_WHOLE
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if not answer.headers.get("Content-Range", "").startswith(f"bytes {first}-"):
        raise OSError(
            f"the server sends other bytes than {first} to {last}, which were asked for"
        )
    return int(last) + 1 - int(first)
