"""Training on Spark: a node in every task of a barrier stage, all connected to each other.

Spark starts the tasks, all at the same time, and gives each its part of the data. The updates travel between the tasks
directly, never through the driver; there is no master.

Needs ``pip install "gradwire[spark]"`` where the driver runs and gradwire on every executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.errors import TransportError
from gradwire.transport import Node, generate_secret, parse_secret

from .placement import host_of, where_to_bind

if TYPE_CHECKING:
    from pyspark import RDD

__all__ = ["node", "run"]

Result = TypeVar("Result")


def run(
    data: RDD[Any],
    train: Callable[[Node, Iterator[Any]], Result],
    *,
    secret: bytes | str | PathLike[str] | None = None,
    **options: Any,
) -> list[Result]:
    """Train on all partitions of ``data`` at the same time, one task and one node for each.

    Args:
        data: an RDD; of a DataFrame its ``.rdd``. As many tasks as it has partitions have to find room at once.
        train: called in every task as ``train(node, rows)``, with the node connected to those of all other tasks and
            the rows of the task's partition; what it returns has to be picklable.
        secret: as for `Node`; by default a new one for this call. It goes to the executors with ``train``: in the clear
            where Spark's own connections are not encrypted.
        options: for `node`.

    Returns:
        What ``train`` has returned, in the order of the partitions.

    Raises:
        TypeError: ``data`` is no RDD.
        ValueError: the secret is a weak one or none at all.
        py4j.protocol.Py4JJavaError: a task has failed, or not all find room at once; it has the task's traceback.

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
            f"data must be an RDD, got {type(data).__name__}; a DataFrame has one in its .rdd, and where it has not "
            "(Spark Connect), call gradwire.spark.node in df.mapInPandas(..., barrier=True)"
        )
    key = parse_secret(generate_secret() if secret is None else secret)

    def task(rows: Iterator[Any]) -> Iterator[Result]:
        with node(secret=key, **options) as connected:
            yield train(connected, rows)

    results: list[Result] = data.barrier().mapPartitions(task).collect()
    return results


def node(
    *,
    secret: bytes | str | PathLike[str] | None = None,
    network_mask: str | None = None,
    port: int = 0,
    timeout_s: float = 60.0,
    **options: Any,
) -> Node:
    """Return a node that is connected to those of all other tasks; to be called once in each task of a barrier stage.

    Its id is the number of the task's partition, so checkpoints fit when the stage runs again. Without a mask and
    without GRADWIRE_IP it binds the address on the way to the executors of other machines, or loopback if there are
    none.

    Args:
        secret: the same in all tasks; see `Node`.
        network_mask: a network such as "10.1.1.0/24" in which every machine has one address.
        port: the first UDP port for the tasks of each machine, which take one each; 0 lets the system choose.
        timeout_s: how long to wait for the others once all have begun.
        options: for `Node`.

    Raises:
        TransportError: not in a task of a barrier stage.
        TimeoutError: not all others could be reached; the message names those that were.
        ValueError: the port does not fit, no address reaches the other executors, or an option of `Node` is wrong.
        OSError: the address cannot be bound.
    """
    from pyspark import BarrierTaskContext

    try:
        context = BarrierTaskContext.get()
    except Exception as error:
        raise TransportError(
            "gradwire.spark.node connects the tasks of a barrier stage, and this is none: use gradwire.spark.run, "
            "rdd.barrier().mapPartitions or df.mapInPandas(..., barrier=True)"
        ) from error
    rank = context.partitionId()
    hosts = [host_of(info.address) for info in context.getTaskInfos()]
    bind = where_to_bind(hosts, rank, port, network_mask)
    made = Node(bind, secret=secret, network_mask=network_mask, node_id=rank, **options)
    try:
        for address in context.allGather(made.address):
            made.add_peer(address)
        made.wait_for_peers(len(hosts) - 1, timeout_s)
        context.barrier()  # who is done early must not be gone before the last has met everybody
    except BaseException:
        made.close(timeout_s=0.0)
        raise
    return made
