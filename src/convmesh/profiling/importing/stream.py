"""Large JSON files, read piece by piece, packed or not."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from convmesh.errors import ProfileError

_PIECE_BYTES = 1 << 20
_PACKED_BYTES = 1 << 16


class ChromeTrace:
    """A Chrome trace: an array of events, or an object that holds one as ``traceEvents``.

    Args:
        path: The file; ``.gz`` is unpacked on the way.

    Attributes:
        remarks: What went wrong while reading, such as a file that ends in its middle.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.remarks: list[str] = []

    def header(self) -> dict[str, Any]:
        """What stands before the events, as plain values; empty for an array.

        Raises:
            ProfileError: If the file can't be read or is not JSON.
        """
        import ijson

        found: dict[str, Any] = {}
        with self._open() as file:
            if self._is_array(file):
                return found
        with self._open() as file, self._explained():
            builder, key = None, ""
            for prefix, event, value in ijson.parse(file, buf_size=1 << 14, use_float=True):
                if prefix == "" and event == "map_key":
                    if value == "traceEvents":
                        break
                    key, builder = value, ijson.ObjectBuilder()
                elif builder is not None and prefix.startswith(key) and key:
                    builder.event(event, value)
                    found[key] = getattr(builder, "value", None)
        return found

    def events(self) -> Iterator[dict[str, Any]]:
        """The events one by one. A file that ends in its middle gives those before, and a remark.

        Raises:
            ProfileError: If the file can't be read or is not JSON.
        """
        import ijson

        with self._open() as file:
            prefix = "item" if self._is_array(file) else "traceEvents.item"
        number = 0
        with self._open() as file, self._explained():
            try:
                for event in ijson.items(file, prefix, buf_size=_PIECE_BYTES, use_float=True):
                    number += 1
                    if isinstance(event, dict):
                        yield event
            except ijson.IncompleteJSONError as error:
                if not number or not _is_cut_short(error):
                    raise
                self.remarks.append(f"'{self._path.name}' ends in its middle: {number} events before that were read")

    def _open(self) -> _Bytes:
        try:
            file = self._path.open("rb")
            return _Unpacked(file) if self._path.suffix == ".gz" else file
        except OSError as error:
            raise ProfileError(f"'{self._path}' can't be read", got=error.strerror) from None

    def _is_array(self, file: _Bytes) -> bool:
        with self._explained():
            start = file.read(1 << 12).lstrip(b"\xef\xbb\xbf \t\r\n")
        if start[:1] not in (b"[", b"{"):
            raise ProfileError(
                f"'{self._path}' is not a Chrome trace",
                got="an empty file" if not start else repr(start[:20].decode("utf-8", "replace")),
                expected="JSON that starts with [ or {",
            )
        return start[:1] == b"["

    def _explained(self) -> _Explained:
        return _Explained(self._path)


class _Bytes(Protocol):
    """What is read from a file, packed or not."""

    def read(self, size: int = -1, /) -> bytes:
        """Some of the next bytes; empty at the end."""
        ...

    def __enter__(self) -> _Bytes: ...

    def __exit__(self, *error: Any) -> None: ...


class _Unpacked:
    """A gzip file that gives all there is, also where it was cut; Python's own gives an error before the last piece.

    Args:
        file: The packed bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unpacker = _unpacker()

    def read(self, size: int = -1, /) -> bytes:
        """The next unpacked bytes, whatever number a packed piece gives; empty at the end and for a size of 0."""
        while size:
            rest = self._unpacker.unused_data if self._unpacker.eof else b""
            if self._unpacker.eof:
                self._unpacker = _unpacker()
            packed = rest or self._file.read(_PACKED_BYTES)
            if not packed:
                return b""
            unpacked: bytes = self._unpacker.decompress(packed)
            if unpacked:
                return unpacked
        return b""

    def __enter__(self) -> _Unpacked:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def _unpacker() -> Any:
    return zlib.decompressobj(wbits=31)  # With gzip's header and checksum.


class _Explained:
    """Turns what a damaged file causes into a sentence."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import ijson

        if isinstance(error, ijson.JSONError | zlib.error | UnicodeDecodeError):
            raise ProfileError(
                f"'{self._path}' is damaged", got=str(error).splitlines()[0] if str(error) else type(error).__name__
            ) from None


def _is_cut_short(error: Exception) -> bool:
    text = str(error).lower()
    return "premature" in text or "incomplete" in text or "end of" in text
