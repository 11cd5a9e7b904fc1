"""Asks an address whether somebody with our secret is there, without becoming a member.

A node answers the first message of a handshake only if it proves the secret, and its answer proves it back. The
handshake then goes no further, so a cluster at work does not notice: its node forgets the knock after ten seconds.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import Final

from gradwire.transport.crypto import Marker
from gradwire.transport.endpoint import Endpoint
from gradwire.transport.model import Address
from gradwire.transport.wire import HEADER_BYTES, RESPONSE

from .verdicts import Reached

DOCTOR_LABEL: Final = b"gradwire doctor 1"
ROUND_S: Final = 0.1
DATAGRAM_BYTES_MAX: Final = 2_048


def doctors_secret(secret: bytes) -> bytes:
    """Return the secret that doctors use among themselves, derived from the cluster's: no node connects to them."""
    return hmac.digest(secret, DOCTOR_LABEL, "sha256")


def knock(address: Address, secret: bytes, timeout_s: float) -> Reached:
    """Return who answers at a numeric address: another doctor, a node of the cluster, or nobody."""
    found: Reached = "silent"
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    candidates: tuple[tuple[Reached, bytes], ...] = (
        ("doctor", doctors_secret(secret)),
        ("node", secret),
    )
    end_s = time.monotonic() + timeout_s
    endpoints = [(who, key, _knocking(address, key)) for who, key in candidates]
    with socket.socket(family, socket.SOCK_DGRAM) as line:
        line.settimeout(ROUND_S)
        line.connect(address)  # so that the system reports a port where nobody listens
        while time.monotonic() < end_s:
            try:
                for _, _, endpoint in endpoints:
                    for transmit in endpoint.poll(time.monotonic()):
                        line.send(transmit.data())
                answer = line.recv(DATAGRAM_BYTES_MAX)
            except ConnectionRefusedError:
                found = "refused"
                continue
            except OSError:  # nothing yet, or no route now
                continue
            for who, key, _ in endpoints:
                if (
                    len(answer) > HEADER_BYTES
                    and answer[0] == RESPONSE
                    and Marker(key).is_marked(answer)
                ):
                    return who
    return found


def _knocking(address: Address, secret: bytes) -> Endpoint:
    endpoint = Endpoint(
        secret,
        time.monotonic(),
        node_id=secrets.randbits(64),
        incarnation=time.time_ns() // 1_000_000,
    )
    endpoint.connect(address)
    return endpoint
