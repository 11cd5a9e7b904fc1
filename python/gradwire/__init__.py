"""Exchange training updates between machines: send the large elements of each update now and the rest later.

The codec is imported at once; names that need more than NumPy (``Node``, ``Exchange``) are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    importlib.import_module("gradwire._core")
except ImportError as error:
    raise ImportError(
        f"the compiled core of gradwire does not load ({error}): install gradwire for this Python (in a checkout: "
        "pip install .), and do not import it from its source folder"
    ) from error

from . import cuda  # noqa: F401  (makes Encoder(device="cuda") known)
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
from .partition import Part, Partition
from .policy import (
    AdaptiveThreshold,
    FixedThreshold,
    ResidualClip,
    ShakeUp,
    StepThreshold,
    TargetBytes,
    TargetDensity,
)

if TYPE_CHECKING:
    from . import coprocessor, cost, dl4j
    from .exchange import Exchange, ExchangeStats, Groups, Joined, LocalTeam, StepResult
    from .hosted import HostedModel
    from .sharing import SharedArrays, share
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
    "HostedModel",
    "Joined",
    "LocalTeam",
    "Message",
    "MessageError",
    "Mismatch",
    "Node",
    "NonFiniteUpdate",
    "NotConnected",
    "Part",
    "Partition",
    "Peer",
    "PeerLost",
    "ResidualClip",
    "ShakeUp",
    "SharedArrays",
    "StepResult",
    "StepThreshold",
    "TargetBytes",
    "TargetDensity",
    "TooLarge",
    "TransportError",
    "WouldBlock",
    "__version__",
    "apply",
    "apply_many",
    "backends",
    "coprocessor",
    "cost",
    "cuda_message",
    "decode",
    "dense_message",
    "dl4j",
    "max_message_bytes",
    "parse_many",
    "share",
]

_EXCHANGE = ("Exchange", "ExchangeStats", "Groups", "Joined", "LocalTeam", "StepResult")
_LAZY = {
    "HostedModel": "hosted",
    "SharedArrays": "sharing",
    "share": "sharing",
    **dict.fromkeys(("Node", "Peer"), "transport"),
    **dict.fromkeys(_EXCHANGE, "exchange"),
}
_MODULES = (
    "coprocessor",
    "cost",
    "dl4j",
    "exchange",
    "feed",
    "jax",
    "reference",
    "spark",
    "torch",
    "transport",
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"gradwire.{_LAZY[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"gradwire.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("gradwire")
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
