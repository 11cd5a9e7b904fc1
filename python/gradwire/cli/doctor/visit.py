"""A doctor at work: serving others, or visiting one of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.errors import TransportError
from gradwire.transport import Node
from gradwire.transport.addressing import choose_address
from gradwire.transport.model import parse_address

from . import gather
from .facts import Link, Machine
from .knock import doctors_secret, knock
from .link import Answerer, Asker, LinkError
from .verdicts import Check, Reached, judge_link, judge_reached, judge_wall_clock

KNOCK_S = 3.0
CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What came of a visit.

    Attributes:
        reached: who answered.
        link: what the test found, or None.
        problem: why the test broke off; empty if it did not.
        ahead_of_peer_s: wall clock minus the peer's, or None.
    """

    reached: Reached
    link: Link | None = None
    problem: str = ""
    ahead_of_peer_s: float | None = None


def serve(bind: str, network_mask: str | None, secret: bytes) -> int:
    """Answer other doctors until interrupted; return the exit status."""
    host, _ = choose_address(parse_address(bind), network_mask)
    with Node(bind, secret=doctors_secret(secret), network_mask=network_mask) as node:
        answerer = Answerer(node, host, lambda text: print(text, flush=True))
        port = node.address.rpartition(":")[2]
        print(
            f"serving at {host}:{port}; on another machine: gradwire doctor HOST:{port}", flush=True
        )
        # A handler, because an exception out of nowhere may fall into code that swallows it.
        stop = threading.Event()
        before = signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            while not stop.is_set():
                answerer.turn()
        finally:
            signal.signal(signal.SIGINT, before)
        print("done", flush=True)
    return 0


def visit(
    bind: str,
    network_mask: str | None,
    secret: bytes,
    target: str,
    seconds: float,
) -> Visit:
    """See who is at an address, and test the link if it is another doctor."""
    try:
        address = gather.resolved(target, like=bind)
    except ValueError:
        return Visit(reached="unknown host")
    reached = knock(address, secret, KNOCK_S)
    if reached != "doctor":
        return Visit(reached=reached)
    try:
        with Node(bind, [target], secret=doctors_secret(secret), network_mask=network_mask) as node:
            [peer, *_] = node.wait_for_peers(1, CONNECT_S)
            asker = Asker(node, peer, seconds)
            ahead_s, peer_mbit = asker.greet()
            return Visit(
                reached=reached,
                link=asker.examine(target, peer_mbit),
                ahead_of_peer_s=ahead_s,
            )
    except (LinkError, TimeoutError, TransportError) as error:
        return Visit(reached=reached, problem=str(error))


def judge(found: Visit, machine: Machine, target: str) -> Iterator[Check]:
    """Yield the verdicts of a visit."""
    yield judge_reached(target, found.reached, machine.secret.fingerprint)
    if found.problem:
        yield Check("link", "FAIL", found.problem)
    if found.ahead_of_peer_s is not None:
        yield judge_wall_clock(found.ahead_of_peer_s)
    if found.link is not None:
        yield from judge_link(found.link, machine)
