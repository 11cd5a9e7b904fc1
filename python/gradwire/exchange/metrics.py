"""What monitoring wants: Prometheus' text format, and a callback that writes to TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from .results import ExchangeStats, StepResult

__all__ = ["prometheus_text", "to_tensorboard"]

# What only grows; the rest are gauges.
_COUNTERS = {
    "steps": "steps finished that sent a message",
    "local_steps": "steps that sent none",
    "sent_bytes": "bytes of this node's messages",
    "received_bytes": "bytes of the peers' messages that were applied",
    "received": "messages of peers that were applied",
    "ignored": "messages from nodes that are no members",
    "lost": "members that went",
    "joined": "members that came",
    "digests": "comparisons of all replicas that found them the same",
    "encode_s": "seconds spent encoding",
    "wait_s": "seconds spent waiting for room and for the others",
    "apply_s": "seconds spent adding to the parameters",
}
_GAUGES = {
    "ratio": "float32 bytes of all updates per byte sent",
    "density": "changed elements per element in the last message",
    "threshold": "threshold of the last message",
    "staleness": "steps ahead of the slowest member",
    "members": "other members",
    "residual_norm": "Euclidean norm of what was not sent yet",
}
_PER_STEP = (
    "sent_bytes",
    "received_bytes",
    "received",
    "ratio",
    "density",
    "threshold",
    "staleness",
    "encode_s",
    "wait_s",
    "apply_s",
)


def prometheus_text(stats: ExchangeStats, labels: Mapping[str, str] | None = None) -> str:
    r"""Return the statistics in Prometheus' text format, to be served by whatever serves metrics.

    Args:
        stats: ``Exchange.stats``.
        labels: for every line.

    >>> import gradwire as gw
    >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
    ...     share = gw.Exchange(gw.Encoder(8), node)
    ...     text = gw.exchange.prometheus_text(share.stats, {"rank": "0"})
    >>> text.splitlines()[2]
    'gradwire_steps_total{rank="0"} 0'
    """
    pairs = [f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items()]
    suffix = "{" + ",".join(pairs) + "}" if pairs else ""
    lines = []
    for field in fields(stats):
        is_counter = field.name in _COUNTERS
        name = (
            "gradwire_" + re.sub("_s$", "_seconds", field.name) + ("_total" if is_counter else "")
        )
        explanation = (_COUNTERS if is_counter else _GAUGES)[field.name]
        lines.append(f"# HELP {name} {explanation}")
        lines.append(f"# TYPE {name} {'counter' if is_counter else 'gauge'}")
        lines.append(f"{name}{suffix} {getattr(stats, field.name):.12g}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def to_tensorboard(writer: Any, prefix: str = "gradwire/") -> Callable[[StepResult], None]:
    """Return a callback for ``on_step`` that writes every step to TensorBoard.

    Args:
        writer: a SummaryWriter, or anything with its ``add_scalar``; or a folder, for which torch's is made.
        prefix: of the names.

    Raises:
        ImportError: ``writer`` is a folder, and torch or tensorboard is not installed.
    """
    if not hasattr(writer, "add_scalar"):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ImportError(
                f"writing to {writer!r} takes torch and tensorboard: pip install torch tensorboard; or hand in a "
                "writer of your own that has add_scalar"
            ) from error
        writer = SummaryWriter(writer)

    def write(result: StepResult) -> None:
        for name in _PER_STEP:
            writer.add_scalar(prefix + name, getattr(result, name), result.step)

    return write
