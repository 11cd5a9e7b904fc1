"""A program that sends datagrams to a port as fast as it can: garbage of every kind, and recorded datagrams.

python flooder.py HOST PORT SECONDS DATAGRAMS      (in hex, 256 bytes each)
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import sys
import time

KINDS = (0x31, 0x32, 0x33, 0x34, 0x35, 0x00, 0xFF)
REPEATED_BYTES = 256
UDP_SEGMENT = 103
SOCKETS = 4


def garbage(generator: random.Random) -> list[bytes]:
    sizes = (1, 16, 60, 256, 1_400)
    return [bytes([kind]) + generator.randbytes(size - 1) for kind in KINDS for size in sizes]


def bursts(generator: random.Random) -> list[bytes]:
    """Return bursts of 45 datagrams, each sent with one system call."""
    return [
        b"".join(bytes([kind]) + generator.randbytes(1_399) for _ in range(45)) for kind in KINDS
    ]


def main() -> None:
    target, seconds = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
    recorded = bytes.fromhex(sys.argv[4])
    generator = random.Random(1)
    singles = garbage(generator) + [
        recorded[at : at + REPEATED_BYTES] for at in range(0, len(recorded), REPEATED_BYTES)
    ]
    many = bursts(generator)
    option = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", 1_400))]
    sources = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(SOCKETS)]
    sent = 0
    end_s = time.monotonic() + seconds
    for source in itertools.cycle(sources):
        if time.monotonic() >= end_s:
            break
        for datagram in singles:
            source.sendto(datagram, target)
        sent += len(singles)
        with contextlib.suppress(OSError):  # a kernel without segmentation
            source.sendmsg([many[sent % len(many)]], option, 0, target)
            sent += 45
    sys.stdout.write(f"{sent}\n")


if __name__ == "__main__":
    main()
