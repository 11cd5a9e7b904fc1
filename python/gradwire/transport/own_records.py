"""What this node itself sends: its log, the keys that seal it, and how its records are cut.

Everything here concerns all peers at once: they get the same records, so one peer's narrow path or spoiled records
change how all are cut, and a key is used only when every peer has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from .crypto import Entropy, SenderKey
from .model import Limits
from .path_mtu import BASE_BYTES
from .poison import SINGLE_S
from .records import Record, SendLog
from .recut import growth_max, recut
from .sealer import Sealer
from .session import Session, State
from .wire import FRAGMENTS_MAX, HEADER_BYTES, fragments_per_burst

logger = logging.getLogger(__name__)

Sessions: TypeAlias = Mapping[int, Session]
IS_SHARING: Final = (State.KEYING, State.UP)  # sessions that get what is in the log


class OwnRecords:
    """The send log with its keys and its cut.

    Args:
        sessions: of the node, by index; not changed here.
        limits: bounds and timers.
        stream: number of the node's stream.
        entropy: source of keys.
        insecure: neither encrypt nor authenticate.
        first_record: number of the first record.
        carried_from: with so many peers records reach several of them at once, by a carrier.
        now_s: current time.

    Attributes:
        log: records that somebody may still need.
        sealer: makes them, under the current key.
        room_bytes: of the log's limit, what may be used: cutting a full log anew must not make it larger than that.
        is_rotation_due: a new key is wanted as soon as possible.
        is_release_due: some peer may have acknowledged what no other lacks.
        message_number: what the next message gets.
    """

    def __init__(
        self,
        sessions: Sessions,
        limits: Limits,
        stream: int,
        entropy: Entropy,
        *,
        insecure: bool,
        first_record: int,
        carried_from: int,
        now_s: float,
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._entropy = entropy
        self._insecure = insecure
        self._carried_from = carried_from
        self.log = SendLog(limits.send_log_bytes, first_record)
        key = SenderKey.generate(0, entropy, insecure=insecure)
        self.sealer = Sealer(key, stream, limits.fragment_bytes)
        smallest_bytes = min(BASE_BYTES - HEADER_BYTES, limits.fragment_bytes)
        self.room_bytes = int(limits.send_log_bytes / growth_max(smallest_bytes))
        self.is_rotation_due = False
        self.is_release_due = False
        self._next_key: SenderKey | None = None
        self._previous_key: SenderKey | None = None
        self._key_since = (now_s, first_record)
        self._single_until_s = float("-inf")
        self.message_number = 0

    def take_message_numbers(self, count: int) -> int:
        """Set aside so many message numbers, and return the first."""
        self.message_number += count
        return self.message_number - count

    def has_room(self, nbytes: int) -> bool:
        """Whether the log would take a message of this size now."""
        return self.log.used_bytes + self.sealer.wire_bytes(nbytes) <= self.room_bytes

    def is_held_by(self, cumulative: int) -> bool:
        """Whether `release` may have something to do once a peer has acknowledged more than this."""
        return cumulative <= self.log.base or self._next_key is not None or self.is_rotation_due

    def release(self, now_s: float) -> None:
        """Forget what everybody has, and go on with a change of keys that waited for that."""
        self.is_release_due = False
        waiting = [
            session.outbound.cumulative
            for session in self._sessions.values()
            if session.outbound is not None
        ]
        self.log.release_below(min(waiting, default=self.log.head))
        if self.log.base >= self._key_since[1]:
            self._previous_key = None  # nothing is left that it sealed
        self._maybe_switch_key(now_s)
        if self.is_rotation_due:
            self.maybe_rotate(now_s)

    # ---- keys ---------------------------------------------------------------------------------------------------

    def sender_keys(self) -> tuple[SenderKey, ...]:
        """Return the key in use and, during a rotation, the next one."""
        key = self.sealer.key
        return (key,) if self._next_key is None else (key, self._next_key)

    def keys_in_use(self) -> dict[int, SenderKey]:
        """Return the keys under which the records in the log are sealed, by the low 8 bits of their epoch."""
        return {key.epoch & 0xFF: key for key in (self._previous_key, self.sealer.key) if key}

    def rotate_key(self, now_s: float) -> None:
        """Have a new sender key made, announced, and used as soon as every peer has confirmed it."""
        self.is_rotation_due = True
        self.maybe_rotate(now_s)

    def maybe_rotate(self, now_s: float) -> None:
        """Begin with a new key if it is time and nothing stands against it."""
        since_s, first_record = self._key_since
        if (
            now_s - since_s >= self._limits.rekey_s
            or self.log.head - first_record >= self._limits.rekey_records
        ):
            self.is_rotation_due = True
        # Receivers keep two keys, so everything sealed under an older one has to have arrived before.
        if not self.is_rotation_due or self._next_key is not None or self.log.base < first_record:
            return
        self.is_rotation_due = False
        epoch = self.sealer.key.epoch + 1
        self._next_key = SenderKey.generate(epoch, self._entropy, insecure=self._insecure)
        for session in self._sessions.values():
            if session.is_established:
                session.announce_key(self._next_key, now_s)
        self._maybe_switch_key(now_s)

    def _maybe_switch_key(self, now_s: float) -> None:
        if self._next_key is None:
            return
        if all(s.has_all_keys for s in self._sessions.values() if s.is_established):
            self._previous_key = self.sealer.key
            self.sealer.key = self._next_key
            self._key_since = (now_s, self.log.head)
            self._next_key = None

    # ---- how records are cut ------------------------------------------------------------------------------------

    def fit_framing(self, now_s: float) -> None:
        """Cut what comes from now on as the paths allow."""
        sessions = list(self._up())
        sizes = [session.path.size_bytes for session in sessions if session.path is not None]
        size = min(sizes, default=self._limits.fragment_bytes + HEADER_BYTES) - HEADER_BYTES
        fragments_max = FRAGMENTS_MAX
        if now_s < self._single_until_s:
            fragments_max = 1
        elif len(sessions) >= self._carried_from:
            # A carrier admits and dismisses between records: on a slow path four bursts are too long to wait.
            fragments_max = fragments_per_burst(size)
        wanted = (size, fragments_max)
        if wanted != (self.sealer.fragment_bytes, self.sealer.fragments_max):
            self.sealer.reframe(*wanted)

    def on_poisoned(self, session: Session, now_s: float) -> bool:
        """Use one datagram per record for a while; return whether what is in the log has to be cut anew."""
        if now_s >= self._single_until_s:
            logger.warning(
                "records to %s keep failing on the way: one datagram per record for %g s",
                session.identity,
                SINGLE_S,
            )
        self._single_until_s = now_s + SINGLE_S
        self.fit_framing(now_s)
        return self._is_waiting_for(session, lambda record: record.fragments > 1)

    def on_path_size(self, session: Session, size_bytes: int, now_s: float) -> bool:
        """Use the size that all paths allow; return whether what is in the log has to be cut anew."""
        logger.info("datagrams to %s may have %d bytes", session.identity, size_bytes)
        self.fit_framing(now_s)
        return self._is_waiting_for(session, lambda record: record.datagram_bytes > size_bytes)

    def _is_waiting_for(self, session: Session, unfit: Callable[[Record], bool]) -> bool:
        """Whether the peer still lacks a record that is unfit for its path."""
        outbound = session.outbound
        return outbound is not None and any(
            record.number >= outbound.cumulative
            and session.index in record.message.recipients
            and unfit(record)
            for record in self.log
        )

    def recut(self) -> int:
        """Cut anew what some peer may lack, and have every peer skip the old records; return the number of new ones."""
        head = self.log.head
        sharing = [s for s in self._sessions.values() if s.state in IS_SHARING]
        moved = recut(self.log, self.sealer, self.keys_in_use(), self.positions())
        for session in sharing:
            session.restart_from(head, moved)
        return self.log.head - head

    def positions(self) -> dict[int, int]:
        """Return the first record that each session may lack, by the session's index."""
        return {
            session.index: session.outbound.cumulative
            for session in self._sessions.values()
            if session.outbound is not None and session.state in IS_SHARING
        }

    def _up(self) -> Iterator[Session]:
        return (session for session in self._sessions.values() if session.state is State.UP)
