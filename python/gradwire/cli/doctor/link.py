"""A test of the link between two machines: one doctor serves, the other measures, both with ordinary nodes.

Tags tell messages apart: questions and answers are JSON, pings come back unchanged, bulk is dropped. Only a peer with
the secret can ask, and the work for one question is bounded in time.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gradwire.errors import TransportError
from gradwire.slices import datagram_hint
from gradwire.transport import Node, Peer, Received, Ticket, parse_secret
from gradwire.transport.addressing import parse_address, resolve_all
from gradwire.transport.secret import fingerprint

from .machine import Check, slow_if

# Tags of messages: question, answer, ping, and bulk to measure the rate.
ASK, TELL, PING, BULK = range(1, 5)
BULK_BYTES = 1 << 20
BULKS_IN_FLIGHT = 4
PING_BYTES = 1_024
PINGS_MIN = 20
PINGS_MAX = 2_000
QUESTION_BYTES_MAX = 256
SECONDS_MAX = 60.0  # of one measurement
CONNECT_S = 3.0
ANSWER_S = 10.0
STALL_S = 30.0  # without an acknowledgement
# Limits of a good link: the clocks, the share of datagrams sent again, and the 99th percentile of round trips, in
# seconds and in medians.
CLOCKS_APART_MAX_S = 60.0
RESENT_SHARE_MAX = 0.02
TAIL_MIN_S = 0.01
TAIL_MEDIANS_MAX = 20.0


class LinkError(Exception):
    """The test could not be completed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One direction: goodput, the share of the datagrams sent again, and datagrams dropped by the receiver's kernel."""

    bytes_per_s: float
    resent_share: float
    kernel_drops: int = 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """The result of a test.

    Attributes:
        peer: "host:port" of the serving doctor.
        round_trip_p50_s: median round trip of a message of 1 KB.
        round_trip_p99_s: 99th percentile of the same.
        out: to the peer.
        back: from the peer.
        clock_ahead_s: wall clock minus the peer's.
        has_gso: whether several datagrams leave with one call.
    """

    peer: str
    round_trip_p50_s: float
    round_trip_p99_s: float
    out: Flow
    back: Flow
    clock_ahead_s: float
    has_gso: bool


def doctors_secret(secret: bytes) -> bytes:
    """Return the secret that doctors use, derived from the cluster's, so that no node of the cluster connects."""
    return hmac.digest(secret, b"gradwire doctor 1", "sha256")


class End:
    """One end of the test: a node, and the messages that arrived while it sent bulk."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._inbox: deque[Received] = deque()

    def messages(self, timeout_s: float) -> Iterator[Received]:
        """Yield the messages that have arrived, bulk excepted."""
        self._receive(0.0 if self._inbox else timeout_s)
        while self._inbox:
            yield self._inbox.popleft()

    def _receive(self, timeout_s: float) -> None:
        received = self.node.receive(timeout_s)
        self._inbox.extend(message for message in received if message.tag != BULK)

    def send_bulk(self, peer: Peer, seconds: float) -> dict[str, Any]:
        """Send messages of 1 MB until all are acknowledged, and return fields of a `Flow`."""
        payload = os.urandom(BULK_BYTES)
        sent = 0
        tickets: deque[Ticket] = deque()
        before = self.node.stats()
        started_s = time.monotonic()
        progress_s = started_s
        while tickets or time.monotonic() - started_s < seconds:
            while len(tickets) < BULKS_IN_FLIGHT and time.monotonic() - started_s < seconds:
                tickets.append(self.node.publish(payload, BULK, to=peer))
                sent += 1
            self._receive(0.001)
            while tickets and tickets[0].is_done:
                progress_s = time.monotonic()
                if tickets.popleft().failed:
                    raise LinkError(f"{peer.address} was lost during the test")
            if time.monotonic() - progress_s > STALL_S:
                raise LinkError(
                    f"{peer.address} has acknowledged nothing for {STALL_S:.0f} s; {datagram_hint(self.node)}"
                )
        after = self.node.stats()
        elapsed_s = time.monotonic() - started_s
        datagrams = after.datagrams_sent - before.datagrams_sent
        resent = after.retransmitted_fragments - before.retransmitted_fragments
        rate = sent * BULK_BYTES / elapsed_s
        return {"bytes_per_s": rate, "resent_share": resent / max(1, datagrams)}


# ---- the side that answers ------------------------------------------------------------------------------------------


def answer(end: End, timeout_s: float = 0.5) -> None:
    """Answer the messages that have arrived."""
    for peer, tag, payload in end.messages(timeout_s):
        try:
            if tag == PING:
                end.node.publish(payload, PING, to=peer)
            elif tag == ASK:
                end.node.publish(json.dumps(_answer(end, peer, payload)).encode(), TELL, to=peer)
        except TransportError as error:  # the peer has left
            print(f"{peer.address}: {error}", flush=True)


def _answer(end: End, peer: Peer, question: memoryview) -> dict[str, Any]:
    try:
        if len(question) > QUESTION_BYTES_MAX:
            raise ValueError(f"{len(question)} bytes are too many")
        asked = json.loads(bytes(question))
        task = asked["do"]
        seconds = float(asked["seconds"])
        if not 0.0 <= seconds <= SECONDS_MAX:
            raise ValueError(f"{seconds} s; at most {SECONDS_MAX:.0f}")
        if task == "state":
            return {"wall_s": time.time(), "kernel_drops": end.node.stats().kernel_drops}
        if task == "send":
            print(f"sending to {peer.address} for {seconds:g} s", flush=True)
            # The node keeps all that follows what a killed doctor has not acknowledged, until that counts as lost.
            end.node.drain(STALL_S)
            return end.send_bulk(peer, seconds)
        raise ValueError(task)
    except (LinkError, TransportError) as error:
        return {"error": str(error)}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"a question that this version does not know ({error!r})"}


def serve(bind: str, mask: str | None) -> int:
    """Answer other doctors until interrupted, and return the exit status."""
    with Node(bind, secret=doctors_secret(parse_secret(None)), network_mask=mask) as node:
        end = End(node)
        port = node.address.rpartition(":")[2]
        invitation = f"on another machine: gradwire doctor HOST:{port}"
        print(f"serving at {node.address}; {invitation}", flush=True)
        # A handler, because an exception at any place could be swallowed there.
        stop = threading.Event()
        signal.signal(signal.SIGINT, lambda *_: stop.set())
        while not stop.is_set():
            answer(end)
    print("done", flush=True)
    return 0


# ---- the side that measures -----------------------------------------------------------------------------------------


def measure(
    target: str, seconds: float = 3.0, bind: str = "0.0.0.0:0", mask: str | None = None
) -> Link:
    """Measure rate and latency to "host:port", where ``gradwire doctor --serve`` runs with the same secret.

    ``seconds`` is the time of each measurement: round trips, to the peer, from the peer.

    Raises:
        ValueError: an address or the secret of the environment cannot be used.
        TimeoutError: no doctor with the same secret answers.
        LinkError: the peer was lost or does not answer any more.
    """
    key = doctors_secret(parse_secret(None))
    with Node(bind, [target], secret=key, network_mask=mask) as node:
        [peer, *_] = node.wait_for_peers(1, CONNECT_S)
        try:
            return measure_peer(End(node), peer, target, seconds)
        except TransportError as error:
            raise LinkError(str(error)) from error


def measure_peer(end: End, peer: Peer, target: str, seconds: float) -> Link:
    """Measure the link to a connected peer, which answers."""
    asked_s = time.time()
    state = ask(end, peer, "state")
    ahead_s = (asked_s + time.time()) / 2.0 - float(state["wall_s"])
    trips_s = sorted(_round_trips(end, peer, seconds))
    sent = end.send_bulk(peer, seconds)
    sent["kernel_drops"] = ask(end, peer, "state")["kernel_drops"] - state["kernel_drops"]
    drops = end.node.stats().kernel_drops
    came = ask(end, peer, "send", seconds)
    stats = end.node.stats()
    return Link(
        peer=target,
        round_trip_p50_s=trips_s[len(trips_s) // 2],
        round_trip_p99_s=trips_s[len(trips_s) * 99 // 100],
        out=Flow(**sent),
        back=Flow(**came, kernel_drops=stats.kernel_drops - drops),
        clock_ahead_s=ahead_s,
        has_gso=stats.socket.has_gso,
    )


def _round_trips(end: End, peer: Peer, seconds: float) -> list[float]:
    payload = os.urandom(PING_BYTES)
    end_s = time.monotonic() + seconds
    trips_s: list[float] = []
    while len(trips_s) < PINGS_MIN or (len(trips_s) < PINGS_MAX and time.monotonic() < end_s):
        started_s = time.monotonic()
        end.node.publish(payload, PING, to=peer)
        _wait_for(end, peer, PING, ANSWER_S)
        trips_s.append(time.monotonic() - started_s)
    return trips_s


def ask(end: End, peer: Peer, task: str, seconds: float = 0.0) -> dict[str, Any]:
    """Return the peer's answer to a question."""
    end.node.publish(json.dumps({"do": task, "seconds": seconds}).encode(), ASK, to=peer)
    # A peer that sends notices by itself if nothing arrives, and answers with what helps.
    work_s = seconds + STALL_S if seconds else ANSWER_S
    payload = _wait_for(end, peer, TELL, work_s + ANSWER_S)
    reply: dict[str, Any] = json.loads(bytes(payload))
    if "error" in reply:
        raise LinkError(f"{peer.address}: {reply['error']}")
    return reply


def _wait_for(end: End, peer: Peer, tag: int, timeout_s: float) -> memoryview:
    """Return the next message of the peer with this tag."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        for message in end.messages(timeout_s=0.1):
            if message.peer == peer and message.tag == tag:
                return message.payload
        if peer not in end.node.peers:
            raise LinkError(f"{peer.address} was lost during the test")
    raise LinkError(f"{peer.address} has not answered for {timeout_s:.0f} s")


# ---- verdicts -------------------------------------------------------------------------------------------------------


def check(
    target: str, seconds: float, bind: str, mask: str | None
) -> tuple[list[Check], Link | None]:
    """Measure the link and return the checks, and the measurement if there is one."""
    try:
        link = measure(target, seconds, bind, mask)
    except ValueError as error:
        helps = (f"getent hosts {target.rpartition(':')[0]}",)
        return [Check("peer", "FAIL", str(error), helps)], None
    except TimeoutError:
        return [_silent(target, is_refused=is_refused(target, bind))], None
    except LinkError as error:
        return [Check("link", "FAIL", str(error))], None
    return [Check("peer", "ok", f"{target} has the same secret"), *judge(link)], link


def _silent(target: str, *, is_refused: bool) -> Check:
    port = target.rpartition(":")[2]
    wildcard = "[::]" if target.startswith("[") else "0.0.0.0"  # noqa: S104
    serve_there = (
        f"gradwire doctor --serve --bind {wildcard}:{port}   # there, with no node running"
    )
    if is_refused:
        return Check("peer", "FAIL", f"no program listens on UDP port {port} there", (serve_there,))
    says = f"{target} does not answer: no doctor serves there, another secret, or a firewall"
    here = fingerprint(parse_secret(None))
    compare = f"compare the fingerprint of the secret there with the one of this machine: {here}"
    helps = (serve_there, compare, f"sudo ufw allow {port}/udp   # there")
    return Check("peer", "FAIL", says, helps)


def is_refused(target: str, bind: str) -> bool:
    """Return whether the system reports that no program listens at an address."""
    address = resolve_all(target, like=parse_address(bind))[0]
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.settimeout(0.5)
        probe.connect(address)
        probe.send(b"\0")
        try:
            probe.recv(1)
        except ConnectionRefusedError:
            return True
    return False


def judge(link: Link) -> Iterator[Check]:
    """Yield the checks of a measured link."""
    apart_s = abs(link.clock_ahead_s)
    median_s = link.round_trip_p50_s
    tail_s = link.round_trip_p99_s
    interface = f"INTERFACE   # that of: ip route get {link.peer.rpartition(':')[0]}"
    says = f"{apart_s:.3g} s {'ahead of' if link.clock_ahead_s > 0 else 'behind'} the peer's"
    help_ = "sudo timedatectl set-ntp true   # on both machines"
    yield slow_if(apart_s > CLOCKS_APART_MAX_S, "wall clocks", says, help_)
    says = f"1 KB there and back: p50 {median_s * 1e3:.3g} ms, p99 {tail_s * 1e3:.3g} ms"
    help_ = "losses, other load on either machine, power saving, wifi"
    yield slow_if(tail_s > max(TAIL_MIN_S, TAIL_MEDIANS_MAX * median_s), "round trip", says, help_)
    says = "several datagrams" if link.has_gso else "one datagram"
    help_ = f"sudo ethtool -K tx on {interface}"
    yield slow_if(not link.has_gso, "GSO on the link", f"{says} leave with one call", help_)
    for name, flow in (("to the peer", link.out), ("from the peer", link.back)):
        says = f"{flow.resent_share:.2%} of the datagrams sent again, {flow.kernel_drops} dropped by the kernel"
        help_ = f"ethtool -S {interface}"
        if flow.kernel_drops:
            help_ = "gradwire doctor   # on the receiving machine: larger socket buffers"
        yield slow_if(flow.resent_share > RESENT_SHARE_MAX, f"loss {name}", says, help_)
        rate = f"{flow.bytes_per_s / 1e6:,.1f} MB/s in messages of 1 MB"
        yield Check(f"goodput {name}", "ok", rate)
