"""The way of a datagram to its session: by the address and the stream, or by the session's number.

Sans-IO. What is malformed, forged or stray is counted and dropped at the least cost; nothing here raises, whatever the
bytes are.
"""

from __future__ import annotations

from typing import Protocol

from .crypto import AuthenticationError
from .doorway import Doorway
from .fanout import Fanout
from .model import Address, Counters
from .own_records import OwnRecords
from .session import Session, State
from .wire import (
    BEACON,
    CONTROL,
    DATA,
    HEADER,
    HEADER_BYTES,
    INIT,
    RECORD_NUMBER_BITS,
    RECORD_NUMBER_MAX,
    RESPONSE,
    TAG_BYTES,
    WireError,
    run_length,
)


class Owner(Protocol):
    """What is needed of the endpoint."""

    counters: Counters
    sessions: dict[int, Session]
    own: OwnRecords
    fanout: Fanout
    doorway: Doorway


class Intake:
    """Takes datagrams, and knows whose they are.

    Attributes:
        addresses: of peers and of nodes that are knocked at.
        by_stream: sessions by the address and the stream of their records.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.addresses: frozenset[Address] = frozenset()
        self.by_stream: dict[tuple[Address, int], Session] = {}
        self._talking: dict[Address, Session] = {}  # whose records came from an address last
        self._is_group = False

    # ---- whose is what ------------------------------------------------------------------------------------------

    def note_stream(self, session: Session, address: Address) -> None:
        """The records of a peer come from this address, from now on or since its stream is known."""
        if session.stream is not None:
            self.forget_stream(session)
            self.by_stream[address, session.stream] = session
            self.by_stream[address, session.stream | 1] = session

    def forget_stream(self, session: Session) -> None:
        """Records from the session's address are no longer its."""
        if session.stream is not None:
            for stream in (session.stream, session.stream | 1):
                if self.by_stream.get((session.address, stream)) is session:
                    del self.by_stream[session.address, stream]

    def note_addresses(self) -> None:
        """Sessions have come, gone or moved."""
        self.addresses = frozenset(
            session.address
            for session in self._owner.sessions.values()
            if session.state is not State.RESPONDED
        )
        self._talking.clear()

    # ---- datagrams ----------------------------------------------------------------------------------------------

    def receive(self, data: memoryview, segment_bytes: int, address: Address, now_s: float) -> None:
        """Take datagrams that came from one address, back to back, all but the last of ``segment_bytes``.

        Never raises, whatever the bytes are: what is malformed, forged or stray is counted and dropped.
        """
        counters = self._owner.counters
        total_bytes = len(data)
        if not total_bytes:
            counters.datagrams_received += 1
            counters.malformed_datagrams += 1
            return
        counters.udp_bytes_received += total_bytes
        counters.datagrams_received += -(-total_bytes // segment_bytes)
        if segment_bytes < total_bytes and not self._is_group:
            session = self._talking.get(address)
            while session is not None and (taken := session.go_on(data, segment_bytes, now_s)):
                if taken == total_bytes:
                    return
                data = data[taken:]
                total_bytes -= taken
        if address not in self.addresses and self._drop_noise(data, segment_bytes, address, now_s):
            return
        position = 0
        while position < total_bytes:
            end = min(position + segment_bytes, total_bytes)
            if end - position < HEADER_BYTES:
                counters.malformed_datagrams += 1
            elif data[position] == DATA:
                end = self._receive_data(data, position, segment_bytes, address, now_s)
            else:
                self._receive_other(data[position:end], address, now_s)
            position = end

    def receive_group(
        self, data: memoryview, segment_bytes: int, address: Address, now_s: float
    ) -> None:
        """Take datagrams that were sent to the multicast group, otherwise as in `receive`."""
        self._owner.counters.multicast_bytes_received += len(data)
        self._is_group = True
        self.receive(data, segment_bytes, address, now_s)
        self._is_group = False

    def _drop_noise(
        self, data: memoryview, segment_bytes: int, address: Address, now_s: float
    ) -> bool:
        """Drop datagrams of a stranger at once if none is of a kind that an unknown address may send."""
        kinds = bytes(data[::segment_bytes])
        if INIT in kinds or CONTROL in kinds:  # a newcomer, or a peer that has moved
            return False
        self._owner.doorway.strangers.note_version(kinds[0], address, now_s)
        self._owner.counters.stray_datagrams += len(kinds)
        return True

    def _receive_data(
        self, data: memoryview, position: int, segment_bytes: int, address: Address, now_s: float
    ) -> int:
        _, epoch, first, fragments, stream, number = HEADER.unpack_from(data, position)
        session = self.by_stream.get((address, stream))
        if session is None or self._is_group:
            session = self._shared_by(address, stream, number & RECORD_NUMBER_MAX)
        if session is None:
            self._owner.counters.stray_datagrams += 1
            return min(position + segment_bytes, len(data))
        self._talking[address] = session
        most = min(-(-(len(data) - position) // segment_bytes), fragments - first)
        count = run_length(data, position, segment_bytes, first, most) if most > 1 else 1
        end = min(position + count * segment_bytes, len(data))
        fragment_bytes = number >> RECORD_NUMBER_BITS
        # A short last datagram can stand alone; otherwise the header has to agree with the size on the wire.
        if count > 1 and fragment_bytes + HEADER_BYTES != segment_bytes:
            self._owner.counters.malformed_datagrams += count
            return end
        record = number & RECORD_NUMBER_MAX
        batch = data[position:end]
        if session.forwarder is not None and stream == session.stream:
            self._owner.fanout.forward(session, record, fragments, first, batch, segment_bytes)
        if not session.on_fragments(
            epoch, stream, record, fragments, fragment_bytes, first, batch, now_s
        ):
            self._owner.counters.malformed_datagrams += count
        return end

    def _shared_by(self, address: Address, stream: int, record: int) -> Session | None:
        """Return whose record this is if it may come by a group or a relay: any peer, as it changes which one."""
        session = self._owner.fanout.session_of(stream) if address in self.addresses else None
        return session if session is not None and record >= session.shared_from else None

    def _receive_other(self, datagram: memoryview, address: Address, now_s: float) -> None:
        kind = datagram[0]
        try:
            if kind == CONTROL:
                self._receive_control(datagram, address, now_s)
            elif kind == INIT:
                self._owner.doorway.on_knock(bytes(datagram), address, now_s)
            elif kind == RESPONSE:
                self._receive_response(bytes(datagram), address, now_s)
            elif kind == BEACON:
                self._receive_beacon(bytes(datagram), address)
            else:
                self._owner.doorway.strangers.note_version(kind, address, now_s)
                self._owner.counters.malformed_datagrams += 1
        except WireError:
            self._owner.counters.malformed_datagrams += 1
        except AuthenticationError:
            self._owner.counters.unauthenticated_datagrams += 1

    def _receive_control(self, datagram: memoryview, address: Address, now_s: float) -> None:
        if len(datagram) < HEADER_BYTES + TAG_BYTES:
            raise WireError("a control datagram without a tag")
        header = bytes(datagram[:HEADER_BYTES])
        _, _, _, _, index, counter = HEADER.unpack(header)
        session = self._owner.sessions.get(index)
        if session is None:
            self._owner.counters.stray_datagrams += 1
            return
        before = session.outbound.cumulative if session.outbound is not None else 0
        session.on_control(counter, header, datagram[HEADER_BYTES:], address, now_s)
        own = self._owner.own
        if not own.is_release_due and own.is_held_by(before):
            own.is_release_due = True  # once, when all acknowledgements that wait have been taken

    def _receive_response(self, datagram: bytes, address: Address, now_s: float) -> None:
        _, _, _, _, index, _ = HEADER.unpack_from(datagram)
        session = self._owner.sessions.get(index)
        if session is None or session.address != address:
            self._owner.counters.stray_datagrams += 1
            return
        session.on_response(datagram, now_s)

    def _receive_beacon(self, datagram: bytes, address: Address) -> None:
        session = self.by_stream.get((address, HEADER.unpack_from(datagram)[4]))
        if session is None:
            self._owner.counters.stray_datagrams += 1
        else:
            self._owner.fanout.on_beacon(session, datagram)
