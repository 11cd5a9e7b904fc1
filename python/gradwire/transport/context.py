"""What a session needs from its endpoint, and what it reports to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .agenda import Agenda
from .crypto import Entropy, Marker, SenderKey
from .inbound import ReceiveBudget
from .model import Address, Counters, Limits
from .path_mtu import PathMtu
from .records import SendLog
from .wire import Heard, Relay, Relaying, Shared

if TYPE_CHECKING:
    from .session import Session


class Context(Protocol):
    """What a session needs from its endpoint."""

    agenda: Agenda
    limits: Limits
    log: SendLog
    budget: ReceiveBudget
    counters: Counters
    entropy: Entropy
    secret: bytes
    marker: Marker
    insecure: bool
    node_id: int
    incarnation: int
    stream: int
    advertise: str
    socket_buffer_bytes: int

    def wall_ms(self, now_s: float) -> int:
        """Return the time since the epoch, in milliseconds, as far as this node knows."""

    def sender_keys(self) -> tuple[SenderKey, ...]:
        """Return the key in use and, during a rotation, the next one."""

    def on_identified(self, session: Session, now_s: float) -> bool:
        """The peer proved who it is; return False to refuse it."""

    def on_stream(self, session: Session) -> None:
        """The peer's stream number is known."""

    def on_up(self, session: Session, now_s: float) -> None:
        """Messages flow."""

    def on_down(self, session: Session, reason: str, now_s: float) -> None:
        """The session ended."""

    def on_moved(self, session: Session, address: Address, now_s: float) -> None:
        """The peer speaks from another address now."""

    def on_members(self, addresses: tuple[str, ...]) -> None:
        """The peer named other nodes."""

    def on_fanout(self, session: Session, frame: Relay | Relaying | Shared | Heard) -> None:
        """The peer says something about how records reach several nodes at once."""

    def deliver(self, session: Session, tag: int, payload: memoryview) -> None:
        """A message is complete."""

    def window_records(self) -> int:
        """Return the credit that each active sender gets now."""

    def on_poisoned(self, session: Session, now_s: float) -> None:
        """Records of ours keep failing on the way to the peer."""

    def watch_path(self, address: Address, now_s: float) -> PathMtu | None:
        """Return what finds out the size of datagrams to an address; None where there is nothing to find out."""

    def on_path_size(self, session: Session, now_s: float) -> None:
        """Datagrams to the peer may be of another size than before."""
