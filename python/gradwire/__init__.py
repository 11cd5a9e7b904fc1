"""Send only the part of each update that matters now, and keep the rest for later.

The codec is here at once; what needs more than NumPy (``Node``, ``Exchange``) is imported when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("gradwire._core")
except ImportError as error:
    raise ImportError(
        f"gradwire's compiled core does not load ({error}): install gradwire for this Python (in a checkout: "
        "pip install .), and do not import it from its source folder"
    ) from error

from .codec import Encoder, EncoderStats, backends
from .errors import (
    BackendUnavailable,
    Closed,
    CudaError,
    Diverged,
    GradwireError,
    MessageError,
    Mismatch,
    NonFiniteUpdate,
    NotConnected,
    PeerLost,
    TooLarge,
    TransportError,
    WouldBlock,
)
from .message import (
    Message,
    apply,
    apply_many,
    cuda_message,
    decode,
    dense_message,
    max_message_bytes,
    parse_many,
)
from .policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    TargetDensity,
)

if TYPE_CHECKING:
    from . import dl4j
    from .exchange import Exchange, ExchangeStats, Groups, Joined, LocalTeam, StepResult
    from .transport import Node, Peer

__all__ = [
    "AdaptiveThreshold",
    "BackendUnavailable",
    "Closed",
    "CudaError",
    "Diverged",
    "Encoder",
    "EncoderStats",
    "Exchange",
    "ExchangeStats",
    "FixedThreshold",
    "GradwireError",
    "Groups",
    "Joined",
    "LocalTeam",
    "Message",
    "MessageError",
    "Mismatch",
    "Node",
    "NonFiniteUpdate",
    "NotConnected",
    "Peer",
    "PeerLost",
    "ResidualClip",
    "ShakeUp",
    "StepResult",
    "StepThreshold",
    "TargetDensity",
    "TooLarge",
    "TransportError",
    "WouldBlock",
    "__version__",
    "apply",
    "apply_many",
    "backends",
    "cuda_message",
    "decode",
    "dense_message",
    "dl4j",
    "max_message_bytes",
    "parse_many",
]

_FROM_EXCHANGE = (
    "Exchange",
    "ExchangeStats",
    "Groups",
    "Joined",
    "LocalTeam",
    "StepResult",
)
_LAZY = {
    "Node": "gradwire.transport",
    "Peer": "gradwire.transport",
    **dict.fromkeys(_FROM_EXCHANGE, "gradwire.exchange"),
}
_ROOMS = ("dl4j", "exchange", "reference", "torch", "transport")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"gradwire.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("gradwire")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
