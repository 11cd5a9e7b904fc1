"""Ray Train: a backend that tells every worker where the others are, and makes no process group."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any, ClassVar

try:
    import ray
    from ray.train.backend import Backend, BackendConfig
except ModuleNotFoundError as error:
    text = 'gradwire.ray needs Ray Train: pip install "gradwire[ray]"'
    raise ModuleNotFoundError(text, name=error.name) from error

from .cli.run import free_port
from .rendezvous import format_address

__all__ = ["GradwireConfig"]


@dataclass
class GradwireConfig(BackendConfig):  # type: ignore[misc,unused-ignore]
    """Lets the workers of Ray Train share a training: with `gradwire.torch.share`, `gradwire.share`, or JAX's.

    Give it to ``TorchTrainer`` as ``torch_config``, or to ``DataParallelTrainer`` as ``backend_config``. Workers get
    the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), the addresses of all nodes, and a
    secret that is new in every run. The workers of one Ray node are a team, which sends one message per step.

    Args:
        replace_workers: whether Ray replaces only the worker that has died, while the others go on; the training
            function has to be written for this, as ``docs/howto/ray.md`` shows. Every worker is then a node of its own.
            False: after a failure Ray starts all workers again. ``FailureConfig(max_failures=)`` says how often.
    """

    replace_workers: bool = False
    backend: ClassVar[str] = "gradwire"  # where there is none, TorchTrainer takes one of torch's

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that prepares the workers, for Ray."""
        return _ReplacingBackend if self.replace_workers else _TeamBackend


@dataclass(frozen=True)
class _Seat:
    """Where a worker runs, and a free port there."""

    rank: int
    world_size: int
    ray_node: str
    host: str
    port: int

    def address(self) -> str:
        return format_address((self.host, self.port))


class _TeamBackend(Backend):  # type: ignore[misc,unused-ignore]
    def on_start(self, worker_group: Any, _: GradwireConfig) -> None:
        """Set the variables of all workers, or of one that replaces another."""
        if not hasattr(worker_group, "get_workers"):
            raise TypeError("gradwire.ray needs a trainer of Ray Train V2, such as TorchTrainer")
        seats: list[_Seat] = worker_group.execute(_seat)
        if len(seats) == seats[0].world_size:
            self._seats: dict[int, _Seat] = {}
            self._common = {
                "MASTER_ADDR": seats[0].host,
                "MASTER_PORT": str(seats[0].port),
                "WORLD_SIZE": str(len(seats)),
                "GRADWIRE_SECRET": secrets.token_hex(32),
            }
        self._seats.update({seat.rank: seat for seat in seats})
        for index, seat in enumerate(seats):
            worker_group.execute_single(index, _set_variables, self._variables(seat))

    def _variables(self, seat: _Seat) -> dict[str, str]:
        teams: dict[Any, list[_Seat]] = {}
        for other in self._seats.values():
            teams.setdefault(self._team_of(other), []).append(other)
        team = teams[self._team_of(seat)]
        # All addresses, not only rank 0's: a worker that replaces rank 0 has to find the others.
        peers = [members[0].address() for members in teams.values() if members is not team]
        wildcard = "[::]" if ":" in seat.host else "0.0.0.0"  # noqa: S104
        return {
            **self._common,
            "RANK": str(seat.rank),
            "LOCAL_RANK": str(team.index(seat)),
            "LOCAL_WORLD_SIZE": str(len(team)),
            "GROUP_RANK": str(list(teams).index(self._team_of(seat))),
            "GROUP_WORLD_SIZE": str(len(teams)),
            "GRADWIRE_BIND": f"{wildcard}:{seat.port}",
            "GRADWIRE_PEERS": ",".join(peers),
            "GRADWIRE_MIN_PEERS": str(len(peers)),
        }

    def _team_of(self, seat: _Seat) -> Any:
        return seat.ray_node


class _ReplacingBackend(_TeamBackend):
    has_replica_groups = True

    def _team_of(self, seat: _Seat) -> Any:
        return (
            seat.rank
        )  # nodes, unlike the workers of a team, all know in which step a node is gone


def _seat() -> _Seat:
    context, node = ray.train.get_context(), ray.get_runtime_context().get_node_id()
    host = ray.util.get_node_ip_address()
    return _Seat(context.get_world_rank(), context.get_world_size(), node, host, free_port())


def _set_variables(variables: dict[str, str]) -> None:
    os.environ.pop("GRADWIRE_SECRET_FILE", None)
    os.environ.update(variables)
