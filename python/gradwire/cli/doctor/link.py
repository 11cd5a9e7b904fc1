"""The test of a link: one doctor asks, the other answers, both are ordinary nodes.

Messages are told apart by their tags: questions and answers are JSON, pings come back as they are, bulk is counted.
Only who knows the secret can ask, and what an answerer does for one question is bounded in time.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gradwire.errors import TransportError
from gradwire.transport import Node, Peer, Received, Stats, Ticket
from gradwire.transport.driver import interface_mtu
from gradwire.transport.model import parse_address

from . import gather, tcp
from .facts import Flow, Link

ASK, TELL, PING, BULK = 1, 2, 3, 4
BULK_BYTES: Final = 1 << 20
PING_BYTES: Final = 1_024
IN_FLIGHT: Final = 4
PINGS_MIN, PINGS_MAX = 20, 2_000
SECONDS_MAX: Final = 60.0
QUESTION_BYTES_MAX: Final = 1_024
ANSWER_S: Final = 10.0
TURN_S: Final = 0.5


class LinkError(Exception):
    """The other doctor is gone, silent, or something else altogether; the message says which."""


@dataclass(frozen=True)
class Sent:
    """What it took one end to send for a while."""

    seconds: float
    nbytes: int
    datagrams: int
    resent_datagrams: int
    cpu_s: float


def send_bulk(
    node: Node, peer: Peer, seconds: float, take: Callable[[Sequence[Received]], None]
) -> Sent:
    """Send messages of 1 MB, a few at a time, until all are acknowledged; ``take`` gets what comes meanwhile.

    Raises:
        LinkError: the peer was lost, or acknowledged nothing for too long.
    """
    payload, nbytes = os.urandom(BULK_BYTES), 0
    tickets: deque[Ticket] = deque()
    before, cpu_s, started_s = node.stats(), time.process_time(), time.monotonic()
    progress_s = started_s
    while tickets or time.monotonic() - started_s < seconds:
        while len(tickets) < IN_FLIGHT and time.monotonic() - started_s < seconds:
            tickets.append(node.publish(payload, BULK, to=peer))
            nbytes += BULK_BYTES
        take(node.receive(timeout_s=0.001))
        while tickets and tickets[0].is_done:
            if tickets.popleft().failed:
                raise LinkError(f"{peer.address} was lost in the middle of the test")
            progress_s = time.monotonic()
        if time.monotonic() - progress_s > ANSWER_S:
            raise LinkError(f"{peer.address} has acknowledged nothing for {ANSWER_S:.0f} s")
    after = node.stats()
    return Sent(
        seconds=time.monotonic() - started_s,
        nbytes=nbytes,
        datagrams=after.datagrams_sent - before.datagrams_sent,
        resent_datagrams=after.retransmitted_fragments - before.retransmitted_fragments,
        cpu_s=time.process_time() - cpu_s,
    )


class Tally:
    """Counts the bulk that comes from each peer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._bytes: dict[Peer, int] = {}
        self._drops = 0
        self._cpu_s = 0.0

    def reset(self, peer: Peer) -> None:
        """Begin anew for a peer."""
        self._bytes[peer] = 0
        self._drops = self._node.stats().kernel_drops
        self._cpu_s = time.process_time()

    def take(self, messages: Sequence[Received]) -> list[Received]:
        """Count the bulk; return the rest."""
        rest = []
        for message in messages:
            if message.tag == BULK:
                self._bytes[message.peer] = self._bytes.get(message.peer, 0) + len(message.payload)
            else:
                rest.append(message)
        return rest

    def report(self, peer: Peer) -> dict[str, Any]:
        """Return what came since `reset`."""
        return {
            "bytes": self._bytes.get(peer, 0),
            "kernel_drops": self._node.stats().kernel_drops - self._drops,
            "cpu_s": time.process_time() - self._cpu_s,
        }


# ---- the side that answers --------------------------------------------------------------------------------------


class Answerer:
    """Does for other doctors what they ask.

    Args:
        node: that they connect to.
        host: local address that it is bound to.
        say: is told what happens.
    """

    def __init__(self, node: Node, host: str, say: Callable[[str], None]) -> None:
        self._node = node
        self._host = host
        self._say = say
        self._tally = Tally(node)
        self._waiting: deque[Received] = deque()

    def turn(self, timeout_s: float = TURN_S) -> None:
        """Answer what has come, waiting so long for something."""
        self._waiting.extend(self._tally.take(self._node.receive(timeout_s)))
        while self._waiting:
            message = self._waiting.popleft()
            try:
                self._serve(message)
            except (
                TransportError
            ) as error:  # the peer has left, or takes nothing: the next one is served
                self._say(f"{message.peer.address}: {error}")

    def _serve(self, message: Received) -> None:
        peer, tag, payload = message
        if tag == PING:
            self._node.publish(payload, PING, to=peer)
        elif tag == ASK:
            answer = self._answer(peer, payload)
            self._node.publish(json.dumps(answer).encode(), TELL, to=peer)

    def _answer(self, peer: Peer, question: memoryview) -> dict[str, Any]:
        if len(question) > QUESTION_BYTES_MAX:
            return {"error": f"a question of {len(question)} bytes is too long"}
        try:
            asked = json.loads(bytes(question))
            return self._do(peer, asked["do"], float(asked.get("seconds", 0.0)))
        except (LinkError, OSError) as error:
            return {"error": str(error)}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"a question that this version does not know ({error!r})"}

    def _do(self, peer: Peer, what: str, seconds: float) -> dict[str, Any]:
        if not 0.0 <= seconds <= SECONDS_MAX:
            raise ValueError(f"{seconds} s; at most {SECONDS_MAX}")
        if what == "hello":
            self._say(f"{peer.address} tests the link")
            name, mbit = gather.interface_towards(peer.address)
            return {"wall_s": time.time(), "interface": name, "mbit": mbit}
        if what == "reset":
            self._tally.reset(peer)
            return {}
        if what == "count":
            return self._tally.report(peer)
        if what == "send":
            return self._send(peer, seconds)
        if what in ("tcp out", "tcp back"):
            port, token = tcp.serve_once(self._host, seconds, sends=what == "tcp back")
            return {"port": port, "token": token.hex()}
        raise ValueError(what)

    def _send(self, peer: Peer, seconds: float) -> dict[str, Any]:
        def keep(messages: Sequence[Received]) -> None:
            self._waiting.extend(self._tally.take(messages))

        sent = send_bulk(self._node, peer, seconds, keep)
        self._say(f"sent {sent.nbytes / 1e6:.0f} MB to {peer.address}")
        return vars(sent)


# ---- the side that asks -----------------------------------------------------------------------------------------


class Asker:
    """Tests the link to one peer.

    Args:
        node: connected to the peer.
        peer: who runs `Answerer`.
        seconds: of each direction.
    """

    def __init__(self, node: Node, peer: Peer, seconds: float) -> None:
        self._node = node
        self._peer = peer
        self._seconds = min(seconds, SECONDS_MAX)
        self._tally = Tally(node)

    def greet(self) -> tuple[float, int | None]:
        """Return how far our wall clock is ahead, and the nominal Mbit/s of the peer's interface."""
        before_s = time.time()
        told = self._ask("hello")
        ahead_s = (before_s + time.time()) / 2.0 - float(told["wall_s"])
        return ahead_s, told["mbit"]

    def examine(self, target: str, peer_mbit: int | None) -> Link:
        """Run the whole test.

        Raises:
            LinkError: the peer was lost or does not answer.
        """
        trips_s = self._round_trips()
        out, back = self._out(), self._back()
        stats = self._node.stats()
        return Link(
            peer=target,
            round_trips_s=tuple(sorted(trips_s)),
            out=out,
            back=back,
            path_bytes=self._path_bytes(stats),
            route_mtu=interface_mtu(parse_address(self._peer.address)),
            peer_mbit=peer_mbit,
            has_gso=stats.socket.has_gso,
        )

    def _path_bytes(self, stats: Stats) -> int:
        return next(path.path_mtu_bytes for path in stats.peers if path.peer == self._peer)

    def _round_trips(self) -> list[float]:
        payload = os.urandom(PING_BYTES)
        found: list[float] = []
        end_s = time.monotonic() + self._seconds
        while len(found) < PINGS_MIN or (len(found) < PINGS_MAX and time.monotonic() < end_s):
            started_s = time.monotonic()
            self._node.publish(payload, PING, to=self._peer)
            answer = self._wait_for(PING, ANSWER_S)
            found.append(time.monotonic() - started_s)
            if answer != payload:
                raise LinkError(f"{self._peer.address} answers a ping with other bytes")
        return found

    def _out(self) -> Flow:
        self._ask("reset")
        sent = send_bulk(self._node, self._peer, self._seconds, lambda _: None)
        return self._flow(sent, self._ask("count"), self._tcp_rate("tcp out"))

    def _back(self) -> Flow:
        self._tally.reset(self._peer)
        told = self._ask("send", self._seconds)
        return self._flow(Sent(**told), self._tally.report(self._peer), self._tcp_rate("tcp back"))

    def _flow(self, sent: Sent, came: dict[str, Any], tcp_bytes_per_s: float | None) -> Flow:
        return Flow(
            seconds=sent.seconds,
            sent_bytes=sent.nbytes,
            received_bytes=came["bytes"],
            datagrams=sent.datagrams,
            resent_datagrams=sent.resent_datagrams,
            kernel_drops=came["kernel_drops"],
            sender_cpu=sent.cpu_s / sent.seconds,
            receiver_cpu=came["cpu_s"] / sent.seconds,
            tcp_bytes_per_s=tcp_bytes_per_s,
        )

    def _tcp_rate(self, what: str) -> float | None:
        told = self._ask(what, self._seconds)
        host = parse_address(self._peer.address)[0]
        token = bytes.fromhex(told["token"])
        return tcp.rate((host, told["port"]), token, self._seconds, sends=what == "tcp out")

    def _ask(self, what: str, seconds: float = 0.0) -> dict[str, Any]:
        question = json.dumps({"do": what, "seconds": seconds}).encode()
        self._node.publish(question, ASK, to=self._peer)
        told: dict[str, Any] = json.loads(bytes(self._wait_for(TELL, seconds + 2 * ANSWER_S)))
        if "error" in told:
            raise LinkError(f"{self._peer.address}: {told['error']}")
        return told

    def _wait_for(self, tag: int, timeout_s: float) -> memoryview:
        """Return the next message of the peer with this tag; count the bulk that comes before it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            for message in self._tally.take(self._node.receive(timeout_s=0.1)):
                if message.tag == tag and message.peer == self._peer:
                    return message.payload
            if self._peer not in self._node.peers:
                raise LinkError(f"{self._peer.address} was lost in the middle of the test")
        raise LinkError(f"{self._peer.address} has not answered for {timeout_s:.0f} s")
