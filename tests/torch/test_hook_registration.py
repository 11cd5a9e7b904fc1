"""The hook refuses, at registration, what would go wrong later: another rank's options, momentum twice, Adam."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradwire.torch import register_threshold_hook  # noqa: E402

from .linear import Linear  # noqa: E402
from .ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.torch


def refused(rank: int, kind: str, options: dict[str, Any]) -> str:
    model = Linear()
    optimizer = {
        "none": lambda: None,
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "AdamW": lambda: torch.optim.AdamW(model.parameters()),
    }[kind]()
    own = {
        name: value[rank] if isinstance(value, list) else value for name, value in options.items()
    }
    try:
        state = register_threshold_hook(DistributedDataParallel(model), optimizer=optimizer, **own)
    except ValueError as error:
        return str(error)
    return f"threshold {state.threshold}"


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("none", {}, "threshold None"),
        ("momentum", {}, "threshold None"),
        ("none", {"warmup_steps": [1, 2]}, "warmup_steps is 1 on rank 0, 2 on rank 1"),
        ("momentum", {"momentum": 0.9}, "momentum 0.9 and the hook 0.9"),
        ("AdamW", {}, "use gradwire.torch.share"),
    ],
)
def test_registration(two_ranks: Ranks, kind: str, options: Any, match: str) -> None:
    for text in two_ranks.run(refused, kind, options):
        assert match in text
