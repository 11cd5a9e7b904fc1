"""The hook refuses, at registration, what would go wrong later: another rank's options, momentum twice, Adam."""

from __future__ import annotations

import datetime
import gc
import logging
import weakref
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from gradwire.errors import MessageError  # noqa: E402
from gradwire.torch import register_threshold_hook  # noqa: E402

from .linear import Linear  # noqa: E402
from .ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.torch


class OwnPolicy:
    """A policy with the repr of `object`, which has its address."""

    initial = 0.5
    sample_density = None

    def next_threshold(self, threshold: float, *_: object) -> float:
        return threshold


def refused(rank: int, kind: str, options: dict[str, Any]) -> str:
    model = Linear()
    optimizer = {
        "none": lambda: None,
        "own policy": lambda: None,
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "AdamW": lambda: torch.optim.AdamW(model.parameters()),
    }[kind]()
    own = {
        name: value[rank] if isinstance(value, list) else value for name, value in options.items()
    }
    if kind == "own policy":
        own["threshold"] = OwnPolicy()
    try:
        state = register_threshold_hook(DistributedDataParallel(model), optimizer=optimizer, **own)
    except ValueError as error:
        return str(error)
    return f"threshold {state.threshold}"


def timeout_of_the_messages(rank: int, timeout: datetime.timedelta) -> datetime.timedelta:
    model = Linear()
    group = torch.distributed.new_group([0, 1], timeout=timeout)
    ddp = DistributedDataParallel(model, process_group=group)
    state = register_threshold_hook(ddp)
    ddp([torch.full_like(weight, float(rank)) for weight in model.weights]).backward()
    given: datetime.timedelta = state._gather._group.options._timeout
    return given


def test_the_messages_have_the_timeout_that_the_user_gave_the_process_group(
    two_ranks: Ranks,
) -> None:
    timeout = datetime.timedelta(seconds=77)
    assert two_ranks.run(timeout_of_the_messages, timeout) == [timeout] * 2


def step_where_ranks_have_other_groups(rank: int) -> float:
    both = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
    leaders = dist.new_group([0])  # as of each machine's first rank; the others do not have it
    model = Linear()
    register_threshold_hook(ddp := DistributedDataParallel(model, process_group=both))
    ddp([torch.full_like(weight, float(rank)) for weight in model.weights]).backward()
    for group in [both, leaders][: 2 - rank]:
        dist.destroy_process_group(group)
    return float(model.weights[0].grad.mean())


def test_ranks_may_have_different_numbers_of_process_groups(two_ranks: Ranks) -> None:
    assert two_ranks.run(step_where_ranks_have_other_groups) == [0.5, 0.5]


def step_with_a_checkpoint_on_rank_0(rank: int) -> str:
    model = Linear()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=10))
    state = register_threshold_hook(ddp := DistributedDataParallel(model, process_group=group))
    if rank == 0:
        state.load_state_dict({**state.state_dict(), "step": 20})
    try:
        ddp([torch.ones_like(weight) for weight in model.weights]).backward()
    except MessageError as error:
        return str(error)
    return "no error"


def test_ranks_of_which_one_alone_has_loaded_a_checkpoint_raise_before_the_first_step(
    two_ranks: Ranks,
) -> None:
    first, second = two_ranks.run(step_with_a_checkpoint_on_rank_0)
    assert "rank 1 sent bucket 0 of step 0, this rank is at bucket 0 of step 20" in first
    assert "rank 0 sent bucket 0 of step 20, this rank is at bucket 0 of step 0" in second


def groups_left(rank: int) -> int:
    groups = []
    for _ in range(3):
        model = Linear()
        state = register_threshold_hook(ddp := DistributedDataParallel(model))
        ddp([torch.full_like(weight, float(rank)) for weight in model.weights]).backward()
        groups.append(weakref.ref(state._gather._group))
        del model, ddp, state
    gc.collect()
    return sum(group() is not None for group in groups)


def test_a_model_that_is_gone_leaves_no_connections(two_ranks: Ranks) -> None:
    assert two_ranks.run(groups_left) == [0, 0]


def lines_about_nan(_: int, steps: int) -> list[str]:
    model = Linear()
    ddp = DistributedDataParallel(model)
    state = register_threshold_hook(ddp)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("gradwire").addHandler(handler)
    for _ in range(steps):
        ddp([torch.full_like(weight, float("nan")) for weight in model.weights]).backward()
    logging.getLogger("gradwire").removeHandler(handler)
    assert state.stats.skipped_steps == steps - 1
    return lines


def test_a_training_that_has_gone_nan_says_so_once(two_ranks: Ranks) -> None:
    for lines in two_ranks.run(lines_about_nan, 4):
        assert len(lines) == 1
        assert "HookStats.skipped_steps counts further ones" in lines[0]
        assert "GradScaler, which skips such steps" in lines[0]
        assert "on_nonfinite" not in lines[0]  # the hook has no such option


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("none", {}, "threshold None"),
        ("own policy", {}, "threshold <"),
        ("momentum", {}, "threshold None"),
        ("none", {"warmup_steps": [1, 2]}, "warmup_steps is 1 on rank 0, 2 on rank 1"),
        ("momentum", {"momentum": 0.9}, "momentum 0.9 and the hook 0.9"),
        ("AdamW", {}, "use gradwire.torch.share"),
    ],
)
def test_registration(two_ranks: Ranks, kind: str, options: Any, match: str) -> None:
    for text in two_ranks.run(refused, kind, options):
        assert match in text
