"""Every exception that gradwire raises on purpose.

``TypeError`` and ``ValueError`` are raised for arguments of the wrong dtype or shape, as everywhere in Python.
"""

from __future__ import annotations

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
    """Bytes that are not a valid message, or a message that does not fit where it is applied."""


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
    """Nodes that train different things want to train together; the message names both sides."""


class Diverged(GradwireError):
    """This node's parameters are not what the others hold; ``Exchange.resync`` takes theirs."""


class BackendUnavailable(GradwireError):
    """A backend or device that this machine or this build does not have."""


class CudaError(GradwireError):
    """A CUDA call failed."""


class TransportError(GradwireError):
    """Base of the transport's errors."""


class WouldBlock(TransportError):
    """No room to send now: wait for acknowledgements, or accumulate into the residual."""


class NotConnected(TransportError):
    """The named peer is not connected."""


class Closed(TransportError):
    """The node has been closed."""


class TooLarge(TransportError):
    """A message larger than the node's configured maximum."""


class PeerLost(TransportError):
    """A peer went down before it had acknowledged everything."""
