"""The public interface of the transport: one node, its I/O thread, and blocking calls with timeouts."""

from __future__ import annotations

import logging
import operator
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from .. import clock, rendezvous
from ..clock import repeat
from ..errors import Closed, NotCopied, TransportError, is_failure
from . import addressing
from .addressing import format_address, is_served_by, parse_address, resolve_all
from .driver import Driver, now_s
from .endpoint import Endpoint
from .handshake import LocalNode
from .secret import fingerprint, parse_secret
from .types import Address, Event, Limits, Peer, Received, Recipients, Stats, Ticket, flat_view

logger = logging.getLogger(__name__)

TICK_S: Final = 0.001  # by which timers may be late rather than wake the I/O thread
SWITCH_INTERVAL_S: Final = 0.0005  # with Python's 5 ms, a busy main thread starves the I/O thread
CLOSE_LINGER_S: Final = 0.5
PAUSE_S: Final = 0.05  # between two looks at another condition of whoever waits for peers
MISSING_LOG_S: Final = 3.0  # whoever waits longer for peers gets a log entry about the missing ones
LOOK_UP_S: Final = 5.0  # between two questions where missing peers are


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """Refuses a forked child, and a signal's handler in the middle of its thread's call: both would wait for ever."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __enter__(self) -> bool:
        if os.getpid() != self.pid:
            text = f"this node belongs to process {self.pid}; after a fork the child ({os.getpid()}) makes its own"
            raise TransportError(text)
        if self._is_owned():
            text = "a signal's handler has interrupted this node and cannot use it: set a flag, and act after the step"
            raise RuntimeError(text)
        try:
            return bool(super().__enter__())
        except BaseException:  # an interrupt, perhaps once the lock is there
            if self._is_owned():
                self.release()
            raise


class Node(NotCopied, instead="make a node in every process that has one"):
    """Sends messages to its peers and receives theirs: complete, once, in order, authenticated.

    All methods may be called from any thread, but only in the process that made the node, not in a forked child.

    Args:
        bind: "host:port" to listen on; port 0 lets the system choose; a wildcard host fixes only the port.
        peers: addresses of other nodes; of two nodes, one needs the other's address. The node's own address is ignored.
        secret: the cluster secret, 32 random bytes or their hex or base64 form, or the path (`pathlib.Path`) of a file
            with one of the three; by default the value of GRADWIRE_SECRET, or the file that GRADWIRE_SECRET_FILE names.
        network_mask: such as "10.1.1.0/24"; the one local address inside it is used.
        advertise: "host:port" under which others reach this node, where that differs (NAT, containers, clouds).
        limits: bounds and timers.
        node_id: identity, 64 bits; by default random. Two live nodes must not share one.
        on_lag: "block": a lagging peer fills the send log (`WouldBlock`); "evict": it is dropped after ``lag_s``.
        offload: use GSO and GRO where the system has them.

    Attributes:
        address, limits: the "host:port" at which others can reach this node; bounds and timers.
        id, peer: this node's identity; this node as its peers see it.
        names: names of the run's nodes by id, for error messages; from the launcher, see `from_env`.
        expected_peers: number of other nodes in the run; None: as many as there are addresses.

    Raises:
        ValueError, TypeError: an argument that cannot be used.
        OSError: the address cannot be bound.

    Example:
        >>> secret = bytes(range(32))
        >>> bind = "127.0.0.1:0"
        >>> with Node(bind, secret=secret) as sender, Node(bind, [sender.address], secret=secret) as receiver:
        ...     peers = sender.wait_for_peers(1, timeout_s=5.0)
        ...     ticket = sender.publish(b"update", tag=7)
        ...     [(peer, tag, payload)] = receiver.receive(timeout_s=5.0)
        ...     tag, bytes(payload), peer == sender.peer
        (7, b'update', True)
    """

    def __init__(
        self,
        bind: str = "0.0.0.0:0",
        peers: Iterable[str] = (),
        *,
        secret: bytes | str | os.PathLike[str] | None = None,
        network_mask: str | None = None,
        advertise: str | None = None,
        limits: Limits | None = None,
        node_id: int | None = None,
        on_lag: str = "block",
        offload: bool = True,
    ) -> None:
        if on_lag not in ("block", "evict"):
            raise ValueError(f'on_lag is {on_lag!r}; it must be "block" or "evict"')
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(f"limits must be Limits(...), got {limits!r}")
        if isinstance(peers, str):
            raise ValueError(f"peers is the text {peers!r}; it must be a list of addresses")
        if node_id is not None and not 0 <= operator.index(node_id) < 1 << 64:
            raise ValueError(f"node_id is {node_id}; it must fit 64 bits")
        key = parse_secret(secret)
        self._secret_name = f"the secret with fingerprint {fingerprint(key)}"
        chosen = addressing.choose_address(parse_address(bind), network_mask)
        # Everything that can fail comes before the socket, which an error would leave bound.
        seeds = {seed: resolve_all(seed, like=chosen) for seed in peers}
        advertised = "" if advertise is None else format_address(resolve_all(advertise, chosen)[0])
        if advertised:
            addressing.parse_numeric(advertised, chosen)  # as every peer will
        self._driver = Driver(chosen, offload=offload)
        first = [format_address(addresses[0]) for addresses in seeds.values()]
        shown = addressing.local_address(self._driver.address, first or addressing.ANYWHERE)
        self.address = advertised or format_address(shown)
        local = LocalNode(
            key,
            now_s(),
            node_id=secrets.randbits(64) if node_id is None else int(node_id),
            incarnation=time.time_ns() // 1_000_000,
            advertise=advertised,
            name=f"{self.address} (with {self._secret_name})",
        )
        parse = partial(addressing.parse_numeric, like=chosen)
        self.limits = limits or Limits()
        self._endpoint = Endpoint(local, self.limits, on_lag=on_lag, parse=parse)
        self.id = local.node_id
        self.names: dict[int, str] = {}
        self.expected_peers: int | None = None
        self.peer = Peer(self.id, local.incarnation, self.address)
        self._lock, self._close_lock = Lock(), Lock()
        self._changed = threading.Condition(self._lock)
        self._awaited: list[Callable[[], bool]] = []
        self._is_closed = False
        self._failure: Exception | None = None  # an internal error
        self._sleeps_until_s = 0.0
        self._named: dict[str, Address] = {}  # where each peer is that has been given by a name
        with self._lock:
            for seed, addresses in seeds.items():
                self._connect(seed, addresses)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="gradwire-io", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(cls, *, per_machine: bool = False, **options: Any) -> Node:
        """Return the node of this process in the run that the environment describes.

        The place in the run is torchrun's, `gradwire run`'s, SLURM's, Open MPI's, PMI's or an indexed Kubernetes job's.
        Every node's id is its rank; all connect to rank 0, at MASTER_ADDR:MASTER_PORT (UDP) or SLURM's or Kubernetes'
        first machine. ``GRADWIRE_PEERS``, ``GRADWIRE_BIND`` and ``GRADWIRE_MIN_PEERS`` take precedence, and ``options``
        above all. Without any of them the node is alone. ``per_machine``: a machine's processes make one node together.

        Raises:
            ValueError: a variable is missing or not what it has to be, or there is no secret for several nodes.
            TimeoutError: the name of another node's machine is not known within ten minutes.

        >>> with Node.from_env() as node:
        ...     node.expected_peers
        0
        """
        place = rendezvous.placement()
        if place.is_alone(per_machine=per_machine) and not rendezvous.has_secret():
            options.setdefault("secret", secrets.token_bytes(32))
        placed = rendezvous.await_names(place, place.node_options(per_machine=per_machine))
        node = cls(**{**placed, **options})
        node.names = place.names(per_machine=per_machine)
        node.expected_peers = place.expected_peers(per_machine=per_machine)
        return node

    def __repr__(self) -> str:
        with self._lock if os.getpid() == self._lock.pid else nullcontext():  # a child's is stuck
            state = "closed" if self._is_closed else f"{len(self._endpoint.peers)} peers"
        return f"<gradwire.Node {self.names.get(self.id, f'{self.id:016x}')} at {self.address}, {state}>"

    def _connect(self, name: str, addresses: list[Address]) -> None:
        others = [each for each in addresses if not is_served_by(each, self._driver.address)]
        others = [each for each in others if format_address(each) != self.address]
        if others and parse_address(name)[0] != others[0][0]:
            if not self._named:
                repeat(self._follow_names)
            self._named[name] = others[0]
        if len(others) > 1:
            text = "%s has %d addresses (%s) and counts as one peer: name every node, or give min_peers"
            logger.warning(text, name, len(others), ", ".join(map(format_address, others)))
        self._endpoint.connect(*others)
        self._driver.wake()

    def _follow_names(self) -> float | None:
        """Look the names of missing peers up again: a machine that takes another's place gets its name."""
        with self._lock:
            names = [each for each in self._named.items() if each[1] in self._endpoint.unanswered()]
        for name, before in names:
            with suppress(ValueError):  # nobody has the name now
                if before not in (addresses := resolve_all(name, like=self._driver.address)):
                    with self._lock:
                        self._endpoint.discovery.by_address.pop(before, None)
                        self._connect(name, addresses)
        return None if self._is_closed else LOOK_UP_S

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The connected peers, in order."""
        with self._lock:
            return self._endpoint.peers

    @property
    def seeds(self) -> frozenset[str]:
        """The given addresses of other nodes, resolved, without this node's own."""
        with self._lock:
            return frozenset(map(format_address, self._endpoint.discovery.seeds()))

    def add_peer(self, address: str) -> None:
        """Connect to one more node and stay connected; raise `ValueError` if the address cannot be used."""
        self._check_open()
        resolved = resolve_all(address, like=self._driver.address)
        with self._lock:
            self._connect(address, resolved)

    def wait_for_peers(
        self, count: int, timeout_s: float, until: Callable[[], bool] = bool
    ) -> tuple[Peer, ...]:
        """Wait for ``count`` peers, or until ``until()`` is true, and return the peers; the log names the missing ones.

        Raises:
            TimeoutError: fewer connected in time; the message names the missing ranks and addresses, and the rejected
                peers; after three seconds at once if a given address has another secret or version, or the id is taken.
        """
        self._check_open()
        started_s = now_s()
        log_s = min(MISSING_LOG_S, timeout_s)
        while True:
            waited_s = now_s() - started_s
            with self._lock:
                pause_s = min(PAUSE_S, timeout_s - waited_s)
                if self._wait_for(lambda: len(self._endpoint.peers) >= count, pause_s):
                    return self._endpoint.peers
                if not waited_s < timeout_s or self._is_hopeless(started_s):
                    raise TimeoutError(self._missing(count, f"within {waited_s:.3g} s"))
                if waited_s >= log_s:
                    logger.warning("%s", self._missing(count, f"yet, waiting {timeout_s:g} s"))
                    log_s = 2 * waited_s
            if until():
                return self.peers

    def _is_hopeless(self, since_s: float) -> bool:
        # Anybody can send an INIT, so those from elsewhere end nothing: the peer may still come.
        endpoint = self._endpoint
        noted = [endpoint.discovery.by_address[seed].misfit_at_s for seed in endpoint.unanswered()]
        return max([endpoint.twin_at_s, *noted]) >= since_s and now_s() >= since_s + MISSING_LOG_S

    def _missing(self, count: int, when: str) -> str:
        peers = self._endpoint.peers
        text = f"{len(peers)} of {count} peers connected to {self.address} {when}"
        present = {self.id, *(peer.id for peer in peers)}
        if missing := [name for node, name in sorted(self.names.items()) if node not in present]:
            text += f"; {', '.join(missing)} missing"
        if unanswered := self._endpoint.unanswered():
            text += f"; no answer from {', '.join(map(format_address, unanswered))}: is a node running there, of this "
            text += f"version, with {self._secret_name}, and does the firewall pass UDP?"
        elif not self._endpoint.counters.datagrams_received:
            version = "IPv6" if ":" in self._driver.address[0] else "IPv4"
            text += f"; no datagram has come: do firewall and router let UDP ({version}) in at this port?"
        if (rejected := self._endpoint.local.rejected).last is not None:
            text += f"; {rejected.count} INIT datagrams were not answered, the last from "
            text += f"{format_address(rejected.last)}: {rejected.reason}; this node has {self._secret_name}"
        return text

    def events(self) -> list[Event]:
        """Return and forget the peers' events, `PeerJoined` and `PeerLost`; the last 1,024 are kept."""
        with self._lock:
            return self._endpoint.take_events()

    def stats(self) -> Stats:
        """Return a snapshot of the counters; a closed node has no `Stats.socket`."""
        with self._lock:
            stats = replace(self._endpoint.stats(), kernel_drops=self._driver.kernel_drops)
            return stats if self._is_closed else replace(stats, socket=self._driver.stats())

    def publish(self, buffer: object, tag: int = 0, to: Recipients = None) -> Ticket:
        """Send a message to all connected peers, or to some, never block, and return a ticket that follows the message.

        Args:
            buffer: anything contiguous with the buffer protocol; sealed before this returns, so it may change at once.
            tag: a number for the receiver, 64 bits unsigned; usually the step.
            to: one connected peer, or those of several that are connected now; None means all that are.

        Raises:
            WouldBlock: the send log is full: some peer has not acknowledged enough.
            NotConnected: ``to`` is not connected.
            TooLarge: larger than ``limits.message_bytes_max``.
            Closed: the node has been closed, or has failed.
        """
        if not 0 <= operator.index(tag) < 1 << 64:
            raise ValueError(f"tag is {tag}; it must fit 64 bits unsigned")
        named = to if isinstance(to, Collection) else (to,)
        if to is not None and not all(isinstance(peer, Peer) for peer in named):
            raise TypeError(f"to must be one of node.peers, several, or None, got {to!r}")
        payload = flat_view(buffer)
        self._check_open()
        with self._lock:
            if not self._endpoint.has_room(len(payload)):
                self._pump()  # acknowledgements may be waiting in the socket
            ticket = self._endpoint.publish(payload, tag, to, now_s())
            self._pump(sends=True)  # ACKs make the message leave sooner
        return ticket

    def has_room(self, nbytes: int) -> bool:
        """Return whether `publish` would take a message of this size now instead of raising `WouldBlock`."""
        self._check_open()
        with self._lock:
            if not self._endpoint.has_room(nbytes):
                self._pump()
            return self._endpoint.has_room(nbytes)

    def drop_late(self, peers: Collection[Peer]) -> None:
        """End the connections with those of these peers that have acknowledged nothing of theirs for ``lag_s``."""
        self._check_open()
        with self._lock:
            self._endpoint.drop_late(peers, now_s())
            self._pump(sends=True)

    def receive(self, timeout_s: float = 0.0) -> list[Received]:
        """Return the messages that have come, oldest first; wait up to ``timeout_s`` for at least one.

        The payloads are read-only views without a copy; each stays valid as long as it is referenced.
        """
        self._check_open()
        with self._lock:
            self._wait_for(lambda: bool(self._endpoint.messages), timeout_s)
            has_waiting = self._endpoint.budget.has_waiting
            messages = self._endpoint.take_messages(now_s())
            if has_waiting:
                self._pump(sends=True)  # the space of the messages renews the senders' credit
        return messages

    def drain(self, timeout_s: float) -> bool:
        """Wait until every connected peer has acknowledged everything; return whether they have."""
        self._check_open()
        with self._lock:
            return self._wait_for(lambda: self._endpoint.is_drained, timeout_s)

    def close(self, timeout_s: float = 5.0) -> list[tuple[Peer, Ticket]]:
        """Deliver the queued messages, send a CLOSE and stop; a second call only waits for the first.

        Returns the (peer, ticket) of every message that is not acknowledged when nothing was for ``timeout_s``.
        """
        if os.getpid() != self._lock.pid:
            return []
        with self._close_lock:
            return [] if self._is_closed else self._close(timeout_s)

    def _close(self, timeout_s: float) -> list[tuple[Peer, Ticket]]:
        end_s = now_s() + timeout_s
        with self._lock:
            self._endpoint.refuse_messages()
            released, undelivered = -1, self._endpoint.undelivered()
            with suppress(Closed):  # the node has failed: nothing can be delivered any more
                while not self._wait_for(lambda: self._endpoint.is_drained, timeout_s):
                    if not timeout_s or released == (released := self._endpoint.log.base):
                        break
                undelivered = self._endpoint.undelivered()
                self._endpoint.close(now_s())
                self._pump(sends=True)  # the I/O thread may sleep for longer than this lingers
                linger_s = max(0.05, min(end_s - now_s(), CLOSE_LINGER_S))
                self._wait_for(lambda: self._endpoint.is_closed, linger_s)
                self._endpoint.finish(now_s())
                self._driver.transmit(self._endpoint)
            self._is_closed = True
            self._changed.notify_all()
        self._driver.wake()
        self._thread.join()
        self._driver.close()
        return undelivered

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(timeout_s=0.0 if is_failure(*error) else 5.0)

    def _wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Move datagrams once, then wait until the I/O thread finds that ``is_done``; return whether it is."""
        self._pump()
        if is_done() or not timeout_s > 0.0:
            return is_done()
        self._awaited.append(is_done)
        try:
            longest_s = clock.bounded_s(timeout_s)
            self._changed.wait_for(lambda: self._is_closed or self._failure or is_done(), longest_s)
        finally:
            self._awaited.remove(is_done)
        self._check_open()
        return is_done()

    def _move(self, *, sends: bool) -> float | None:
        """Receive, then send what may leave now, and return when to do so again; None: there was nothing to do."""
        try:
            if not self._driver.receive(self._endpoint) and not sends:
                return None
            due_s = self._driver.transmit(self._endpoint)
            if any(is_done() for is_done in self._awaited):
                self._changed.notify_all()
        except Exception as error:  # in any thread: a broken state must not seem to live
            logger.exception("the node at %s has failed", self.address)
            self._failure = error
            self._changed.notify_all()
            return 0.0
        return due_s

    def _pump(self, *, sends: bool = False) -> None:
        """Move datagrams, and wake the I/O thread if it would sleep past the next timer."""
        due_s = self._move(sends=sends)
        if due_s is not None and (due_s < self._sleeps_until_s - TICK_S or self._driver.unsent):
            self._sleeps_until_s = due_s
            self._driver.wake()
        self._check_open()

    def _run(self) -> None:
        """Serve acknowledgements, timers and arrivals while the callers compute (the I/O thread)."""
        while True:
            with self._lock:
                if self._is_closed or self._failure is not None:
                    return
                until_s = self._sleeps_until_s = self._move(sends=True) or 0.0
            self._driver.wait(until_s)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise Closed(f"the node has failed: {self._failure!r}") from self._failure
        if self._is_closed:
            raise Closed("the node is closed")
