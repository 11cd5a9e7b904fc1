"""The compiled side of `transport.driver`: UDP sockets in bulk, many system calls in a row."""

from .transport.model import Transmit

Address = tuple[str, int]

class Receiver:
    """Takes what a socket has; as a buffer it is the bytes of the last batches, read-only.

    Args:
        room_bytes: of the buffer.
        batch_bytes_max: the most that one batch may have.
    """

    def __init__(self, room_bytes: int, batch_bytes_max: int) -> None: ...
    def receive(self, socket: int, calls_max: int) -> list[tuple[int, int, int, Address]]:
        """Take datagrams until there are no more, the buffer is full or so many system calls were made.

        Args:
            socket: file descriptor; it is never waited for.
            calls_max: the most system calls.

        Returns:
            Start, end, size of each datagram but the last, and sender of each batch: neighbours of one sender and size.
        """
    @property
    def is_empty(self) -> bool:
        """Whether the last call left the socket empty."""
    @property
    def calls(self) -> int:
        """System calls that brought something."""
    @property
    def errors(self) -> int:
        """System calls that failed."""
    @property
    def drops(self) -> int:
        """Datagrams that the socket had no room for, where the system counts them."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Alarm:
    """A timer to wait for like a socket; setting it wakes nobody before its time.

    Raises:
        OSError: this system has no such timers.
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """Return the file descriptor, readable when the time has come."""
    def set(self, at_s: float) -> None:
        """Set the time, in seconds of `time.monotonic`."""
    def clear(self) -> None:
        """Forget the time; the descriptor is not readable any more."""

class Sender:
    """Sends what `Transmit` describes."""

    def send(
        self, socket: int, transmits: list[Transmit], index: int, call: int
    ) -> tuple[int, int, int]:
        """Make the system calls of all transmissions, from one on, until one fails.

        Args:
            socket: file descriptor; it is never waited for.
            transmits: in order.
            index: of the first transmission.
            call: the first system call of that one.

        Returns:
            Index, call and errno of the one that failed; errno 0 if none did.
        """
