"""A cluster in memory: several exchanges, one of them running at a time, with seeded delivery and a clock that jumps.

Every worker is a thread, but only one runs: it keeps the baton until it looks for messages, and the scheduler then
picks by its seed who goes on or which link delivers its next message. So a seed decides everything that happens.
Links keep their order, as the transport does, and are otherwise arbitrarily slow.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import pytest
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray

from gradwire import Exchange, clock
from gradwire.errors import NotConnected, TooLarge, WouldBlock
from gradwire.exchange.protocol import TAG_NUMBERS
from gradwire.transport import Peer, PeerJoined, PeerLost, Received, Stats

TURNS_MAX = 100_000


class Killed(BaseException):
    """The worker's node was killed: it ends as a killed process does, without a word."""


class FakeTicket:
    """Follows one published message; an exchange asks only whether every recipient has answered."""

    def __init__(self, recipients: frozenset[Peer], nbytes: int = 0) -> None:
        self._pending = set(recipients)
        self.nbytes = nbytes

    @property
    def is_done(self) -> bool:
        return not self._pending

    def settle(self, peer: Peer) -> None:
        self._pending.discard(peer)


class _Packet(NamedTuple):
    tag: int
    payload: memoryview
    ticket: FakeTicket


class FakeNode:
    """A node of the cluster, with the part of ``gradwire.Node`` that an exchange uses."""

    def __init__(self, cluster: Cluster, node_id: int, incarnation: int) -> None:
        self.cluster = cluster
        self.peer = Peer(node_id, incarnation, f"127.0.0.1:{1000 + node_id}")
        self.seeds: frozenset[str] = frozenset()
        self.names: dict[int, str] = {}
        self.expected_peers: int | None = None
        self.connected: set[Peer] = set()
        self.inbox: deque[Received] = deque()
        self.happened: list[PeerJoined | PeerLost] = []
        self.is_dead = False
        self.is_closed = False
        self.is_full = False
        self.updates: dict[int, bytes] = {}  # published, by step

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(sorted(self.connected))

    def events(self) -> list[PeerJoined | PeerLost]:
        happened, self.happened = self.happened, []
        return happened

    def wait_for_peers(
        self, count: int, timeout_s: float, until: Callable[[], bool] = bool
    ) -> tuple[Peer, ...]:
        end_s = self.cluster.now_s + timeout_s
        while len(self.connected) < count and not until():
            if self.cluster.now_s >= end_s:
                raise TimeoutError(f"{len(self.connected)} of {count} within {timeout_s} s")
            until_s = min(end_s, self.cluster.now_s + 0.05)
            self.cluster.rest(self, until_s, computes=bool(self.inbox))
        return self.peers

    def stats(self) -> Stats:
        return Stats()

    def has_room(self, nbytes: int) -> bool:
        assert nbytes >= 0
        return not self.is_full

    def drop_late(self, peers: Collection[Peer]) -> None:
        """Do nothing: here every peer acknowledges what it gets."""

    def publish(
        self, buffer: Any, tag: int = 0, to: Peer | Collection[Peer] | None = None
    ) -> FakeTicket:
        if isinstance(to, Peer) and to not in self.connected:
            raise NotConnected(f"{to} is not connected")
        if self.is_full:
            raise WouldBlock("full")
        named = {to} if isinstance(to, Peer) else self.connected if to is None else set(to)
        recipients = frozenset(named & self.connected)
        payload = memoryview(bytes(buffer))
        if tag < TAG_NUMBERS:
            self.updates[tag] = bytes(payload)
        ticket = FakeTicket(recipients, len(payload))
        for peer in sorted(recipients):
            self.cluster.link(self.peer, peer).append(_Packet(tag, payload, ticket))
        return ticket

    def receive(self, timeout_s: float = 0.0) -> list[Received]:
        self.cluster.rest(self, until_s=self.cluster.now_s + timeout_s)
        messages = list(self.inbox)
        self.inbox.clear()
        return messages


class _Worker:
    def __init__(self, node: FakeNode, work: Callable[[], Any]) -> None:
        self.node = node
        self.until_s = 0.0
        self.computes = False
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.greenlet = greenlet(lambda: self._run(work))

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Killed:
            pass
        except BaseException as error:  # told to the test
            self.error = error
        self.is_done = True
        self.node.cluster.hand_over(self)


class Cluster:
    """Nodes, the links between them, the workers that use them, and the time.

    Attributes:
        now_s: the time, which passes only while everybody waits.
        random: the seeded source of every decision; tests may draw from it too.
        turns: that have been taken.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.nodes: list[FakeNode] = []
        self.slow_links: set[tuple[Peer, Peer]] = set()  # deliver nothing while they are in here
        self.stopped: set[FakeNode] = set()  # do nothing while they are in here
        self._links: dict[tuple[Peer, Peer], deque[_Packet | PeerJoined | PeerLost]] = {}
        # The same in the order in which one is drawn.
        self._order: list[tuple[tuple[Peer, Peer], deque[Any]]] = []
        self._workers: list[_Worker] = []
        self._by_greenlet: dict[greenlet, _Worker] = {}
        self._running: list[_Worker] = []  # those that are not done
        self._test = getcurrent()
        self._following: _Worker | None = None  # whose turn it is when a worker has ended
        self._until: Callable[[], bool] = bool
        self._turns_left = 0
        self._failure: BaseException | None = None
        self._incarnations = itertools.count(1)
        self.turns = 0
        self._plans: dict[int, list[Callable[[], None]]] = {}

    # ---- what a test does --------------------------------------------------------------------------------------------

    def node(self, node_id: int) -> FakeNode:
        """Return a new node, which will be connected with all that live."""
        node = FakeNode(self, node_id, next(self._incarnations))
        for other in self.nodes:
            if not other.is_dead and not other.is_closed:
                self.connect(node, other)
        self.nodes.append(node)
        return node

    def connect(self, one: FakeNode, other: FakeNode) -> None:
        for here, there in ((one, other), (other, one)):
            self.link(there.peer, here.peer).append(PeerJoined(there.peer))

    def cut(self, one: FakeNode, other: FakeNode) -> None:
        """Break the connection: each side gets some first part of what was under way, then hears of the loss."""
        for here, there in ((one, other), (other, one)):
            self._break(there.peer, here.peer)
            there.connected.discard(here.peer)

    def close(self, node: FakeNode) -> None:
        """Let a node leave in good order: everything that it has sent still arrives."""
        for other in self.nodes:
            if other is not node:
                self.link(node.peer, other.peer).append(PeerLost(node.peer, "left"))
                self._lose(other.peer, node.peer, keeps=0)
        node.is_closed = True

    def kill(self, node: FakeNode) -> None:
        """Let a node die in the middle of whatever it was sending."""
        node.is_dead = True
        for other in self.nodes:
            if other is not node:
                self._break(node.peer, other.peer)
                self._lose(other.peer, node.peer, keeps=0)

    def start(self, node: FakeNode, work: Callable[[], Any]) -> _Worker:
        """Let a worker use a node; ``work`` runs in turns with the others'."""
        worker = _Worker(node, work)
        self._workers.append(worker)
        self._running.append(worker)
        self._by_greenlet[worker.greenlet] = worker
        return worker

    def plan(self, turn: int, what: Callable[[], None]) -> None:
        """Let something happen after so many turns."""
        self._plans.setdefault(turn, []).append(what)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen until all workers are done; raise what one of them raised."""
        self._until = until
        self._turns_left = TURNS_MAX
        self._test = getcurrent()
        self.hand_over()
        while self._following is not None:
            following, self._following = self._following, None
            following.greenlet.switch()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._turns_left:
            raise AssertionError(f"not finished after {TURNS_MAX} turns, at {self.now_s:.1f} s")

    # ---- what nodes ask for ------------------------------------------------------------------------------------------

    def link(self, sender: Peer, receiver: Peer) -> deque[Any]:
        key = sender, receiver
        if key not in self._links:
            self._links[key] = deque()
            bisect.insort(self._order, (key, self._links[key]), key=itemgetter(0))
        return self._links[key]

    def compute(self, node: FakeNode, seconds: float) -> None:
        """Let a worker be busy with something else; a test calls this from inside it."""
        self.rest(node, self.now_s + seconds, computes=True)

    def rest(self, node: FakeNode, until_s: float, *, computes: bool = False) -> None:
        """Let others go on; return when there is something to do or the time is over."""
        worker = self._by_greenlet.get(getcurrent())
        if worker is not None:
            worker.until_s, worker.computes = until_s, computes
            self.hand_over(worker)
        if node.is_dead:
            raise Killed

    def repeat(self, work: Callable[[], float | None]) -> None:
        """Call ``work`` beside the worker that asks for it, as ``clock.repeat`` does in a thread."""
        node = self._by_greenlet[getcurrent()].node

        def run() -> None:
            while (pause_s := work()) is not None:
                self.compute(node, pause_s)

        self.start(node, run)

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def hand_over(self, worker: _Worker | None = None) -> None:
        """Let the next worker go on, and wait until it is the caller's turn again, if it rests.

        Workers are greenlets, which take turns without a thread: whoever rests chooses the next one, often itself.

        Args:
            worker: that rests or is done; None: the test, whose turn comes when nobody else's does.
        """
        following = None
        try:
            if worker is not None and worker.is_done:
                self._running.remove(worker)
                del self._by_greenlet[worker.greenlet]
                if worker.error is not None:
                    raise worker.error
            following = self._next()
        except BaseException as error:  # told to the test
            self._failure = error
        if worker is not None and worker.is_done:
            # It ends, and its parent goes on: one that stayed suspended would keep the whole cluster in memory.
            self._following = following
            worker.greenlet.parent = self._test
        elif following is not worker:
            # A greenlet begins with the depth of recursion at which it was first switched to: the test begins them all.
            is_new = following is not None and not following.greenlet
            self._following = following if is_new else None
            (self._test if following is None or is_new else following.greenlet).switch()

    def _next(self) -> _Worker | None:
        """Let messages arrive and time pass until it is a worker's turn; None: it is the test's."""
        while self._turns_left and not self._until():
            self._turns_left -= 1
            self.turns += 1
            for planned in self._plans.pop(self.turns, ()):
                planned()
            if not self._running:
                return None
            going = self._running
            if self.stopped:
                going = [each for each in going if each.node not in self.stopped]
            ready = [each for each in going if self._is_ready(each)]
            links = [key for key, queue in self._order if queue]
            if self.slow_links:
                links = [key for key in links if key not in self.slow_links]
            if not ready and not links:
                self.now_s = min([each.until_s for each in going], default=self.now_s)
                continue
            chosen = self.random.randrange(len(ready) + len(links))
            if chosen < len(ready):
                return ready[chosen]
            self._deliver(*links[chosen - len(ready)])
        return None

    def _is_ready(self, worker: _Worker) -> bool:
        node = worker.node
        has_news = bool(node.inbox) and not worker.computes
        return has_news or self.now_s >= worker.until_s or node.is_dead

    def _deliver(self, sender: Peer, receiver: Peer) -> None:
        one = self._links[sender, receiver].popleft()
        node = next(each for each in self.nodes if each.peer == receiver)
        if node.is_dead or node.is_closed:
            if isinstance(one, _Packet):
                one.ticket.settle(receiver)
            return
        if isinstance(one, PeerJoined):
            node.connected.add(sender)
            node.happened.append(one)
        elif isinstance(one, PeerLost):
            node.connected.discard(sender)
            node.happened.append(one)
        else:
            node.inbox.append(Received(sender, one.tag, one.payload))
            one.ticket.settle(receiver)

    def _break(self, sender: Peer, receiver: Peer) -> None:
        self._lose(sender, receiver, keeps=self.random.randint(0, len(self.link(sender, receiver))))
        self.link(sender, receiver).append(PeerLost(sender, "timeout"))

    def _lose(self, sender: Peer, receiver: Peer, *, keeps: int) -> None:
        """Lose all but the first packets that are under way."""
        queue = self.link(sender, receiver)
        while len(queue) > keeps:
            one = queue.pop()
            if isinstance(one, _Packet):
                one.ticket.settle(receiver)


@contextmanager
def cluster(seed: int) -> Iterator[Cluster]:
    """Return a cluster whose clock is the exchange's as well."""
    made = Cluster(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now_s", lambda: made.now_s)
        patch.setattr(clock, "repeat", made.repeat)
        yield made


def run_cluster(work: Callable[[FakeNode, int], Any], *, count: int = 3, seed: int) -> list[Any]:
    """Let every node of a cluster of its own do ``work(node, rank)``; return what each brought, by rank."""
    with cluster(seed) as made:
        nodes = [made.node(10 * (rank + 1)) for rank in range(count)]
        workers = [
            made.start(node, lambda node=node, rank=rank: work(node, rank))
            for rank, node in enumerate(nodes)
        ]
        made.run()
    return [worker.result for worker in workers]


def train_with_a_pause(
    share: Exchange, node: FakeNode, rank: int, params: NDArray[Any], updates: list[NDArray[Any]]
) -> int:
    """Let two nodes move and share, the second with a pause that interrupts a step of the first; return how many."""
    interruptions = 0
    for count, one in enumerate(updates):
        if rank == 1 and count == 3:
            node.cluster.compute(node, 3.0)
        params += one
        try:
            share.step_moved(params)
        except TimeoutError:
            interruptions += 1
    assert interruptions == (1 if rank == 0 else 0), "the example must interrupt a step"
    return interruptions


def refuse_updates(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node's updates be larger than its limit."""
    publish = node.publish

    def refuse(buffer: Any, tag: int = 0, to: Peer | None = None) -> FakeTicket:
        if tag < TAG_NUMBERS:
            raise TooLarge("limit")
        return publish(buffer, tag, to)

    monkeypatch.setattr(node, "publish", refuse)
