"""Messages that are larger than a node takes at once: cut into slices, and put together by the receiver.

A slice is a message of the transport with a header of its own, so the transport's bounds hold for slices and not for
models. What has arrived of a message counts for nothing until the message is complete: an update of a member that dies
in the middle is then applied by nobody, or by everybody, as any other of its updates.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .errors import MessageError, NotConnected, WouldBlock
from .transport import Limits, Node, Peer, Ticket

__all__ = [
    "INCOMPLETE_MAX",
    "LEAST_SLICE_BYTES",
    "SLICE_BYTES",
    "Assembler",
    "Outgoing",
    "Slicer",
    "datagram_hint",
    "slice_bytes_of",
    "tag_of_slice",
]

#: Size of a slice, unless a node takes less. Small, because a node that waits sees the others' progress by their
#: slices: on a link of 1 Mbit/s a slice takes 8 s.
SLICE_BYTES = 1 << 20

#: The least ``message_bytes_max`` of a node that sends or takes slices.
LEAST_SLICE_BYTES = 4_096

#: The most messages of one sender of which slices have arrived, and more are to come: they bound its memory here.
INCOMPLETE_MAX = 8

# The whole message's tag and size, and the place of the slice in it.
_HEADER = struct.Struct("<QQQ")


class Outgoing:
    """A message on its way to the transport, which may take it in several calls.

    Args:
        tag: of the message.
        payload: its bytes, which must not change, or a list of pieces that follow one another.
        receiver: a node, a list of nodes, or None for all.

    Attributes:
        tag, payload, receiver: as given.
        sent_bytes: of slices that the transport has taken; 0 for a message that it takes whole.
    """

    def __init__(self, tag: int, payload: Any, receiver: Any = None) -> None:
        self.tag = tag
        self.payload = payload
        self.receiver = receiver
        self.sent_bytes = 0
        pieces = payload if isinstance(payload, list) else [payload]
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return sum([piece.nbytes for piece in self._pieces])

    def cut(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes from ``begin`` to ``end``, of each piece that has some of them."""
        parts = []
        for piece in self._pieces:
            parts.append(piece[max(begin, 0) : max(end, 0)])
            begin -= piece.nbytes
            end -= piece.nbytes
        return [part for part in parts if part]


class Slicer:
    """Hands messages to a node, in slices where they are large.

    Args:
        node: which sends them.
        tag: of a slice.
        peers_of: returns the peer of a receiver, or the peers of several.
        most_bytes: returns how many bytes of a message all its receivers take at once.

    Attributes:
        slices: number of slices sent so far.
    """

    def __init__(
        self,
        node: Node,
        tag: int,
        peers_of: Callable[[Any], Peer | Collection[Peer]],
        most_bytes: Callable[[Outgoing], int],
    ) -> None:
        self.slices = 0
        self._node = node
        self._tag = tag
        self._peers_of = peers_of
        self._most_bytes = most_bytes

    def send(self, outgoing: Outgoing) -> Ticket:
        """Hand a message, or the rest of it, to the transport.

        Returns:
            The ticket of the last slice: the transport delivers in order, so that is delivered last.

        Raises:
            WouldBlock: there is no space for all of it; the next call goes on where this one has ended.
            NotConnected: the receiver is gone.
        """
        receiver = outgoing.receiver
        peers = None if receiver is None else self._peers_of(receiver)
        publish = partial(self._node.publish, to=peers)
        size = outgoing.nbytes
        most_bytes = self._most_bytes(outgoing)
        if not outgoing.sent_bytes and size <= most_bytes:
            pieces = outgoing.cut(0, size)
            return publish(pieces[0] if len(pieces) == 1 else b"".join(pieces), tag=outgoing.tag)
        while True:
            begin = outgoing.sent_bytes
            end = min(begin + most_bytes - _HEADER.size, size)
            header = _HEADER.pack(outgoing.tag, size, begin)
            ticket = publish(b"".join((header, *outgoing.cut(begin, end))), tag=self._tag)
            outgoing.sent_bytes = end
            self.slices += 1
            if end == size:
                return ticket

    def send_all(self, queue: deque[Outgoing]) -> bool:
        """Hand messages to the transport as far as there is space, and drop those whose receiver has gone.

        Returns:
            Whether none is left in the queue.
        """
        while queue:
            try:
                self.send(queue[0])
            except WouldBlock:
                return False
            except NotConnected:
                pass
            queue.popleft()
        return True


@dataclass(slots=True)
class _Assembly:
    """A message of which the first slices have arrived."""

    tag: int
    data: memoryview
    filled: int = 0


def datagram_hint(node: Node) -> str:
    """Return what to try where a connected peer acknowledges nothing."""
    # The handshake and what keeps a connection alive fit into small datagrams.
    nbytes = getattr(node, "limits", Limits()).datagram_bytes
    return (
        f"if small messages pass and large ones do not, a link drops datagrams of {nbytes} bytes: lower "
        "gradwire.transport.Limits(datagram_bytes=...) on all nodes"
    )


def slice_bytes_of(node: Node, who: str) -> int:
    """Return the size of the largest message that a node takes, of those that it gets in slices.

    Raises:
        ValueError: the node takes none that is large enough for ``who``.
    """
    # A stand-in for a node may have no limits of its own.
    most_bytes = getattr(node, "limits", Limits()).message_bytes_max
    if most_bytes < LEAST_SLICE_BYTES:
        raise ValueError(
            f"message_bytes_max of the node is {most_bytes}, {who} needs at least {LEAST_SLICE_BYTES}: larger "
            "messages are cut, but not smaller"
        )
    return min(SLICE_BYTES, most_bytes)


def tag_of_slice(payload: memoryview) -> int:
    """Return the tag of the message that a slice belongs to; raise `MessageError` if the bytes are no slice."""
    if len(payload) < _HEADER.size:
        raise MessageError(f"a slice of {len(payload)} bytes")
    tag: int = _HEADER.unpack_from(payload)[0]
    return tag


class Assembler:
    """Puts messages together: of every sender one of each kind at a time.

    Args:
        largest_bytes: size of the largest message that the receiver has a use for.

    Attributes:
        slices: number of slices received so far.
        assemblies: the incomplete messages, by sender and kind.
    """

    def __init__(self, largest_bytes: int) -> None:
        self.slices = 0
        self.assemblies: dict[tuple[Hashable, int], _Assembly] = {}
        self._largest_bytes = largest_bytes

    def add(self, sender: Hashable, kind: int, payload: memoryview) -> memoryview | None:
        """Add a slice of a message of some kind; return the message if it is complete now.

        Raises:
            MessageError: the bytes are no slice, the message is larger than any that the receiver has a use for, or the
            sender has too many incomplete ones.
        """
        tag = tag_of_slice(payload)
        _, size, begin = _HEADER.unpack_from(payload)
        part = payload[_HEADER.size :]
        end = begin + len(part)
        if end > size or not part:
            raise MessageError(f"a slice of {len(part)} bytes that ends at {end} of {size}")
        self.slices += 1
        key = (sender, kind)
        if begin == 0:
            if size > self._largest_bytes:
                raise MessageError(
                    f"a message of {size} bytes, where none has more than {self._largest_bytes}"
                )
            others = sum(other != key and other[0] == sender for other in self.assemblies)
            if others >= INCOMPLETE_MAX:
                raise MessageError(f"{others} incomplete messages, and one more")
            data = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
            self.assemblies[key] = _Assembly(tag, data)
        assembly = self.assemblies.get(key)
        # Slices go to the nodes that are connected at the time. A node that comes in the middle of a message, or is
        # away for a part of it, gets a rest that is of no use; its sender has told it so, see ``Hello.first_direct``.
        expected = assembly and (assembly.tag, len(assembly.data), assembly.filled)
        if assembly is None or expected != (tag, size, begin):
            self.assemblies.pop(key, None)
            return None
        assembly.data[begin:end] = part
        assembly.filled = end
        if end < size:
            return None
        del self.assemblies[key]
        return assembly.data.toreadonly()

    def keep_only(self, senders: Collection[Hashable]) -> None:
        """Forget what has arrived from other nodes, which are gone."""
        for key in [key for key in self.assemblies if key[0] not in senders]:
            del self.assemblies[key]
