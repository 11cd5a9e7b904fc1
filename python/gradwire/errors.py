"""The exceptions of gradwire, beside ``TypeError`` and ``ValueError`` for unsuitable arguments."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar, NoReturn

__all__ = [
    "BackendUnavailable",
    "Closed",
    "CudaError",
    "Diverged",
    "GradwireError",
    "MessageError",
    "Mismatch",
    "NonFiniteUpdate",
    "NotConnected",
    "PeerLost",
    "TooLarge",
    "TransportError",
    "WouldBlock",
]


class GradwireError(Exception):
    """Base of all gradwire errors."""


class MessageError(GradwireError, ValueError):
    """Bytes that are not a valid message, or a message that does not fit its target."""


class NonFiniteUpdate(GradwireError):
    """An update held NaN or infinity; its finite part is in the residual and nothing was sent.

    Attributes:
        count: number of elements left out.
        first_index: index of the first of them in the flat update.
    """

    def __init__(self, message: str, count: int = 0, first_index: int = -1) -> None:
        super().__init__(message)
        self.count = count
        self.first_index = first_index


class Mismatch(GradwireError):
    """Nodes with different models or options try to train together; the message names the difference."""


class Diverged(GradwireError):
    """The parameters of this node differ from those of the others; ``Exchange.resync`` copies theirs."""


class BackendUnavailable(GradwireError):
    """A backend or device that this machine or this build lacks."""


class CudaError(GradwireError):
    """A CUDA call failed."""


class TransportError(GradwireError):
    """Base of the errors of the transport."""


class WouldBlock(TransportError):
    """The send buffer is full: wait for acknowledgements, or accumulate into the residual."""


class NotConnected(TransportError):
    """The named peer is not connected."""


class Closed(TransportError):
    """The node has been closed."""


class TooLarge(TransportError):
    """A message is larger than the configured maximum of the node."""


class PeerLost(TransportError):
    """A peer was lost before it had acknowledged everything."""


class NotCopied:
    """Base of objects that have connections or memory of this process, and refuse to be copied and pickled.

    Args:
        instead: what to copy or to save.
    """

    _instead: ClassVar[str] = ""

    def __init_subclass__(cls, instead: str = "", **options: Any) -> None:
        """Note what to copy instead."""
        super().__init_subclass__(**options)
        cls._instead = instead or cls._instead

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} is not copied or pickled: {self._instead}")


def is_failure(kind: object = None, error: object = None, *_: object) -> bool:
    """Return whether what leaves a ``with`` block is a failure: ``sys.exit()`` and ``sys.exit(0)`` are not."""
    is_orderly = isinstance(error, SystemExit) and error.code in (None, 0)
    return kind is not None and not is_orderly


def portable(error: Exception) -> Exception:
    """Return an error as another process can have it: a copy, or only its text where it cannot be pickled."""
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return GradwireError(f"{type(error).__name__}: {error}")
    return copy
