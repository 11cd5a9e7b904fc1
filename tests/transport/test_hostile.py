"""Hostile and broken peers: whatever a node receives, the service continues (see also `fuzz_endpoint.py`)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.transport.wire import CONTROL, DATA, HEADER, INIT, INIT_BYTES

from . import hostile
from .simulator import Simulator


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_parse_to_what_encodes_again_or_are_refused(data: bytes) -> None:
    hostile.parse(data)


@settings(max_examples=150)
@given(st.binary(min_size=20, max_size=600))
def test_no_script_of_a_hostile_member_stops_the_service(data: bytes) -> None:
    hostile.storm(data)


def test_replayed_inits_get_no_answers_and_take_no_memory() -> None:
    simulator = Simulator(12)
    one, two = simulator.add("one"), simulator.add("two")
    inits: list[bytes] = []
    simulator.link(one, two).drop = lambda _, datagram: bool(
        datagram[0] == INIT and inits.append(datagram)
    )
    one.endpoint.connect(two.address)
    simulator.run_until(lambda: bool(two.endpoint.peers), 5.0)
    simulator.crash(one)
    simulator.run_for(30.0)
    sent = two.endpoint.stats().datagrams_sent
    for index in range(10_000):
        source = (f"10.{index >> 8}.{index & 255}.1", index)
        two.endpoint.receive(
            memoryview(inits[0]), INIT_BYTES, source, simulator.now_s + index * 1e-5
        )
    assert two.endpoint.poll(simulator.now_s + 0.1) == []
    assert two.endpoint.stats().datagrams_sent == sent
    assert two.endpoint.stats().handshakes_refused == 10_000
    assert len(two.endpoint.sessions.by_index) == 0


def test_fresh_inits_are_limited_in_number_and_the_answers_are_no_larger() -> None:
    simulator = Simulator(13)
    target = simulator.add("target")
    received = 0
    for index in range(1_000):
        member = simulator.add("member", node_id=index + 10)
        member.endpoint.connect(target.address)
        for transmit in member.endpoint.poll(simulator.now_s):
            data = b"".join(transmit.slices)
            received += len(data)
            target.endpoint.receive(memoryview(data), len(data), (f"h{index}", 1), simulator.now_s)
        for _ in range(2):
            target.endpoint.poll(simulator.now_s)
    assert len(target.endpoint.sessions.by_index) <= 256
    assert target.endpoint.stats().udp_bytes_sent <= received
    assert target.endpoint.stats().handshakes_refused > 700


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([DATA, CONTROL, INIT, INIT + 0x10, 0]), st.binary(max_size=1_500)
        ),
        max_size=30,
    )
)
def test_no_datagram_raises_or_stops_the_service(datagrams: list[tuple[int, bytes]]) -> None:
    simulator = Simulator(14)
    one, two = simulator.mesh(2)
    for kind, rest in datagrams:
        data = bytes([kind]) + rest
        two.endpoint.receive(memoryview(data), len(data), one.address, simulator.now_s)
        two.endpoint.receive(memoryview(data * 3), max(1, len(data)), one.address, simulator.now_s)
    simulator.publish(one, b"the service continues")
    simulator.run_until(lambda: bool(two.received), 5.0)


@settings(max_examples=60)
@given(st.binary(max_size=400), st.integers(0, 2**32))
def test_a_member_that_seals_nonsense_stops_only_itself(plaintext: bytes, seed: int) -> None:
    """Decrypted bytes are checked like any others: a broken peer ends its own session."""
    simulator = Simulator(seed)
    one, two, three = simulator.mesh(3)
    session = next(s for s in one.endpoint.sessions if s.address == two.address)
    channel = session.control.channel
    assert channel is not None
    counter = channel.next_counter()
    header = HEADER.pack(CONTROL, 0, 0, 0, session.control.remote_index, counter)
    datagram = channel.seal(counter, header, plaintext)
    two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    simulator.run_for(0.1)
    simulator.publish(three, b"still here")
    simulator.run_until(lambda: b"still here" in two.payloads, 5.0)


@settings(max_examples=60)
@given(st.binary(max_size=100))
def test_a_member_that_seals_nonsense_into_a_record_stops_only_itself(plaintext: bytes) -> None:
    simulator = Simulator(15)
    one, two, three = simulator.mesh(3)
    endpoint = one.endpoint
    number = endpoint.log.head
    header = HEADER.pack(DATA, 0, 0, 1, endpoint.sealer.stream, 1_184 << 48 | number)
    sealed = bytearray(len(plaintext) + 16)
    endpoint.sealer.keys.seal_into(number, memoryview(plaintext), header, memoryview(sealed))
    datagram = header + sealed
    two.endpoint.receive(memoryview(datagram), len(datagram), one.address, simulator.now_s)
    simulator.run_for(0.1)
    simulator.publish(three, b"still here")
    simulator.run_until(lambda: b"still here" in two.payloads, 5.0)
    assert [payload for payload in two.payloads if payload != b"still here"] in ([], [b""])
