"""What has to be the same on all nodes, and how two of them differ."""

from __future__ import annotations

from typing import Any

from .control import VERSION
from .groups import Groups
from .options import Options

__all__ = ["Model"]

MESSAGE_VERSION = 1  # of docs/message-format.md

_VERSIONS = "versions"
_LATE = ("params", "optimizer_state")

# Longer lists are told by their first difference: a model may have thousands of tensors.
_LISTED_MAX = 4


class Model:
    """Everything that has to be the same on all nodes, by name, as JSON has it.

    What the parameters and the optimiser's averaged state are like (dtype and shape of each array) is known only when
    the caller hands them in; before that they fit any others.

    Args:
        entries: by name; "versions" among them.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries: dict[str, Any] = {**entries, **dict.fromkeys(_LATE)}

    @staticmethod
    def of(options: Options, groups: Groups) -> Model:
        """Return the model of one node."""
        return Model(
            {
                _VERSIONS: [VERSION, MESSAGE_VERSION],
                "groups": [[one.key, one.numel, one.dtype] for one in groups.encoders],
                "mode": options.mode,
                "every": options.every,
                "reduction": options.reduction,
                "exact": options.exact,
                "average_optimizer": options.average_optimizer,
                "outer_momentum": options.outer_momentum,
            }
        )

    def learn(self, late: dict[str, list[Any]]) -> bool:
        """Take what is known only late, by name; return whether anything has changed."""
        before = dict(self.entries)
        self.entries.update(late)
        return self.entries != before

    def differing(self, theirs: dict[str, Any]) -> list[str]:
        """Return the names of what differs; of nodes of other versions only that."""
        own = self.entries
        if own == theirs:
            return []
        if own[_VERSIONS] != theirs.get(_VERSIONS):
            return [_VERSIONS]
        return [
            name
            for name in sorted({*own, *theirs})
            if own.get(name) != theirs.get(name)
            and not (name in _LATE and None in (own[name], theirs.get(name)))
        ]

    def difference(self, theirs: dict[str, Any]) -> str:
        """Return in words how another node's differs."""
        return ", ".join(
            _told(name, theirs.get(name), self.entries.get(name)) for name in self.differing(theirs)
        )


def _told(name: str, there: Any, here: Any) -> str:
    if not isinstance(there, list) or not isinstance(here, list):
        return f"{name} {there} there, {here} here"
    if max(len(there), len(here)) <= _LISTED_MAX:
        return f"{name} {there} there, {here} here"
    if len(there) != len(here):
        return f"{len(there)} {name} there, {len(here)} here"
    index = next(
        at for at, (one, other) in enumerate(zip(there, here, strict=True)) if one != other
    )
    return f"{name}[{index}] {there[index]} there, {here[index]} here"
