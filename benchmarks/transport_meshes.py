"""Steps in which every process sends one message to all others and waits for theirs, by several libraries.

Each library is used as its documentation has it, by a generator that is one process's part: it yields its address,
receives the addresses of all, yields a function that takes one step, and closes when it is resumed. The libraries are
imported by the child processes only.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from children import children
from transport_goodput import PAYLOAD, SECRET
from updates import THRESHOLD, SteadyState

CHUNK_STEPS = 10
PATIENCE_S = 60.0
DENSITY = 0.01
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", 1 << 23),
)

Step = Callable[[int], object]
Mesh = Callable[[int, int, int], Generator[Any, Any, None]]


class Arrivals:
    """Counts the messages of each step, and compares those of the first."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._others, self._nbytes = count - 1, nbytes
        self._arrived: Counter[int] = Counter()

    def add(self, number: int, message: Any) -> None:
        assert len(message) == self._nbytes, "a message must arrive complete"
        assert number or message == PAYLOAD[: self._nbytes], "other bytes arrived"
        self._arrived[number] += 1

    def is_complete(self, number: int) -> bool:
        return self._arrived[number] == self._others


def gradwire_mesh(rank: int, count: int, nbytes: int) -> Generator[Any, Any, None]:
    """Publish with gradwire's nodes."""
    from gradwire.transport import Node

    arrivals, payload = Arrivals(count, nbytes), PAYLOAD[:nbytes]
    with Node("127.0.0.1:0", secret=SECRET) as node:
        addresses = yield node.address
        for address in addresses[:rank]:
            node.add_peer(address)
        node.wait_for_peers(count - 1, timeout_s=PATIENCE_S)

        def step(number: int) -> None:
            node.publish(payload, number)
            while not arrivals.is_complete(number):
                for _, tag, message in node.receive(timeout_s=1.0):
                    arrivals.add(tag, message)

        yield step


def exchange_mesh(rank: int, count: int, numel: int) -> Generator[Any, Any, None]:
    """Take steps of gradwire's exchange: encode an update of ``numel`` elements, send, wait, apply."""
    import gradwire as gw

    state, params = SteadyState.make(numel, DENSITY, rank), np.zeros(numel, np.float32)
    encoder = gw.Encoder(numel, threshold=gw.FixedThreshold(THRESHOLD))
    encoder.residual[...] = state.residual
    with gw.Node("127.0.0.1:0", secret=SECRET) as node:
        addresses = yield node.address
        for address in addresses[:rank]:
            node.add_peer(address)
        options = {"timeout_s": PATIENCE_S, "min_peers": count - 1, "topology": "mesh"}
        exchange = gw.Exchange(encoder, node, **options)
        yield lambda _: exchange.step(state.update, params)
    updates = [SteadyState.make(numel, DENSITY, other).update for other in range(count)]
    total = exchange.stats.steps * sum(updates)
    assert np.allclose(params, total / count, atol=1e-3), "all updates must be applied"


def grpc_mesh(rank: int, count: int, nbytes: int) -> Generator[Any, Any, None]:
    """Send on a client stream of grpcio to every other process, without encryption."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or the end of every connection is logged
    import grpc

    inbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

    def push(messages: Any, _: Any) -> bytes:
        for numbered in enumerate(messages):
            inbox.put(numbered)
        return b"done"

    server = grpc.server(ThreadPoolExecutor(count), options=GRPC_OPTIONS)
    handler = {"push": grpc.stream_unary_rpc_method_handler(push)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bulk", handler),))
    addresses = yield f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    arrivals, payload = Arrivals(count, nbytes), PAYLOAD[:nbytes]
    outboxes, calls = [], []
    for address in others(addresses, rank):
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        push_to = grpc.insecure_channel(address, options=GRPC_OPTIONS).stream_unary("/bulk/push")
        calls.append(push_to.future(iter(outbox.get, None), wait_for_ready=True))
        outboxes.append(outbox)

    def step(number: int) -> None:
        for outbox in outboxes:
            outbox.put(payload)
        while not arrivals.is_complete(number):
            arrivals.add(*inbox.get())

    yield step
    for outbox in outboxes:
        outbox.put(None)
    assert all(call.result() == b"done" for call in calls)
    server.stop(PATIENCE_S).wait()


def gloo_mesh(rank: int, count: int, nbytes: int) -> Generator[Any, Any, None]:
    """Gather with torch.distributed over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    addresses = yield address
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", addresses[0], rank=rank, world_size=count)
    own = torch.frombuffer(bytearray(PAYLOAD[:nbytes]), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(count)]
    yield lambda _: dist.all_gather(gathered, own)
    assert all(torch.equal(message, own) for message in gathered), "other bytes arrived"
    dist.destroy_process_group()


def zmq_mesh(rank: int, count: int, nbytes: int) -> Generator[Any, Any, None]:
    """Send on a PUSH socket of pyzmq to every other process and receive on one PULL socket, over TCP, in plaintext."""
    import zmq

    arrivals, payload = Arrivals(count, nbytes), PAYLOAD[:nbytes]
    with zmq.Context() as context:
        inbox = context.socket(zmq.PULL)
        addresses = yield f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}"
        outboxes = [context.socket(zmq.PUSH) for _ in range(count - 1)]
        for outbox, address in zip(outboxes, others(addresses, rank), strict=True):
            outbox.connect(address)

        def step(number: int) -> None:
            for outbox in outboxes:
                outbox.send_multipart([number.to_bytes(8, "little"), payload], copy=False)
            while not arrivals.is_complete(number):
                tag, message = inbox.recv_multipart(copy=False)
                arrivals.add(int.from_bytes(tag.buffer, "little"), message.buffer)

        yield step
        context.destroy(linger=0)


def others(addresses: Sequence[str], rank: int) -> list[str]:
    return [*addresses[:rank], *addresses[rank + 1 :]]


def take_steps(
    pipe: Connection, rank: int, mesh: Mesh, count: int, nbytes: int, steps: int
) -> None:
    """Be one process: connect, take steps, and report the seconds per step of each chunk."""
    part = mesh(rank, count, nbytes)
    pipe.send(next(part))
    step: Step = part.send(pipe.recv())
    pipe.send("connected")
    pipe.recv()
    samples_s = []
    for first in range(0, steps + CHUNK_STEPS, CHUNK_STEPS):
        started_s = time.perf_counter()
        for number in range(first, first + CHUNK_STEPS):
            step(number)
        samples_s.append((time.perf_counter() - started_s) / CHUNK_STEPS)
    pipe.send(samples_s[1:])  # the first chunk is the warm-up
    pipe.recv()  # others may still wait for this process
    next(part, None)


def step_times(
    mesh: Mesh, count: int, nbytes: int, steps: int, checkout: Path | None = None
) -> list[float]:
    """Return the seconds per step of the first of ``count`` processes, for each chunk of steps."""
    calls = [(take_steps, rank, mesh, count, nbytes, steps) for rank in range(count)]
    with children(*calls, checkout=checkout) as pipes:
        for answer in ([pipe.recv() for pipe in pipes], "go", "end"):
            for pipe in pipes:
                pipe.send(answer)
            if answer != "end":
                found = [pipe.recv() for pipe in pipes]
    return list(found[0])
