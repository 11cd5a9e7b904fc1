"""A connected node in every task of a barrier stage, for training loops of one's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from gradwire.errors import TransportError
from gradwire.transport import Node, generate_secret, parse_secret

from .placement import host_of, where_to_bind
from .session import check_slots, keeping_slots, tagged, told_in_one_line

if TYPE_CHECKING:
    from pyspark import RDD, BarrierTaskContext

__all__ = ["node", "run"]

Result = TypeVar("Result")

_PIECE_BYTES: Final = 4 << 20
_PARTS: Final = 8
_REPLACED_S: Final = 300.0  # for executors that are lost


def pieces_of(data: bytes, most_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
    """Cut a result into rows of moderate size on its way to the driver or into a file."""
    for start in range(0, len(data), most_bytes):
        yield data[start : start + most_bytes]


def run(
    data: RDD[Any],
    train: Callable[[Node, Iterator[Any]], Result],
    *,
    secret: bytes | str | PathLike[str] | None = None,
    **options: Any,
) -> list[Result]:
    """Train on all partitions of ``data`` at the same time, one task and one node for each.

    Args:
        data: an RDD, for a DataFrame its ``.rdd``. The cluster needs a free slot for every partition at once.
        train: called in every task as ``train(node, rows)``, with the node connected to those of all other tasks and
            the rows of the task's partition; its result must be picklable.
        secret: as for `Node`; by default a new one for this call. The secret is sent to the executors with ``train``,
            unencrypted unless Spark's own connections are encrypted.
        options: for `node`.

    Returns:
        The results of ``train``, in the order of the partitions. Return a large result, such as the parameters, from
        one task only.

    Raises:
        TypeError: ``data`` is no RDD.
        ValueError: the secret is weak or malformed, there are too few slots, or dynamic allocation is on.
        GradwireError: a task failed; the error's cause is its traceback. Or executors were lost, and not replaced.

    Example:
        >>> def train(node, rows):  # doctest: +SKIP
        ...     inputs = np.array(list(rows), np.float32)
        ...     share = gw.Exchange(gw.Encoder(params.size), node)
        ...     for _ in range(100):
        ...         share.step(-0.1 * gradient(inputs, params), params)
        ...     return params
        >>> results = gradwire.spark.run(sc.parallelize(rows, 4), train)  # doctest: +SKIP
    """
    if not callable(getattr(data, "barrier", None)):
        raise TypeError(
            f"data must be an RDD, got {type(data).__name__}; use a DataFrame's .rdd, or without one (Spark Connect) "
            "call gradwire.spark.node in df.mapInPandas(..., barrier=True)"
        )
    from pyspark import BarrierTaskContext
    from pyspark.serializers import CPickleSerializer
    from pyspark.sql import SparkSession

    key = parse_secret(generate_secret() if secret is None else secret)
    session = SparkSession(data.context)
    workers = data.getNumPartitions()
    name = "the number of partitions"
    check_slots(session, workers, name)
    tag = f"gradwire-{secrets.token_hex(8)}"

    def task(rows: Iterable[Any]) -> Iterator[tuple[tuple[int, int], bytes]]:
        with node(secret=key, **options) as connected:
            result = CPickleSerializer().dumps(train(connected, iter(rows)))
        # If another task failed just when this one has ended, Spark would repeat that one alone, which would wait for
        # this one for ever.
        BarrierTaskContext.get().barrier()
        for part, piece in enumerate(pieces_of(result)):
            yield (connected.id, part), piece

    # Spark repeats a failed barrier stage only if another stage follows, so the results pass through a shuffle. They
    # come to the driver in parts: together they may be larger than spark.driver.maxResultSize.
    trained = data.barrier().mapPartitions(task)
    results: dict[int, list[bytes]] = {}
    with (
        told_in_one_line(session),
        tagged(session, tag),
        keeping_slots(session, tag, workers, _REPLACED_S, name),
    ):
        for (rank, _), piece in sorted(trained.partitionBy(_PARTS, sum).toLocalIterator()):
            results.setdefault(rank, []).append(piece)
    return [CPickleSerializer().loads(b"".join(pieces)) for pieces in results.values()]


def node(
    *,
    secret: bytes | str | PathLike[str] | None = None,
    network_mask: str | None = None,
    port: int = 0,
    timeout_s: float = 60.0,
    **options: Any,
) -> Node:
    """Return a node connected to those of all other tasks; call this once in each task of a barrier stage.

    The node's id is the number of the task's partition, so checkpoints fit when the stage runs again. Without a mask
    and without GRADWIRE_IP the node binds the address that routes to the executors of other machines, or loopback if
    there are none.

    Args:
        secret: the same in all tasks; see `Node`.
        network_mask: a network such as "10.1.1.0/24" in which every machine has one address.
        port: the first UDP port for the tasks of each machine, which use consecutive ports; 0 lets the system choose.
        timeout_s: how long to wait for the other tasks' nodes once all tasks have begun.
        options: for `Node`.

    Raises:
        TransportError: not called in a task of a barrier stage.
        TimeoutError: not all nodes could be reached; the message names those that were.
        ValueError: the port does not fit, no address reaches the other executors, or an option of `Node` is wrong.
        OSError: the address cannot be bound.
    """
    from pyspark import BarrierTaskContext

    try:
        context = BarrierTaskContext.get()
    except Exception as error:
        raise TransportError(
            "gradwire.spark.node must be called in a task of a barrier stage: use gradwire.spark.run, "
            "rdd.barrier().mapPartitions or df.mapInPandas(..., barrier=True)"
        ) from error
    tasks = range(len(context.getTaskInfos()))
    gather = context.allGather
    made = connect(context, gather, tasks, secret, network_mask, port, timeout_s, **options)
    return cast("Node", made)


def hosts_of(context: BarrierTaskContext) -> list[str]:
    """Return the host of every task's executor."""
    return [host_of(info.address) for info in context.getTaskInfos()]


def connect(
    context: BarrierTaskContext,
    gather: Callable[[str], list[str]],
    chosen: Sequence[int],
    secret: bytes | str | PathLike[str] | None,
    network_mask: str | None,
    port: int,
    timeout_s: float,
    **options: Any,
) -> Node | None:
    """Return a node connected to those of the chosen tasks, None in another task; called in all tasks.

    ``gather`` gives every task's text to all tasks; the other arguments are those of `node`.
    """
    rank = context.partitionId()
    hosts = hosts_of(context)
    made = None
    try:
        if rank in chosen:
            bind = where_to_bind(
                [hosts[task] for task in chosen], chosen.index(rank), port, network_mask
            )
            made = Node(bind, secret=secret, network_mask=network_mask, node_id=rank, **options)
        addresses = gather(made.address if made else "")
        if made is not None:
            others = {task: f"worker {task} on {hosts[task]}" for task in chosen if task != rank}
            made.names.update(others)  # for errors
            for address in filter(None, addresses):
                made.add_peer(address)
            try:
                made.wait_for_peers(len(chosen) - 1, timeout_s)
            except TimeoutError as error:
                raise TimeoutError(
                    f"{error}. Set network_mask to the network that connects the executors, or open its UDP ports "
                    '(port=...); where no UDP is allowed, train with ParameterAveraging(via="spark")'
                ) from None
        gather("")  # a task that finishes early must not close its node before all are connected
    except BaseException:
        if made is not None:
            made.close(timeout_s=0.0)
        raise
    return made
