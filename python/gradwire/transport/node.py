"""The public face of the transport: one node, its own I/O thread, and blocking calls with timeouts."""

from __future__ import annotations

import logging
import operator
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final

from ..errors import Closed, TransportError, WouldBlock
from .addressing import choose_address, local_address, resolve
from .buffers import flat_view
from .coalesce import Coalesce, ask
from .driver import Driver, Waker, interface_mtu, now_s
from .endpoint import Endpoint
from .model import Event, Limits, Peer, Received, Stats, Ticket, format_address, parse_address
from .secret import fingerprint, parse_secret
from .watchers import Watchers, wait_s

logger = logging.getLogger(__name__)

# Who waits in `receive` does the I/O, and so for this long after it: the thread leaves the socket alone meanwhile.
LEASE_S: Final = 0.003
TICK_S: Final = 0.001  # by which timers may be late rather than wake a thread
OVERDUE_S: Final = 0.0002
LONG_S: Final = 0.0005  # without a look at the socket: a round trip of a fast network
STREAM_S: Final = 0.002  # who looks again so soon, publishing, goes on with that
SWITCH_INTERVAL_S: Final = 0.0005
RECHECK_S: Final = 0.25  # of several waiting threads only one hears the bell
CLOSE_LINGER_S: Final = 0.5
PATIENCE_S: Final = 3.0  # after it a caller who waits for peers is told who is missing


class Node:
    """Sends messages to its peers and receives theirs: whole, once, in order, authenticated.

    All methods may be called from any thread. A node belongs to the process that made it: after a fork the child has to
    make its own.

    Args:
        bind: "host:port" to listen on; port 0 lets the system choose; a wildcard host fixes only the port.
        peers: addresses of other nodes; one of two nodes knowing the other is enough; the own address is ignored.
        secret: the cluster secret, 32 random bytes or their hex or base64 form, or the path (`pathlib.Path`) of a file
            with one of the three; by default that of GRADWIRE_SECRET, or in the file that GRADWIRE_SECRET_FILE names.
        network_mask: such as "10.1.1.0/24"; the one local address inside it is used.
        advertise: "host:port" under which others reach this node, where that differs (NAT, containers, clouds).
        limits: bounds and timers.
        node_id: identity, 64 bits; by default random. Two live nodes must not share one.
        multicast: "group:port" that records may be sent to, the same on all nodes; who does not hear it is served by
            unicast, which is also the default.
        multicast_hops: how far they may go: 1 is the own subnet.
        on_lag: what happens when a peer stops acknowledging: "block" (the send log fills, `publish` raises
            `WouldBlock`), "evict" (it is dropped after ``limits.lag_s``) or "coalesce" (after ``limits.lag_s``, or when
            what waits for it fills a quarter of a log that is half full, ``coalesce`` is asked to make less of it).
        coalesce: with ``on_lag="coalesce"``, called as ``coalesce(peer, backlog)`` with the messages, as `Backlogged`
            (tag, payload), of which nothing has been sent to this peer; returns the (tag, buffer) to send instead, in
            order: fewer bytes and not more messages. Updates add up, so this is their sum. The same messages again
            change nothing. The tickets of the messages then follow the substitutes. It runs in a thread of its own,
            without a lock of the node; while it runs nothing more of the backlog is sent. An exception in it is logged,
            and the backlog stays. Not together with ``multicast``.
        insecure: neither encrypt nor authenticate; for benchmarks only.
        offload: use GSO and GRO where the system has them.
        switch_interval_s: upper bound for `sys.setswitchinterval`, without which a busy main thread starves the I/O
            thread (28 instead of 350 MB/s); None leaves it alone.

    Raises:
        ValueError: an address, mask, secret or limit that cannot be used.
        TypeError: an argument of the wrong kind.
        OSError: the address cannot be bound.

    Example:
        >>> secret = bytes(range(32))
        >>> with Node("127.0.0.1:0", secret=secret) as one, Node("127.0.0.1:0", [one.address], secret=secret) as two:
        ...     peers = one.wait_for_peers(1, timeout_s=5.0)
        ...     ticket = one.publish(b"update", tag=7)
        ...     [(peer, tag, payload)] = two.receive(timeout_s=5.0)
        ...     tag, bytes(payload), peer == one.peer
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
        multicast: str | None = None,
        multicast_hops: int = 1,
        on_lag: str = "block",
        coalesce: Coalesce | None = None,
        insecure: bool = False,
        offload: bool = True,
        switch_interval_s: float | None = SWITCH_INTERVAL_S,
    ) -> None:
        if on_lag not in ("block", "evict", "coalesce"):
            raise ValueError(f'on_lag is {on_lag!r}; it must be "block", "evict" or "coalesce"')
        if (on_lag == "coalesce") != (coalesce is not None):
            raise ValueError('on_lag="coalesce" and coalesce=hook go together: one is missing')
        if coalesce is not None and multicast is not None:
            raise ValueError('on_lag="coalesce" does not go with multicast')
        if coalesce is not None and not callable(coalesce):
            raise TypeError(f"coalesce must be a function of (peer, backlog), got {coalesce!r}")
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(f"limits must be Limits(...), got {limits!r}")
        if isinstance(peers, str):
            raise ValueError(f"peers is the text {peers!r}; it must be a list of addresses")
        if node_id is not None and not 0 <= operator.index(node_id) < 1 << 64:
            raise ValueError(f"node_id is {node_id}; it must fit 64 bits")
        key = bytes(32) if insecure else parse_secret(secret)
        self._secret_name = (
            "no secret" if insecure else f"the secret with fingerprint {fingerprint(key)}"
        )
        seeds = list(peers)
        chosen = choose_address(parse_address(bind), network_mask)
        if advertise is not None:
            parse_address(advertise)
        if not 1 <= multicast_hops <= 255:
            raise ValueError(f"multicast_hops is {multicast_hops}; it must be 1 to 255")
        group = None if multicast is None else parse_address(multicast)
        self._driver = Driver(chosen, offload=offload, group=group, hops=multicast_hops)
        self._address = advertise or format_address(local_address(self._driver.address, seeds))
        self._endpoint = Endpoint(
            key,
            now_s(),
            node_id=secrets.randbits(64) if node_id is None else node_id,
            incarnation=time.time_ns() // 1_000_000,
            limits=limits,
            advertise=advertise or "",
            insecure=insecure,
            multicast=group,
            on_lag=on_lag,
            interface_mtu=interface_mtu,
            socket_buffer_bytes=self._driver.stats().receive_buffer_bytes,
        )
        self._send_data = partial(self._driver.transmit_data, self._endpoint)
        self._peer = Peer(self._endpoint.node_id, self._endpoint.incarnation, self._address)
        self._coalesce = coalesce
        self._is_coalescing = False
        self._lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._thread_waker = Waker(has_alarm=True)
        self._caller_waker = Waker()
        self._callers_waiting = 0
        self._watchers = Watchers()
        self._process = os.getpid()
        self._is_closed = False
        self._polled_at_s = self._leased_until_s = float("-inf")
        self._sleeps_until_s = 0.0
        self._is_watching = False
        self._add_seeds(seeds)
        if switch_interval_s is not None and sys.getswitchinterval() > switch_interval_s:
            sys.setswitchinterval(switch_interval_s)
        self._thread = threading.Thread(target=self._run, name="gradwire-io", daemon=True)
        self._thread.start()

    def _add_seeds(self, seeds: list[str]) -> None:
        own = {self._address, format_address(self._driver.address)}
        for seed in seeds:
            address = resolve(seed, like=self._driver.address)
            if seed not in own and format_address(address) not in own:
                self._endpoint.connect(address)

    # ---- who is there -------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The "host:port" at which others can reach this node."""
        return self._address

    @property
    def peer(self) -> Peer:
        """This node as the others see it."""
        return self._peer

    @property
    def id(self) -> int:
        """This node's identity: the `Peer.id` that the others see."""
        return self._peer.id

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The connected peers, in order."""
        self._check_process()
        with self._lock:
            return self._endpoint.peers

    @property
    def seeds(self) -> frozenset[str]:
        """The addresses of other nodes that this one was told of, resolved, without its own."""
        self._check_process()
        with self._lock:
            return frozenset(map(format_address, self._endpoint.membership.seeds()))

    def add_peer(self, address: str) -> None:
        """Connect to one more node and stay connected.

        Raises:
            ValueError: not an address, or its name cannot be resolved.
        """
        self._check_open()
        with self._lock:
            self._add_seeds([address])
        self._thread_waker.ring()

    def wait_for_peers(self, count: int, timeout_s: float) -> tuple[Peer, ...]:
        """Wait until at least ``count`` peers are connected, and return them; the log tells who is missing meanwhile.

        Raises:
            TimeoutError: fewer came in time; the message names both sides, as far as they are known here.
            Closed: the node has been closed.
        """
        patience_s = min(PATIENCE_S, timeout_s)
        if self._pump_until(lambda: len(self._endpoint.peers) >= count, patience_s):
            return self.peers
        if patience_s < timeout_s:
            logger.warning("%s", self._who_is_missing(count, patience_s))
            if self._pump_until(lambda: len(self._endpoint.peers) >= count, timeout_s - patience_s):
                return self.peers
        raise TimeoutError(self._who_is_missing(count, timeout_s))

    def _who_is_missing(self, count: int, waited_s: float) -> str:
        with self._lock:
            unanswered = self._endpoint.unanswered()
            strangers = self._endpoint.doorway.strangers
            refused, last = strangers.count, strangers.last
        text = (
            f"{len(self.peers)} of {count} peers connected to {self._address} within {waited_s:g} s"
        )
        if unanswered:
            names = ", ".join(map(format_address, unanswered))
            text += f"; no answer from {names}: is a node running there, of this version, with {self._secret_name}?"
        if last is not None:
            text += (
                f"; {refused} first messages of nodes with another secret or version were not answered, "
                f"the last from {format_address(last)}; this node has {self._secret_name}"
            )
        return text

    def events(self) -> list[Event]:
        """Return and forget what happened to peers: `PeerJoined` and `PeerLost`; the last 1,024 are kept."""
        self._check_process()
        with self._lock:
            return self._endpoint.take_events()

    def stats(self) -> Stats:
        """Return a snapshot of the counters; a closed node has no socket to tell about."""
        self._check_process()
        with self._lock:
            stats = self._endpoint.stats()
            return stats if self._is_closed else replace(stats, socket=self._driver.stats())

    # ---- messages -----------------------------------------------------------------------------------------------

    def publish(self, buffer: object, tag: int = 0, to: Peer | None = None) -> Ticket:
        """Send a message to all connected peers, or to one. Never blocks.

        The message is sealed before this returns, so the buffer may be changed at once.

        Args:
            buffer: anything contiguous with the buffer protocol; not modified.
            tag: a number for the receiver, 64 bits unsigned; usually the step.
            to: one connected peer; None means all that are connected now.

        Returns:
            A ticket that follows the message; complete and empty if nobody is connected.

        Raises:
            WouldBlock: no room in the send log: some peer has not acknowledged enough.
            NotConnected: ``to`` is not connected.
            TooLarge: larger than ``limits.message_bytes_max``.
            Closed: the node has been closed.
            ValueError: ``tag`` does not fit.
            TypeError: ``buffer`` has no contiguous buffer, ``tag`` is no int, or ``to`` no peer.
        """
        if not 0 <= operator.index(tag) < 1 << 64:
            raise ValueError(f"tag is {tag}; it must fit 64 bits unsigned")
        if to is not None and not isinstance(to, Peer):
            raise TypeError(f"to must be one of node.peers or None, got {to!r}")
        payload = flat_view(buffer)
        self._check_open()
        with self._lock:
            started_s = now_s()
            try:
                ticket = self._endpoint.publish(payload, tag, to, started_s, self._send_data)
            except WouldBlock:
                self._pump()  # acknowledgements may be waiting in the socket
                ticket = self._endpoint.publish(payload, tag, to, started_s, self._send_data)
            self._look_while_publishing()
            self._nudge(self._driver.transmit(self._endpoint))
        return ticket

    def _look_while_publishing(self) -> None:
        """Take what waits in the socket if it is time, or acknowledgements count as late; the lock is held.

        A stream of messages needs no I/O thread: two threads that take turns cost more than what they do.
        """
        time_s = now_s()
        unseen_s = time_s - self._polled_at_s
        if unseen_s > LONG_S:
            self._driver.receive(self._endpoint)
            self._tell_others()
            self._polled_at_s = time_s
            if unseen_s < STREAM_S and not self._watchers:
                self._leased_until_s = max(self._leased_until_s, time_s + LEASE_S)

    def has_room(self, nbytes: int) -> bool:
        """Whether `publish` would take a message of this size now instead of raising `WouldBlock`."""
        self._check_open()
        with self._lock:
            if self._endpoint.has_room(nbytes):
                return True
            self._nudge(self._pump())
            return self._endpoint.has_room(nbytes)

    def receive(self, timeout_s: float = 0.0) -> list[Received]:
        """Return the messages that have come, oldest first; wait up to ``timeout_s`` for at least one.

        The payloads are read-only views without a copy; each stays valid as long as it is referenced.

        Raises:
            Closed: the node has been closed and nothing is left.
        """
        messages: list[Received] = []

        def take() -> bool:
            messages.extend(self._endpoint.take_messages(now_s()))
            return bool(messages)

        self._pump_until(take, timeout_s)
        return messages

    def drain(self, timeout_s: float) -> bool:
        """Wait until every connected peer has acknowledged everything; return whether it has."""
        return self._pump_until(lambda: self._endpoint.is_drained, timeout_s)

    # ---- asyncio ------------------------------------------------------------------------------------------------

    async def apublish(self, buffer: object, tag: int = 0, to: Peer | None = None) -> Ticket:
        """Like `publish`, but wait for room instead of raising `WouldBlock`."""
        self._check_open()
        payload = flat_view(buffer)
        is_due = True
        while True:
            with self._lock:
                changed = self._watchers.add()
                is_due = is_due or self._endpoint.has_room(payload.nbytes)
            if is_due:
                with suppress(WouldBlock):
                    return self.publish(payload, tag, to)
                # Trying moves datagrams, which wakes all who wait: from here on only the I/O thread's count.
                with self._lock:
                    changed = self._watchers.add()
            await wait_s(changed, RECHECK_S)
            is_due = not changed.done()

    async def areceive(self, timeout_s: float | None = None) -> list[Received]:
        """Like `receive`, without blocking the event loop; by default it waits until something comes."""
        end_s = float("inf") if timeout_s is None else now_s() + timeout_s
        messages = self.receive(timeout_s=0.0)
        self._leased_until_s = float("-inf")  # from here on the I/O thread watches the socket
        self._thread_waker.ring()
        while not messages and now_s() < end_s:
            self._check_open()
            with self._lock:
                changed = self._watchers.add()
                messages = self._take_arrived()
            if not messages:
                await wait_s(changed, min(RECHECK_S, max(0.0, end_s - now_s())))
        return messages

    def _take_arrived(self) -> list[Received]:
        """Take the messages that are here, without a look at the socket; the lock is held."""
        messages = list(self._endpoint.take_messages(now_s()))
        if messages:
            self._nudge(self._driver.transmit(self._endpoint))  # what was taken makes room
        return messages

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> list[tuple[Peer, Ticket]]:
        """Deliver what is queued, say goodbye and stop; a second call does nothing but wait for the first.

        Args:
            timeout_s: the longest time to wait for acknowledgements.

        Returns:
            (peer, ticket) of every message that a peer has not acknowledged.
        """
        if os.getpid() != self._process:
            return []
        with self._close_lock:
            return [] if self._is_closed else self._close(timeout_s)

    def _close(self, timeout_s: float) -> list[tuple[Peer, Ticket]]:
        end_s = now_s() + timeout_s
        with self._lock:
            self._endpoint.stop_publishing()
        self._pump_until(lambda: self._endpoint.is_drained, timeout_s)
        with self._lock:
            undelivered = self._endpoint.undelivered()
            self._endpoint.close(now_s())
        self._pump_until(
            lambda: self._endpoint.is_closed, max(0.05, min(end_s - now_s(), CLOSE_LINGER_S))
        )
        with self._lock:
            self._endpoint.finish(now_s())
            self._driver.transmit(self._endpoint)
            self._is_closed = True
        self._thread_waker.ring()
        self._caller_waker.ring()
        self._thread.join()
        for each in (self._driver, self._thread_waker, self._caller_waker):
            each.close()
        return undelivered

    def __enter__(self) -> Node:
        """Return the node."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the node; after an exception without waiting for acknowledgements."""
        self.close(timeout_s=5.0 if kind is None else 0.0)

    # ---- who moves the datagrams --------------------------------------------------------------------------------

    def _pump_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Do the I/O in the calling thread until ``done``: nothing is then handed from thread to thread."""
        self._check_open()
        end_s = now_s() + timeout_s
        while True:
            with self._lock:
                if self._is_closed:
                    raise Closed("the node is closed")
                time_s = now_s()
                if timeout_s > 0.0 or time_s - self._polled_at_s < STREAM_S:
                    self._leased_until_s = time_s + LEASE_S
                self._polled_at_s = time_s
                self._driver.receive(self._endpoint)
                is_done = done()
                # What `done` took makes room, so the sending comes after it: once instead of twice.
                due_s = self._driver.transmit(self._endpoint)
                self._tell_others()
                time_s = now_s()
                if is_done or time_s >= end_s:
                    self._nudge(due_s)
                    return is_done
                until_s = min(end_s, due_s, time_s + RECHECK_S)
                rest_s = self._driver.rest_s(self._endpoint)
                self._callers_waiting += 1
            try:
                self._driver.wait(until_s, self._caller_waker, rest_s=rest_s)
            finally:  # who interrupts a wait goes on without it, and the thread is not to count on him
                with self._lock:
                    self._callers_waiting -= 1

    def _pump(self) -> float:
        """Move datagrams, and return until when nothing is to be done; the lock is held."""
        due_s = self._driver.pump(self._endpoint)
        self._tell_others()
        return due_s

    def _tell_others(self) -> None:
        """Wake whoever waits for what the datagrams brought."""
        if self._callers_waiting:
            self._caller_waker.ring()
        if self._watchers:
            self._watchers.notify()
        if self._endpoint.doorway.strangers.has_news:
            self._tell_of_strangers()
        laggards = self._endpoint.laggards
        if laggards is not None and laggards.has_backlog and not self._is_coalescing:
            self._is_coalescing = True
            threading.Thread(
                target=self._coalesce_backlogs, name="gradwire-coalesce", daemon=True
            ).start()

    def _tell_of_strangers(self) -> None:
        for stranger in self._endpoint.doorway.strangers.take():
            logger.warning(
                "%s knocks at this node (%s, with %s) and gets no answer: %s",
                format_address(stranger.address),
                self._address,
                self._secret_name,
                stranger.why,
            )

    def _coalesce_backlogs(self) -> None:
        """Have the hook make less of what waits for slow peers; it runs without the lock, so it may use the node."""
        laggards, hook = self._endpoint.laggards, self._coalesce
        if laggards is None or hook is None:
            return
        with self._lock:
            backlogs = [] if self._is_closed else laggards.take_backlogs(now_s())
        for backlog in backlogs:
            substitutes = ask(hook, backlog)
            with self._lock:
                if not self._is_closed:
                    laggards.substitute(backlog, substitutes, now_s())
                    self._nudge(self._pump())
        with self._lock:
            self._is_coalescing = False

    def _run(self) -> None:
        """The I/O thread: serves acknowledgements, timers and arrivals while the caller computes."""
        while not self._is_closed:
            until_s, rest_s = now_s() + LEASE_S, 0.0
            is_watching = False
            if not self._lock.acquire(blocking=False):
                # Whoever has it moves the datagrams; to wait for it would cost both threads a switch.
                self._is_watching, self._sleeps_until_s = is_watching, until_s
            else:
                try:
                    self._thread_waker.calm()
                    left_until_s = self._left_to_caller_until_s()
                    is_watching = left_until_s is None
                    until_s = self._pump() if left_until_s is None else left_until_s
                    self._is_watching, self._sleeps_until_s = is_watching, until_s
                    if is_watching:
                        rest_s = self._driver.rest_s(self._endpoint)
                finally:
                    self._lock.release()
            self._driver.wait(until_s, self._thread_waker, for_datagrams=is_watching, rest_s=rest_s)

    def _left_to_caller_until_s(self) -> float | None:
        """Return how long some caller does the I/O; None if nobody does, or leaves timers behind."""
        time_s = now_s()
        if self._is_closed:
            return time_s
        if self._driver.deadline_s(self._endpoint) < time_s - OVERDUE_S:
            return None
        if self._callers_waiting:
            return time_s + RECHECK_S
        return self._leased_until_s if time_s < self._leased_until_s else None

    def _nudge(self, due_s: float) -> None:
        """Have the I/O thread awake for the next timer, and soon in any case if nobody watches the socket.

        The lock is held, by somebody who goes away.
        """
        if not self._is_watching and not self._callers_waiting:
            due_s = min(due_s, now_s() + LEASE_S)
        if due_s < self._sleeps_until_s - TICK_S:
            self._sleeps_until_s = due_s
            self._thread_waker.ring_at(due_s)

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise Closed("the node is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise TransportError(
                f"this node belongs to process {self._process}; after a fork the child (process {os.getpid()}) "
                "makes its own"
            )
