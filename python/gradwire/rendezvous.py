"""The place of this process in a distributed run, as the launcher's environment variables describe it."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "PORT_LAST",
    "Placement",
    "await_names",
    "format_address",
    "has_secret",
    "name_of",
    "parse_address",
    "placement",
]

BIND = "GRADWIRE_BIND"
PEERS = "GRADWIRE_PEERS"
MIN_PEERS = "GRADWIRE_MIN_PEERS"
SECRETS = ("GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE")

# Ports for launchers that name none: 20,000 to 31,999, chosen by the name of the run. From 32,768 on Linux gives ports
# to sockets that ask for any: another program, or another rank of the run, might have taken rank 0's.
_PORT_FIRST = 20_000
_PORTS = 12_000
PORT_LAST = 65_535

# Longest wait for a name, and the pause between two questions.
_NAME_WAIT_S = 600.0
_NAME_PAUSE_S = 0.5

# SLURM's step of the shell that salloc gives, as a name and as its number.
_INTERACTIVE_STEPS = ("interactive", "4294967290")

# The number of processes, by the names that SLURM's versions give it.
_SLURM_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS")

# A process's rank and the number of processes, by its names: one of the two alone says that something is missing.
_PAIRS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", *_SLURM_SIZES),
)

# The variables with the numbers of a `Placement`, by its launcher.
_NUMBERS = {
    "Open MPI": tuple(
        f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": (
        *("SLURM_PROCID", *_SLURM_SIZES, "SLURM_LOCALID"),
        *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    "Kubernetes": ("JOB_COMPLETION_INDEX", MIN_PEERS),
}
_TORCHRUN_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

# Variables of launchers that do not tell where the other processes are: PMIx, Flux, PALS, MVAPICH2, JSM.
_OTHER_RANKS = (
    *("PMIX_RANK", "FLUX_TASK_RANK", "PALS_RANKID"),
    *("MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """This process among those of its run.

    Attributes:
        hint: what to set if the numbers are not meant for this process; empty: they are.
        launcher: the source of the numbers, for messages; empty: no launcher, and nothing in the environment.
        rank: of this process; None: unknown.
        size: number of processes; None: unknown.
        local_rank: of this process on its machine.
        local_size: number of processes on this machine.
        machines: number of machines; 0: as many as hold ``size`` processes, ``local_size`` on each.
        seed: "host:port" of rank 0; empty: none.
        run: name of the run, the same on all its processes.
        bind, peers, min_peers: of ``GRADWIRE_BIND``, ``GRADWIRE_PEERS`` and ``GRADWIRE_MIN_PEERS``, which take
            precedence; None: not set.
    """

    launcher: str = ""
    rank: int | None = None
    size: int | None = None
    local_rank: int = 0
    local_size: int = 1
    seed: str = ""
    run: str = ""
    machines: int = 0
    bind: str | None = None
    peers: tuple[str, ...] | None = None
    min_peers: int | None = None
    hint: str = ""

    def expected_peers(self, *, per_machine: bool = False) -> int | None:
        """Return the number of other nodes in the run; None: as many as there are addresses.

        Args:
            per_machine: count one node for every machine, not one for every process.
        """
        if self.min_peers is not None:
            return self.min_peers
        return None if self.peers is not None else self._others(per_machine)

    def is_alone(self, *, per_machine: bool = False) -> bool:
        """Return whether this node expects no other, knows none, and is not looked for.

        With ``GRADWIRE_MIN_PEERS=0`` a node of a run of several begins alone, and late ones come to it or to rank 0.
        """
        has_others = self.peers is not None or (bool(self.seed) and self._others(per_machine) > 0)
        return self.expected_peers(per_machine=per_machine) == 0 and not has_others

    def _others(self, per_machine: bool) -> int:
        """Return the number of other nodes that the launcher knows."""
        size = self.size or 1
        machines = self.machines or -(-size // self.local_size)
        return (machines if per_machine else size) - 1

    def node_options(self, *, per_machine: bool = False) -> dict[str, Any]:
        """Return the arguments of `Node` for this process: ``bind``, ``peers`` and, with a rank, ``node_id``.

        Raises:
            ValueError: there are other processes, and nothing tells where they are.
        """
        expected = self.expected_peers(per_machine=per_machine)
        options: dict[str, Any] = {} if self.rank is None else {"node_id": self.rank}
        if self.is_alone(per_machine=per_machine):
            return {"bind": self.bind or "127.0.0.1:0", "peers": (), **options}
        if self.peers is not None:
            return {"bind": self.bind or "0.0.0.0:0", "peers": self.peers, **options}
        if not self.seed:
            if self.bind is not None:  # the others come to this node
                return {"bind": self.bind, "peers": (), **options}
            raise ValueError(
                f"there are other nodes ({self.launcher or MIN_PEERS}: {expected}), and nothing says where: set "
                f'MASTER_ADDR and MASTER_PORT to the address of rank 0, or {PEERS} to the "host:port" of at least one, '
                f"and on that one {BIND} to the port"
            )
        host, port = parse_address(self.seed)
        if not port:
            raise ValueError(
                "MASTER_PORT is 0, a port of the system's choice, at which no other node can find rank 0: set it to "
                "the same number from 1 to 65535 in every process"
            )
        wildcard = "[::]" if ":" in host else "0.0.0.0"  # noqa: S104
        if self.rank != 0:
            return {"bind": self.bind or f"{wildcard}:0", "peers": (self.seed,), **options}
        if self.bind is not None and parse_address(self.bind)[1] != port:
            _LOG.warning(
                "rank 0 binds %s, and the other nodes look for it at %s: let both have one port, or give %s to all",
                self.bind,
                self.seed,
                PEERS,
            )
        return {"bind": self.bind or f"{wildcard}:{port}", "peers": (), **options}

    def names(self, *, per_machine: bool = False) -> dict[int, str]:
        """Return the names of the run's nodes by their ids, for messages; empty where they cannot be known."""
        step = self.local_size if per_machine else 1
        if self.size is None or (per_machine and self.machines * step not in (0, self.size)):
            return {}
        source = f" of {self.launcher}" if self.hint else ""
        return {rank: f"rank {rank}{source}" for rank in range(0, self.size, step)}


def await_names(place: Placement, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a node when the names of its peers are known, with the wildcard of their IP version.

    Orchestrators start the processes of a run and make their names known at about the same time.

    Args:
        place: of this process.
        options: of ``place.node_options``.

    Raises:
        TimeoutError: a name is not known within ten minutes.
    """
    families = {_family_of(address, _NAME_WAIT_S) for address in options["peers"]}
    if not families and place.rank == 0 and place.seed:
        # The others use this name. Whether rank 0 knows it as well does not matter.
        families = {_family_of(place.seed, 0.0)}
    wildcard, port = parse_address(options["bind"])
    if families == {socket.AF_INET6} and wildcard == "0.0.0.0" and place.bind is None:  # noqa: S104
        return {**options, "bind": format_address(("::", port))}
    return options


def _family_of(address: str, wait_s: float) -> int:
    """Return the address family of a "host:port", IPv4 if it has both, or if there is no time to wait for it."""
    try:
        host, _ = parse_address(address)
    except ValueError:
        return socket.AF_INET  # the node says what is wrong
    deadline_s = time.monotonic() + wait_s
    has_warned = False
    while True:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except UnicodeError:
            return socket.AF_INET  # no name at all, as the node says
        except OSError as error:
            if not wait_s:
                return socket.AF_INET
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"the name {host!r} is not known within {wait_s:g} s ({error}): check MASTER_ADDR or "
                    f"{PEERS}, and the name server (in Kubernetes the headless service)"
                ) from None
            if not has_warned:
                _LOG.warning("the name %r is not known yet (%s), and waited for", host, error)
            has_warned = True
            time.sleep(_NAME_PAUSE_S)
        else:
            families = {int(entry[0]) for entry in entries}
            return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def format_address(address: tuple[str, int]) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port"; raise `ValueError` unless the port is a number from 0 to 65,535."""
    if not isinstance(text, str):
        raise TypeError(f'an address is text such as "10.1.1.7:40123", not {text!r}')
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: write an IPv6 address as [host]:port")
    if not separator or not port.isdecimal() or int(port) > PORT_LAST:
        raise ValueError(f"address {text!r} is not of the form host:port, with a port up to 65535")
    return host, int(port)


def placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Return the place of this process, from the variables of torchrun, SLURM, MPI, Kubernetes or gradwire itself.

    Args:
        environ: the variables; None: this process's.

    Raises:
        ValueError: a variable is not what it has to be, is missing, or contradicts another; the message names it.
    """
    variables = os.environ if environ is None else environ
    launched = (
        _torchrun(variables)
        or _mpi(variables)
        or _slurm(variables)
        or _kubernetes(variables)
        or _alone(variables)
    )
    _check(launched, variables)
    return replace(
        launched,
        bind=_checked(BIND, variables[BIND]) if variables.get(BIND) else None,
        peers=tuple(_checked(PEERS, address) for address in _addresses(variables)) or None,
        min_peers=_number(variables, MIN_PEERS) if variables.get(MIN_PEERS) else None,
    )


def has_secret() -> bool:
    """Return whether the environment has a cluster secret."""
    return any(os.environ.get(name) for name in SECRETS)


def name_of(place: Placement) -> str:
    """Return a name of the run that this machine's processes share and other runs do not."""
    return f"run-{zlib.crc32(place.run.encode()):08x}"


def _torchrun(variables: Mapping[str, str]) -> Placement | None:
    """torchrun, `gradwire run`, Kubeflow, and others that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    seed = _seed(variables)
    # After a restart the run has another name, so that its processes do not meet those of the run before.
    restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = variables.get("TORCHELASTIC_RUN_ID", "")
    return Placement(
        "torchrun" if job else "RANK and WORLD_SIZE",
        _number(variables, "RANK"),
        _number(variables, "WORLD_SIZE"),
        _number(variables, "LOCAL_RANK", 0),
        _number(variables, "LOCAL_WORLD_SIZE", 1),
        seed,
        # Several agents of one computer, as in tests, are machines of their own, with teams of their own.
        f"torchrun {job} {seed} {restarts} {variables.get('GROUP_RANK', '')}",
        _number(variables, "GROUP_WORLD_SIZE", 0),
    )


def _mpi(variables: Mapping[str, str]) -> Placement | None:
    """Open MPI's mpirun, and MPICH, Intel MPI and others that speak PMI."""
    for launcher, job in (
        ("Open MPI", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
        ("PMI", ("PMI_JOBID", "I_MPI_HYDRA_UUID", "HYDI_CONTROL_FD", "PMI_PORT")),
    ):
        rank, size, local_rank, local_size = _NUMBERS[launcher]
        if rank not in variables or size not in variables:
            continue
        if local_rank not in variables and "SLURM_PROCID" in variables:
            continue  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but SLURM's own variables say more
        run = " ".join([launcher, *(variables.get(name, "") for name in job)])
        count = _number(variables, size)
        local_count = _number(variables, local_size, 1)
        seed = _seed(variables)
        if not seed and local_count == count:
            seed = f"127.0.0.1:{_port_of(run)}"
        return Placement(
            launcher,
            _number(variables, rank),
            count,
            _number(variables, local_rank, 0),
            local_count,
            seed,
            run,
        )
    return None


def _slurm(variables: Mapping[str, str]) -> Placement | None:
    """SLURM's srun."""
    sizes = [name for name in _SLURM_SIZES if name in variables]
    if "SLURM_PROCID" not in variables or not sizes:
        return None
    run = f"SLURM {variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}"
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    first = _first_host(hosts)
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
    counts = _task_counts(tasks)
    machine = _number(variables, "SLURM_NODEID", 0)
    size = _number(variables, sizes[0])
    hint = ""
    # A shell has the variables of its job's first task, though nobody has started the others.
    is_interactive = variables.get("SLURM_STEP_ID", "") in _INTERACTIVE_STEPS
    if size > 1 and (is_interactive or any(name.startswith("SLURM_PTY_") for name in variables)):
        hint = (
            f"SLURM says that this is one of {size} tasks, but this is an interactive shell: start the script with "
            f"srun, or run `unset SLURM_PROCID {' '.join(sizes)}` to train alone"
        )
    return Placement(
        "SLURM",
        _number(variables, "SLURM_PROCID"),
        size,
        _number(variables, "SLURM_LOCALID", 0),
        counts[machine] if machine < len(counts) else 1,
        _seed(variables) or (f"{first}:{_port_of(run)}" if first else ""),
        run,
        len(counts),
        hint=hint,
    )


def _kubernetes(variables: Mapping[str, str]) -> Placement | None:
    """An indexed Job with a headless service: pod i has the host name JOB-i; GRADWIRE_MIN_PEERS says how many more."""
    if "JOB_COMPLETION_INDEX" not in variables:
        return None
    index = _number(variables, "JOB_COMPLETION_INDEX")
    if not variables.get(MIN_PEERS):
        raise ValueError(
            "JOB_COMPLETION_INDEX is set, but Kubernetes does not say how many pods the indexed job has: set "
            f"{MIN_PEERS} to spec.completions - 1"
        )
    size = _number(variables, MIN_PEERS) + 1
    name = variables.get("HOSTNAME", "")
    full = socket.getfqdn(name) if name else ""
    host, _, domain = full.partition(".")
    job, dash, _ = host.rpartition("-")
    first = f"{job}-0" + (f".{domain}" if domain else "") if dash else ""
    run = f"Kubernetes {job}"
    seed = _seed(variables) or (f"{first}:{_port_of(run)}" if first else "")
    return Placement("Kubernetes", index, size, 0, 1, seed, run)


def _alone(variables: Mapping[str, str]) -> Placement:
    """No launcher whose variables are complete. What is left of one must not make a training alone unnoticed."""
    hint = _blank_peers(variables)
    if any(variables.get(name) for name in (PEERS, BIND, MIN_PEERS)):
        return Placement(hint=hint)
    for rank, *sizes in _PAIRS:
        size = next((name for name in sizes if name in variables), "")
        if rank in variables and not size:
            name, missing = rank, sizes[0]
            # A batch script of SLURM is task 0, and has a number of tasks only if it asks for one.
            is_alone = name == "SLURM_PROCID" and variables[name] == "0"
        elif size and rank not in variables:
            name, missing = size, rank
            is_alone = _number(variables, size) == 1
        else:
            continue
        if not is_alone:
            start = "start the script with srun" if "SLURM" in name else "set it in every process"
            raise ValueError(
                f"{name} is {variables[name]}, but {missing} is not set: {start}, or unset {name} to train alone"
            )
    return Placement(hint=_leftover(variables) or hint)


def _blank_peers(variables: Mapping[str, str]) -> str:
    """Return what to set if GRADWIRE_PEERS is there without an address, as from an empty variable of a script."""
    if PEERS not in variables or _addresses(variables) or variables.get(MIN_PEERS):
        return ""
    return (
        f"{PEERS} is {variables[PEERS]!r}, without an address, so this process trains alone: set it to the "
        f'"host:port" of another node; if alone is meant, unset it or set {MIN_PEERS}=0'
    )


def _leftover(variables: Mapping[str, str]) -> str:
    """Return what says, without a rank or an address, that this process may not be meant to train alone."""
    ranks = [name for name in _OTHER_RANKS if name in variables]
    if variables.get("SM_HOSTS", "").count(",") > 0:
        ranks.append("SM_HOSTS")  # SageMaker's list of all hosts
    if ranks:
        return (
            f"{ranks[0]} says that this process may be one of several, but not where the others are, so it trains "
            "alone: start the script with torchrun (SageMaker: distribution=torch_distributed), or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if variables.get("MASTER_ADDR", "").strip() and "WORLD_SIZE" not in variables:
        return (
            f"MASTER_ADDR is {variables['MASTER_ADDR']}, but RANK and WORLD_SIZE are not set, so this process trains "
            "alone: set them in every process (torchrun does), or unset MASTER_ADDR if that is meant"
        )
    return ""


def _check(place: Placement, variables: Mapping[str, str]) -> None:
    """Raise `ValueError` if the numbers of a launcher contradict each other: the others would be waited for in vain."""
    problem = _contradiction(place)
    if problem:
        names = _NUMBERS.get(place.launcher, _TORCHRUN_NUMBERS)
        given = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise ValueError(f"{place.launcher}: {problem} ({given})")


def _contradiction(place: Placement) -> str:
    """Return how the numbers of a launcher contradict each other; empty: they do not."""
    here = "processes on this machine"
    if place.rank is None or place.size is None:
        return ""
    if place.size < 1:
        return f"{place.size} processes in all: there is one at least"
    if place.rank >= place.size:
        return f"rank {place.rank} of {place.size} processes: ranks are 0 to {place.size - 1}"
    if place.local_size < 1:
        return f"{place.local_size} {here}: there is one at least"
    if place.local_size > place.size:
        return f"{place.local_size} {here}, but {place.size} in all"
    # A launcher may leave out the number of this machine's processes, which are then nodes of their own.
    if place.local_rank >= place.local_size > 1:
        last = place.local_size - 1
        return f"local rank {place.local_rank} of {place.local_size} {here}: local ranks are 0 to {last}"
    return ""


def _seed(variables: Mapping[str, str]) -> str:
    """Return the address of rank 0, from MASTER_ADDR and MASTER_PORT."""
    host = variables.get("MASTER_ADDR", "").strip()
    if not host or not variables.get("MASTER_PORT"):
        return ""
    if not _may_exist(host):
        raise ValueError(
            f"the environment variable MASTER_ADDR is {host!r}, must be a name or an IP address without brackets, "
            "scheme or port: the port goes into MASTER_PORT"
        )
    port = _number(variables, "MASTER_PORT")
    if port > PORT_LAST:
        raise ValueError(
            f"the environment variable MASTER_PORT is {port}, must be a port, up to {PORT_LAST}"
        )
    return format_address((host, port))


def _may_exist(host: str) -> bool:
    """Return whether this is a name or an address: what can never exist would be waited for as a name not known yet."""
    if re.fullmatch(r"[\w.-]+", host):
        return True
    try:
        socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return False
    return True


def _addresses(variables: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filter(None, re.split(r"[,\s]+", variables.get(PEERS, ""))))


def _port_of(run: str) -> int:
    return _PORT_FIRST + zlib.crc32(run.encode()) % _PORTS


def _first_host(hosts: str) -> str:
    """Return the first host of SLURM's compressed list, such as "gpu[003-007,9],cpu1".

    >>> _first_host("gpu[003-007,9],cpu1"), _first_host("a,b"), _first_host("rack[0-1]n[3-4]")
    ('gpu003', 'a', 'rack0n3')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else ""


def _task_counts(tasks: str) -> list[int]:
    """Return the number of tasks of each machine from SLURM's compressed list.

    >>> _task_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    return counts


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {name} is {text!r}, must be a whole number, 0 or more"
        )
    return int(text)


def _checked(name: str, address: str) -> str:
    """Return an address of an environment variable; raise `ValueError`, with the variable's name, if it is none."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if name == PEERS and not (port and _may_exist(host)):
        raise ValueError(
            f"{PEERS}: address {address!r} must have a name or an IP address, and a port from 1 to 65535"
        )
    return address
