"""How long keys live: a running stream notices nothing, and memory opens only what was sealed lately."""

from __future__ import annotations

import logging
import time

import pytest

from gradwire.transport import Limits, Node, crypto, records, wire
from gradwire.transport.session import Session

from .simulator import Host, Link, Simulator

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
SECRET = bytes(range(32))
# So that a simulated day has few heartbeats.
CALM = Limits(heartbeat_s=60.0, down_s=1_000.0)


def session_of(host: Host) -> Session:
    [session] = host.endpoint.sessions.by_node.values()
    return session


def receiving_key(host: Host) -> bytes:
    channel = session_of(host).control.channel
    assert channel is not None
    return channel._receive.key


@pytest.mark.parametrize(
    "link",
    [
        Link(delay_s=0.001),
        Link(delay_s=0.002, loss=0.05),
        Link(delay_s=0.001, jitter_s=0.002),
        Link(delay_s=0.001, loss=0.02, duplicate=0.1),
    ],
    ids=["clean", "loss", "reordered", "duplicated"],
)
def test_a_stream_goes_on_while_its_keys_change(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crypto, "CONTROL_DATAGRAMS", 100)
    monkeypatch.setattr(records, "KEY_LIFE_S", 0.25)
    simulator = Simulator(40, link)
    one, two = simulator.mesh(2)
    keys = {receiving_key(two)}
    epochs = set()
    numbers = range(3_000)
    for number in numbers:
        ticket = simulator.publish(one, number.to_bytes(2, "big") * 50, number)
        simulator.publish(two, bytes(10), number)
        simulator.run_for(0.001)
        if number % 100 == 0:
            simulator.run_until(lambda: ticket.is_done, 5.0)  # noqa: B023
            simulator.run_for(0.5)  # a sender key changes only when everything has arrived
        keys.add(receiving_key(two))
        epochs.add(one.endpoint.log.head >> crypto.EPOCH_BITS)
    simulator.run_until(lambda: len(one.received) == len(two.received) == len(numbers), 10.0)
    assert [tag for _, tag, _ in two.received] == [tag for _, tag, _ in one.received] == [*numbers]
    assert two.payloads == [number.to_bytes(2, "big") * 50 for number in numbers]
    assert one.lost == two.lost == []
    assert len(keys) >= 5
    assert len(epochs) >= 5


def test_after_two_days_nobody_has_the_key_of_a_recorded_message() -> None:
    simulator = Simulator(41, Link(delay_s=0.001))
    one, two = simulator.mesh(2, limits=CALM)
    assert records.KEY_LIFE_S == DAY_S
    recorded: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == wire.DATA and recorded.append(datagram)
    )
    simulator.publish(one, b"of the first day")
    simulator.run_for(1.0)
    header = wire.DataHeader.decode(memoryview(recorded[0]), 0)
    sealed = memoryview(recorded[0])[wire.HEADER_BYTES :]

    def opens() -> bool:
        receiver = session_of(two).receiver
        assert receiver is not None
        for keys in (receiver._keys, one.endpoint.sealer.keys):
            plain = memoryview(bytearray(len(sealed) - wire.TAG_BYTES))
            try:
                keys.open_into(header.record, sealed, header.associated, plain)
            except crypto.AuthenticationError:
                continue
            return True
        return False

    assert opens()
    for day in range(2):
        assert one.endpoint.log.head >> crypto.EPOCH_BITS == day
        simulator.run_for(DAY_S + 120.0)
        simulator.publish(one, bytes([day]))
        simulator.run_for(120.0)
    assert two.payloads == [b"of the first day", b"\0", b"\1"]
    assert not opens()
    assert one.lost == two.lost == []


def test_a_peer_that_gets_no_message_forgets_keys_too() -> None:
    simulator = Simulator(42, Link(delay_s=0.001))
    one, two = simulator.mesh(2, limits=CALM)
    receiver = session_of(two).receiver
    assert receiver is not None
    first = receiver._keys.key_of(0)
    simulator.run_for(2 * DAY_S + 240.0)
    with pytest.raises(crypto.AuthenticationError):
        receiver._keys.key_of(0)
    assert receiver._keys.key_of(receiver.cumulative) != first
    ticket = simulator.publish(one, b"text")
    simulator.run_until(lambda: ticket.is_done, 1.0)
    assert two.payloads == [b"text"]


def test_keys_change_only_when_everything_has_arrived() -> None:
    simulator = Simulator(43, Link(delay_s=0.001))
    one, two = simulator.mesh(2, limits=CALM)
    simulator.run_for(DAY_S - 1.0)
    simulator.link(one, two).drop = lambda _, datagram: datagram[0] == wire.DATA
    ticket = simulator.publish(one, bytes(100_000))
    simulator.run_for(5.0)
    assert one.endpoint.log.head < 1 << crypto.EPOCH_BITS
    simulator.link(one, two).drop = lambda *_: False
    simulator.run_until(lambda: ticket.is_done, 10.0)
    simulator.run_for(120.0)
    assert one.endpoint.log.head == 1 << crypto.EPOCH_BITS
    assert one.endpoint.is_drained
    assert two.payloads == [bytes(100_000)]


def test_the_frame_with_the_first_key_cannot_be_opened_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crypto, "CONTROL_DATAGRAMS", 20)
    simulator = Simulator(44, Link(delay_s=0.001))
    one, two = simulator.add("one"), simulator.add("two")
    recorded: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == wire.CONTROL and recorded.append(datagram)
    )
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(one.endpoint.peers and two.endpoint.peers), 1.0)

    def opened() -> list[wire.Frame]:
        frames: list[wire.Frame] = []
        for datagram in recorded:
            channel = crypto.ControlChannel(bytes(32), receiving_key(two))
            counter = int.from_bytes(datagram[8:16], "little")
            header, body = datagram[: wire.HEADER_BYTES], memoryview(datagram)[wire.HEADER_BYTES :]
            try:
                frames += wire.decode_frames(channel.open(counter, header, body))
            except crypto.AuthenticationError:
                continue
        return frames

    assert any(isinstance(frame, wire.Key) for frame in opened())
    simulator.run_for(20.0)
    assert opened()
    assert not any(isinstance(frame, wire.Key) for frame in opened())


@pytest.mark.slow
def test_a_stream_on_sockets_goes_on_while_its_keys_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logs the goodput with keys that change every 30 datagrams over that with keys that stay."""
    payload = bytes(100_000)
    count = 3_000

    def goodput(datagrams: int, key_life_s: float) -> float:
        changes = key_life_s < DAY_S
        monkeypatch.setattr(crypto, "CONTROL_DATAGRAMS", datagrams)
        monkeypatch.setattr(records, "KEY_LIFE_S", key_life_s)
        with (
            Node("127.0.0.1:0", secret=SECRET) as one,
            Node("127.0.0.1:0", [one.address], secret=SECRET) as two,
        ):
            one.wait_for_peers(1, timeout_s=10.0)
            two.wait_for_peers(1, timeout_s=10.0)
            tags: list[int] = []
            keys = set()
            started_s = time.monotonic()
            number = epoch = 0
            # A fast machine has sent everything before the keys have changed so often.
            while number < count or (changes and min(len(keys), epoch) < 3 and number < 30 * count):
                while not one.has_room(len(payload)):
                    tags += [tag for _, tag, _ in two.receive(0.01)]
                one.publish(payload, number)
                tags += [tag for _, tag, _ in two.receive()]
                [session] = one._endpoint.sessions.by_node.values()
                assert session.control.channel is not None
                keys.add(session.control.channel._receive.key)
                number += 1
                if number % 300 == 0:
                    assert one.drain(10.0)  # so that a sender key may change
                    epoch = one._endpoint.log.head >> crypto.EPOCH_BITS
            while len(tags) < number:
                tags += [tag for _, tag, _ in two.receive(10.0)]
            elapsed_s = time.monotonic() - started_s
            assert tags == [*range(number)]
            if changes:
                assert len(keys) >= 3
                assert epoch >= 3
            else:
                assert (len(keys), epoch) == (1, 0)
        return number * len(payload) / elapsed_s

    pairs = [(goodput(30, 0.02), goodput(1 << 28, DAY_S)) for _ in range(3)]
    changing, staying = (max(values) for values in zip(*pairs, strict=True))
    ratio = changing / staying
    logger.info("goodput %.0f MB/s over %.0f: %.2f", changing / 1e6, staying / 1e6, ratio)
    assert ratio >= 0.5
