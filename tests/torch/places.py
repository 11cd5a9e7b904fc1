"""Where optimisers are shared: by one machine alone, by two machines, or by a team of two workers of one machine."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire as gw  # noqa: E402
import gradwire.torch  # noqa: E402
from gradwire import rendezvous  # noqa: E402

from .test_optimizer import flat, run_together, train  # noqa: E402

SECRET = bytes(range(32))
PLACES = ["alone", "machines", "team"]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}
# Whole updates, and no factor for several nodes: with the same data everywhere, all is as without sharing.
AS_PLAIN: dict[str, Any] = {"codec": "dense", "update_scale": 1.0}

NUMBERS = itertools.count()

Share = Callable[..., Any]
Work = Callable[[int, Share], Any]


def run_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str, Work], list[Any]]]:
    """Yield a function that runs work(rank, share) alone, on two machines, or as a team of two workers."""
    groups = SimpleNamespace(
        get_rank=lambda group: group.rank,
        get_world_size=lambda _: 2,
        ProcessGroup=object,
    )
    with ExitStack() as stack:

        def node(**options: Any) -> gw.Node:
            return stack.enter_context(gw.Node("127.0.0.1:0", secret=SECRET, **options))

        def run(place: str, work: Work) -> list[Any]:
            if place == "alone":
                made = node()
                return [work(0, lambda net, each, **given: shared(net, each, made, **given))]
            if place == "machines":
                first = node(node_id=1)
                pair = [first, node(peers=[first.address], node_id=2)]
                for one in pair:
                    one.expected_peers = 1
                return run_together(
                    lambda rank: work(
                        rank, lambda net, each, **given: shared(net, each, pair[rank], **given)
                    ),
                    2,
                )
            name = f"contract-{os.getpid()}-{next(NUMBERS)}"
            monkeypatch.setattr(rendezvous, "name_of", lambda _: name)
            monkeypatch.setattr(sys.modules["gradwire.torch.share"], "dist", groups)
            leader = node()
            leader.expected_peers = 0
            return run_together(
                lambda rank: work(
                    rank,
                    lambda net, each, **given: shared(
                        net,
                        each,
                        None if rank else leader,
                        process_group=SimpleNamespace(rank=rank),
                        **given,
                    ),
                ),
                2,
            )

        yield run


def shared(net: Any, optimizer: Any, node: gw.Node | None, **options: Any) -> Any:
    return gradwire.torch.share(
        net,
        optimizer,
        **{"node": node, "timeout_s": 20.0, "on_straggler": "raise", "density": 0.1, **options},
    )


def share(net: Any, optimizer: Any = None, **options: Any) -> Any:
    """Share on this machine alone."""
    given = OPTIMIZERS["AdamW"](net.parameters()) if optimizer is None else optimizer
    return gradwire.torch.share(net, given, **{"density": 0.1, **options})


def steps(net: Any, optimizer: Any, count: int = 6, first: int = 0) -> None:
    """Train on the same data on every rank."""
    train(net, optimizer, 0, range(first, first + count))


def assert_as(net: Any, plain: Any) -> None:
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-6)
