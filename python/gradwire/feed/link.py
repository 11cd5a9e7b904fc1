"""Batches over a node: a producer asks for a slot, the feed's machine grants one, and the producer sends a batch.

A batch is sent only after its slot is reserved, so at most as many batches are in transit as the feed holds.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..errors import Closed, NotConnected, TooLarge, WouldBlock
from ..transport.driver import now_s
from ..transport.types import PeerLost
from .ring import ENDINGS, Claim, FeedFailed, Slot, Superseded

if TYPE_CHECKING:
    from ..transport import Node, Peer
    from .ring import Ring

__all__ = ["Link", "Server"]

_LOG = logging.getLogger(__name__)

_HELLO, _WANT, _GRANT, _BATCH, _END, _CLAIM, _SUPERSEDED = range(7)
# Before every batch: its claim; a stream of -1: none.
_HEAD: Final = struct.Struct("<qqqqqq")
_NO_CLAIM: Final = _HEAD.pack(-1, 0, 0, 0, 0, 0)
_POLL_S: Final = 0.02
_TURN_S: Final = 0.0005  # in which another thread may take the lock
_PARTS_MAX: Final = 1 << 20  # of a stream, one for each partition in Spark: 32 MB of claims


class Link:
    """The producers' side of a feed on another machine, with the methods of `Ring`."""

    def __init__(self, node: Node, timeout_s: float) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._grants = 0
        self._is_asking = False
        self._claims: list[Claim] = []
        self._ended: Exception | None = None
        self._hellos = 0
        self._answers = 0  # to these
        self.slot_bytes = 0
        self._peer = _server_of(node, timeout_s)
        node.events()  # of connections before this one
        self.flush(timeout_s)

    def __str__(self) -> str:
        return f"the node at {self._peer.address}"

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every batch that was sent is in the feed."""
        # The feed's machine answers in order, so its answer to a HELLO comes after it has stored the batches before.
        with self._lock:
            self._publish(b"", _HELLO)
            self._hellos += 1
            if not self._wait(lambda: self._answers == self._hellos, timeout_s):
                raise TimeoutError(f"{self._peer.address} serves no feed: call feed.serve there")
            if isinstance(self._ended, Superseded):  # it came together with the answer
                raise self._ended

    def check(self, *, is_producer: bool = True) -> None:  # noqa: ARG002  (as Ring.check)
        """Raise `Closed` or `FeedFailed` if the feed has ended."""
        with self._lock:
            self._receive(0.0)
        if self._ended is not None:
            raise self._ended

    def reserve(self, nbytes: int, timeout_s: float | None) -> Slot:
        """Ask for a slot and wait for it; other threads may send their batches meanwhile."""
        end_s = None if timeout_s is None else now_s() + timeout_s
        wait_s = 0.0
        while True:
            with self._lock:
                self._receive(wait_s)
                if self._ended is not None:
                    raise self._ended
                if self._grants:
                    self._grants -= 1
                    return Slot(0, memoryview(bytearray(_HEAD.size + nbytes))[_HEAD.size :])
                if not self._is_asking:
                    self._publish(b"", _WANT)
                    self._is_asking = True
            if end_s is not None and now_s() >= end_s:
                raise TimeoutError(f"no space in the feed within {timeout_s:g} s")
            wait_s = _POLL_S
            threading.Event().wait(_TURN_S)

    def commit(self, slot: Slot, claim: Claim | None = None) -> None:
        """Send a batch into its slot, see `Ring.commit`; that it is superseded, a later call may find out."""
        message = slot.buffer.obj
        message[: _HEAD.size] = _NO_CLAIM if claim is None else _HEAD.pack(*claim)
        with self._lock:
            try:
                self._publish(message, _BATCH)
            except TooLarge:
                self._grants += 1  # the slot is still this producer's
                raise

    def claim(self, claim: Claim) -> Claim:
        """Let only this attempt put batches of a part from now on, see `Ring.claim`."""
        with self._lock:
            self._publish(_HEAD.pack(*claim), _CLAIM)
            self._wait(lambda: len(self._claims) > 0, None)
            return self._claims.pop()

    def abandon(self, _slot: Slot) -> None:
        """Keep the granted slot for the next batch."""
        with self._lock:
            self._grants += 1

    def end(self, *, how: str, text: str = "") -> None:
        """End the feed for both sides, after everything that was sent."""
        with self._lock, contextlib.suppress(Closed, FeedFailed):
            self._publish(f"{how}:{text}".encode(errors="backslashreplace"), _END)
            self._node.drain(5.0)

    def _wait(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        end_s = None if timeout_s is None else now_s() + timeout_s
        while not is_there() and (end_s is None or now_s() < end_s):
            if self._ended is not None:
                raise self._ended
            self._receive(_POLL_S)
        return is_there()

    def _receive(self, timeout_s: float) -> None:
        messages = self._node.receive(timeout_s)
        lost = [event.peer for event in self._node.events() if isinstance(event, PeerLost)]
        is_gone = self._peer in lost or self._peer not in self._node.peers
        for peer, tag, payload in messages:
            if peer != self._peer:
                continue  # another producer, whose messages are for the feed's machine
            if tag == _HELLO and not is_gone:
                self.slot_bytes = int(bytes(payload))
                self._answers += 1
            elif tag == _GRANT:
                self._grants += 1
                self._is_asking = False
            elif tag == _CLAIM:
                self._claims.append(Claim(*_HEAD.unpack(payload)))
            elif tag == _SUPERSEDED and self._ended is None:
                self._ended = Superseded(bytes(payload).decode())
            elif tag == _END and self._ended is None:
                how, text = _ending(payload)
                self._ended = FeedFailed(text) if how == "failed" else Closed("the feed has ended")
        # Also if it is back: what was on its way is lost, and it has forgotten the slots that it granted.
        if self._ended is None and is_gone:
            self._ended = Closed(f"{self._peer.address}, which has the feed, is gone")

    def _publish(self, data: Any, tag: int) -> None:
        while self._ended is None:
            try:
                self._node.publish(data, tag, self._peer)
            except (WouldBlock, NotConnected):
                self._receive(_POLL_S)
            else:
                return
        raise self._ended


def _server_of(node: Node, timeout_s: float) -> Peer:
    """Wait for the node with the feed and return it. Other producers, of which that node tells, are peers, too.

    Raises:
        TimeoutError: it could not be reached.
    """
    end_s = now_s() + timeout_s
    while True:
        peers = node.wait_for_peers(1, max(0.0, end_s - now_s()))
        servers = [peer for peer in peers if not node.seeds or peer.address in node.seeds]
        if servers:
            return servers[0]
        if now_s() >= end_s:
            raise TimeoutError(f"no connection to {', '.join(node.seeds)} within {timeout_s:g} s")
        threading.Event().wait(_POLL_S)


def _ending(payload: Any) -> tuple[str, str]:
    how, _, text = bytes(payload).decode(errors="replace").partition(":")
    return how, text


def _claim_in(payload: Any) -> Claim | None:
    """Return the claim at the beginning of a message, one of a negative stream for none; None for other bytes."""
    if len(payload) < _HEAD.size:
        return None
    claim = Claim(*_HEAD.unpack_from(payload))
    is_valid = claim.stream < 0 or (0 <= claim.part < _PARTS_MAX and min(claim) >= 0)
    return claim if is_valid else None


class Server:
    """The feed's side of all links of one node: a thread runs it."""

    def __init__(self, ring: Ring, node: Node) -> None:
        self._ring = ring
        self._node = node
        self._waiting: list[Peer] = []  # producers without a slot, in the order in which they asked
        # Several of a producer, if several of its threads put batches.
        self._slots: dict[Peer, list[Slot]] = {}

    def run(self) -> None:
        """Serve the feed until the node is closed; after the feed's end only tell producers so."""
        ending = "closed:"
        with contextlib.suppress(Closed):
            try:
                while True:
                    # Determined before receiving, which then returns everything that these peers sent.
                    gone = {*self._waiting, *self._slots}.difference(self._node.peers)
                    for peer, tag, payload in self._node.receive(_POLL_S):
                        self._handle(peer, tag, payload)
                    self._forget(gone)
                    self._grant()
            except FeedFailed as error:
                ending = f"failed:{error}"
            except Closed:
                pass
            except Exception as error:
                # Such as a full shared memory: producers and consumers would wait for this thread in vain.
                _LOG.exception("the feed cannot be served any more")
                self._ring.end(how="failed", text=f"the feed cannot be served: {error!r}")
                ending = f"failed:{error!r}"
            for peer in self._node.peers:
                self._publish(peer, ending.encode(), _END)
            while True:  # a producer that comes later does not wait in vain
                for peer, _, _ in self._node.receive(1.0):
                    self._publish(peer, ending.encode(), _END)

    def _publish(self, peer: Peer, data: bytes, tag: int) -> None:
        with contextlib.suppress(NotConnected, WouldBlock):  # a peer that is gone is forgotten
            self._node.publish(data, tag, peer)

    def _handle(self, peer: Peer, tag: int, payload: Any) -> None:
        if tag == _HELLO:
            self._publish(peer, str(self._ring.slot_bytes).encode(), _HELLO)
        elif tag == _WANT and peer not in self._waiting:
            # A producer asks again only once it has its slot.
            self._waiting.append(peer)
        elif tag == _BATCH and self._slots.get(peer):
            slot = self._slots[peer].pop()
            nbytes = len(payload) - _HEAD.size
            claim = _claim_in(payload)
            if claim is not None and 0 < nbytes <= len(slot.buffer):
                slot.buffer[:nbytes] = payload[_HEAD.size :]
                try:
                    self._ring.commit(slot, None if claim.stream < 0 else claim)
                except Superseded as error:
                    self._publish(peer, str(error).encode(), _SUPERSEDED)
            else:
                self._ring.abandon(slot)
        elif tag == _CLAIM and (claim := _claim_in(payload)) is not None and claim.stream >= 0:
            try:
                claim = self._ring.claim(claim)
            except Superseded as error:
                self._publish(peer, str(error).encode(), _SUPERSEDED)
            else:
                self._publish(peer, _HEAD.pack(*claim), _CLAIM)
        elif tag == _END:
            how, text = _ending(payload)
            if how in ENDINGS:
                self._ring.end(how=how, text=text)

    def _grant(self) -> None:
        """Grant free slots in the order of the requests; raise if the feed has ended."""
        self._ring.check()
        # A producer that sends nothing into its slots leaves the others as many.
        most = max(1, self._ring.slots // 2)
        with contextlib.suppress(TimeoutError):
            for peer in [each for each in self._waiting if len(self._slots.get(each, ())) < most]:
                slot = self._ring.reserve(self._ring.slot_bytes, 0.0)
                self._waiting.remove(peer)
                self._slots.setdefault(peer, []).append(slot)
                self._publish(peer, b"", _GRANT)

    def _forget(self, gone: set[Peer]) -> None:
        self._waiting = [peer for peer in self._waiting if peer not in gone]
        for peer in gone & self._slots.keys():
            for slot in self._slots.pop(peer):
                _LOG.warning("%s is gone, with the batch that it was sending", peer.address)
                self._ring.abandon(slot)
