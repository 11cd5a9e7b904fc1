"""One TCP connection for a while: what the link can do by the measure that everybody knows.

The port and a token are told over the encrypted connection; a caller without the token is hung up on. The bytes mean
nothing and are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from typing import Final

TOKEN_BYTES: Final = 16
CHUNK_BYTES: Final = 1 << 20
CONNECT_S: Final = 3.0
STALL_S: Final = 5.0
COUNT_BYTES: Final = 8


def serve_once(host: str, seconds: float, *, sends: bool) -> tuple[int, bytes]:
    """Serve one connection in a thread of its own; return its port and the token.

    Args:
        host: local address, numeric.
        seconds: how long to send.
        sends: whether this end sends; otherwise it counts.

    Raises:
        OSError: nothing can be bound.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1)
    port: int = listener.getsockname()[1]
    arguments = (listener, token, seconds, sends)
    threading.Thread(target=_serve, args=arguments, name="gradwire-doctor-tcp", daemon=True).start()
    return port, token


def _serve(listener: socket.socket, token: bytes, seconds: float, sends: bool) -> None:
    # Whatever the other end does to the connection, it is its own measurement that it spoils.
    with contextlib.suppress(OSError), listener:
        listener.settimeout(2 * CONNECT_S)
        line, _ = listener.accept()
        with line:
            line.settimeout(STALL_S)
            if not hmac.compare_digest(_read(line, TOKEN_BYTES), token):
                return
            if sends:
                _send_for(line, seconds)
            else:
                line.sendall(_count(line).to_bytes(COUNT_BYTES, "little"))


def rate(address: tuple[str, int], token: bytes, seconds: float, *, sends: bool) -> float | None:
    """Return bytes per second over one connection, or None if it cannot be made or breaks."""
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as line:
            line.settimeout(STALL_S)
            line.sendall(token)
            started_s = time.monotonic()
            if sends:
                sent = _send_for(line, seconds)
                came = int.from_bytes(_read(line, COUNT_BYTES), "little")
                if came != sent:
                    return None
            else:
                came = _count(line)
            return came / (time.monotonic() - started_s) if came else None
    except OSError:
        return None


def _send_for(line: socket.socket, seconds: float) -> int:
    chunk, sent, end_s = bytes(CHUNK_BYTES), 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        line.sendall(chunk)
        sent += CHUNK_BYTES
    line.shutdown(socket.SHUT_WR)
    return sent


def _count(line: socket.socket) -> int:
    buffer, came = bytearray(CHUNK_BYTES), 0
    while nbytes := line.recv_into(buffer):
        came += nbytes
    return came


def _read(line: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = line.recv(nbytes - len(data))
        if not piece:
            break
        data += piece
    return data
