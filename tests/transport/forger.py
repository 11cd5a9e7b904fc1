"""A program that watches a stream between two ports of this machine and adds forged fragments; needs raw sockets.

python forger.py SOURCE_PORT TARGET_PORT SHARE SECONDS

It forges ``SHARE`` times as many datagrams as the stream has: of the record seen last or one of the next, with the
kind and shape of a true fragment, random bytes, and the address of the stream's sender. It writes how many it has sent.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import sys
import time

HEADER = struct.Struct("<BBBBIQ")
DATA, TAGGED = 0x31, 0x35
TAG_BYTES = 16
IP_BYTES = 20
UDP_BYTES = 8
SEEN = IP_BYTES + UDP_BYTES
NUMBER = (1 << 48) - 1
TTL, TTL_AT = 63, 8  # true datagrams have 64: the forger sees its own, too
HOST = socket.inet_aton("127.0.0.1")


def framed(source: int, target: int, payload: bytes) -> bytes:
    """Return an IPv4 packet; the kernel fills in its checksum, UDP needs none."""
    nbytes = UDP_BYTES + len(payload)
    udp = struct.pack("!HHHH", source, target, nbytes, 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, IP_BYTES + nbytes, 0, 0, TTL, 17, 0, HOST, HOST)
    return ip + udp + payload


def main() -> None:
    source, target = int(sys.argv[1]), int(sys.argv[2])
    share, end_s = float(sys.argv[3]), time.monotonic() + float(sys.argv[4])
    generator = random.Random(1)
    noise = generator.randbytes(1 << 20)
    watching = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
    watching.setblocking(False)
    sending = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    sent = 0
    due = 0.0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while time.monotonic() < end_s:
        select.select([watching], [], [], 0.1)
        try:
            seen = watching.recv(SEEN + HEADER.size)
        except BlockingIOError:
            continue
        ports = struct.unpack_from("!HH", seen, IP_BYTES)
        is_other = ports != (source, target) or seen[TTL_AT] == TTL
        if is_other or len(seen) < SEEN + HEADER.size:
            continue
        kind, _, _, fragments, stream, number = HEADER.unpack_from(seen, SEEN)
        if kind not in (DATA, TAGGED):
            continue
        size = (number >> 48) + TAG_BYTES * (kind == TAGGED)
        # With segmentation offload one packet is a record.
        [nbytes] = struct.unpack_from("!H", seen, IP_BYTES + 4)
        due += share * max(1, (nbytes - UDP_BYTES) // (HEADER.size + size))
        while due >= 1.0:
            due -= 1.0
            record = (number & NUMBER) + generator.choice((0, 1, 1, 2, 3))
            first = generator.randrange(max(1, fragments - 1))
            field = number & ~NUMBER | record
            header = HEADER.pack(kind, 0, first, fragments, stream, field)
            start = generator.randrange(len(noise) - size)
            packet = framed(source, target, header + noise[start : start + size])
            sending.sendto(packet, ("127.0.0.1", 0))
            sent += 1
    sys.stdout.write(f"{sent}\n")


if __name__ == "__main__":
    main()
