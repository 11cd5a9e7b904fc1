"""One node, many threads that publish, receive, read counters and close at once, on real sockets."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from gradwire.errors import Closed, NotConnected, WouldBlock
from gradwire.transport import Limits, Node, Peer

SECRET = bytes(range(32))
LIMITS = Limits(
    message_bytes_max=1 << 18,
    send_log_bytes=1 << 20,
    receive_bytes=1 << 20,
    window_bytes=1 << 20,
)
JOIN_S = 60.0
MESSAGES = 30


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Switch threads as often as the interpreter can, which finds races."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Crew:
    """Threads whose exceptions are collected, and which must all end."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def add(self, work: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(JOIN_S)
        assert not [thread for thread in self._threads if thread.is_alive()]
        if self.errors:
            raise self.errors[0]


def mesh(count: int) -> list[Node]:
    nodes: list[Node] = []
    for _ in range(count):
        seeds = [node.address for node in nodes]
        nodes.append(Node("127.0.0.1:0", seeds, secret=SECRET, limits=LIMITS))
    for node in nodes:
        node.wait_for_peers(count - 1, timeout_s=10.0)
    return nodes


def content(sender: int, tag: int) -> bytes:
    draw = random.Random(f"{sender}/{tag}")
    return draw.randbytes(draw.choice((0, 1, 300, 5_000, 100_000)))


def publish_until_taken(node: Node, tag: int, to: Peer | None = None) -> None:
    while True:
        try:
            node.publish(content(node.id, tag), tag, to)
            return
        except WouldBlock:
            node.drain(timeout_s=0.01)


def test_threads_that_publish_receive_and_look_at_once_lose_and_repeat_nothing() -> None:
    nodes = mesh(3)
    crew = Crew()
    lock = threading.Lock()
    got: dict[int, Counter[tuple[int, int]]] = {node.id: Counter() for node in nodes}
    wrong: list[object] = []
    expected = 2 * 2 * MESSAGES  # of two threads of two others
    done = threading.Event()

    def send(node: Node, base: int) -> None:
        for number in range(MESSAGES):
            publish_until_taken(node, base + number)

    def take(node: Node) -> None:
        while got[node.id].total() < expected:
            for peer, tag, payload in node.receive(timeout_s=0.02):
                with lock:
                    got[node.id][peer.id, tag] += 1
                if payload != content(peer.id, tag):
                    wrong.append((peer, tag))

    def look(node: Node) -> None:
        while not done.is_set():
            stats = node.stats()
            assert 0 <= stats.send_log_bytes <= LIMITS.send_log_bytes
            assert 0 <= stats.receive_queue_bytes <= LIMITS.receive_bytes
            assert len(node.peers) == 2
            node.events()
            node.has_room(1_000)
            node.drain(timeout_s=0.0)

    def finish() -> None:
        while any(counter.total() < expected for counter in got.values()) and not crew.errors:
            done.wait(0.01)
        done.set()

    for node in nodes:
        for base in (0, 1_000):
            crew.add(send, node, base)
        for _ in range(2):
            crew.add(take, node)
        crew.add(look, node)
    crew.add(finish)
    crew.run()
    assert not wrong
    for node in nodes:
        others = [other.id for other in nodes if other is not node]
        tags = [base + number for base in (0, 1_000) for number in range(MESSAGES)]
        assert got[node.id] == Counter((other, tag) for other in others for tag in tags)
        assert node.drain(timeout_s=5.0)
    for node in nodes:
        assert node.close() == []


@pytest.mark.parametrize("seed", range(2))
def test_a_node_closed_by_several_threads_under_load_ends_every_call(seed: int) -> None:
    one, two = mesh(2)
    crew = Crew()
    generator = random.Random(seed)
    tickets = []
    at_work = threading.Barrier(7)
    results: list[object] = []

    def publish_on() -> None:
        while True:
            try:
                to = generator.choice((None, two.peer))
                tickets.append(one.publish(bytes(50_000), 1, to))
            except WouldBlock:
                one.has_room(50_000)

    def receive_on() -> None:
        while True:
            one.receive(timeout_s=30.0)

    def publish() -> None:
        at_work.wait()
        with pytest.raises((Closed, NotConnected)):
            publish_on()

    def receive() -> None:
        at_work.wait()
        with pytest.raises(Closed):
            receive_on()

    def close() -> None:
        at_work.wait()
        for _ in range(generator.randrange(20)):
            two.receive(timeout_s=0.001)
        results.append(one.close(timeout_s=0.2))

    for work in (publish, publish, receive, receive, close, close, close):
        crew.add(work)
    crew.run()
    assert len(results) == 3
    assert all(ticket.is_done for ticket in tickets)
    assert {two.peer} >= {peer for result in results for peer, _ in result}  # type: ignore[attr-defined]
    two.close()
