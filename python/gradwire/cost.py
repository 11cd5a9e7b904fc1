"""A model of the cost of a training step: the time of its parts, and the bytes that each node sends and receives.

Pure functions of a `Job`: no clock, no socket. docs/scale.md derives every formula or names its source.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from .policy import as_number, owners_density
from .transport import wire

__all__ = [
    "Cost",
    "Job",
    "Rates",
    "crossover",
    "dense_ring",
    "dl4j_scalability",
    "exchange",
    "message_bytes",
    "ok_topk_bytes",
    "one_bit_bytes",
    "powersgd_bytes",
    "topology_of",
    "transfer_bytes",
]

Topology: TypeAlias = Literal["mesh", "sharded"]
Codec: TypeAlias = Literal["threshold", "dense", "bfloat16"]

OWNERS_MAX = 64
_HEADER_BYTES = 48  # of a message
_INVERTED_FROM = 0.65  # share of changed elements from which the unchanged ones are listed
_CHUNK_BYTES = 4  # of a chunk's entry in the directory of a message
_DATAGRAM_BYTES = 1_200  # the default of ``gw.transport.Limits``
_RECORD_BYTES = wire.RECORD_META_BYTES + wire.TAG_BYTES
_ACK_BYTES = wire.HEADER_BYTES + 28 + wire.TAG_BYTES  # one frame, with a bitmap of a byte
_ACK_EVERY_BYTES = 300_000
_FLOAT_BYTES = {"dense": 4, "bfloat16": 2}

# DistributedDataParallel's bucket, of float32 also where a hook sends float16; the backward pass, behind which its
# buckets travel, is two thirds of a step.
_BUCKET_BYTES = 25 << 20
_BACKWARD_SHARE = 2.0 / 3.0
_SEGMENT_BYTES = 1_448  # payload of a TCP segment
_TCP_BYTES = 52  # headers of IPv4 and TCP with time stamps
_UDP_BYTES = 28  # headers of IPv4 and UDP

_RATES_BYTES_PER_S = (1e3, 1e12)  # between which `crossover` looks


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of one machine; ``gradwire.calibration`` measures it. The defaults are those of an AMD EPYC core.

    Attributes:
        encode_s_per_element: time of the pass over residual and update.
        encode_s_per_change: time to take out and code one changed element.
        apply_s_per_change: time to decode and add one changed element.
        dense_encode_s_per_element: time to encode one element of a dense message.
        dense_apply_s_per_element: time to decode and add one element of a dense message.
        copy_s_per_element: time to copy or add one float32.
        seal_s_per_byte: time to encrypt a byte.
        transport_s_per_byte: processor time to send an encrypted byte to one peer, or to receive and decrypt one.
        message_s: fixed time of one message, from ``publish`` until the receiver has it, without the link.
    """

    encode_s_per_element: float = 2.5e-10
    encode_s_per_change: float = 4.5e-9
    apply_s_per_change: float = 4.0e-9
    dense_encode_s_per_element: float = 2.5e-9
    dense_apply_s_per_element: float = 2.5e-10
    copy_s_per_element: float = 1.5e-10
    seal_s_per_byte: float = 7.0e-11
    transport_s_per_byte: float = 8.0e-10
    message_s: float = 1.0e-4

    def __post_init__(self) -> None:
        """Refuse negative times."""
        for rate in fields(self):
            _check(rate.name, getattr(self, rate.name), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training to estimate.

    Attributes:
        elements: parameters of the model.
        nodes: machines that train together, 2 or more.
        step_s: computing time of a node in one step.
        link_bytes_per_s: rate of each node's link, in each direction.
        latency_s: one-way latency, half a round trip.
        workers: workers of one machine, in a `LocalTeam`.
        density: changed elements of a node's message over all elements; `owners_density` is that of an owner's result.
        owners: nodes that own a range in the sharded exchange; None: all, at most 64.
        frame_bytes: headers of IP and UDP, and everything that Ethernet adds: 66 on a cable, 42 where a token bucket
            counts frames without preamble, check sum and gap.
        rates: speed of every node.

    Raises:
        ValueError: a number is impossible.
        TypeError: a value is of the wrong kind.
    """

    elements: int
    nodes: int
    step_s: float
    link_bytes_per_s: float
    latency_s: float = 1e-4
    workers: int = 1
    density: float = 0.01
    owners: int | None = None
    frame_bytes: int = 66
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if not isinstance(self.rates, Rates):
            raise TypeError(f"rates must be Rates, got {reprlib.repr(self.rates)}")
        _check("elements", self.elements, 1, 2**48)
        _check("nodes", self.nodes, 2, 1 << 20)
        _check("step_s", self.step_s, 0.0, math.inf)
        _check("link_bytes_per_s", self.link_bytes_per_s, 1.0, math.inf)
        _check("latency_s", self.latency_s, 0.0, 3_600.0)
        _check("workers", self.workers, 1, 1 << 16)
        _check("density", self.density, 1e-9, 1.0)
        _check("owners", self.owner_count, 1, self.nodes)
        _check("frame_bytes", self.frame_bytes, 0, 1_000)

    @property
    def owner_count(self) -> int:
        """The number of owners."""
        return min(self.nodes, OWNERS_MAX) if self.owners is None else self.owners

    @property
    def owners_density(self) -> float:
        """The density of an owner's result in the sharded exchange."""
        return owners_density(self.density)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of the mean training step, of the node with the most work.

    With local steps the mean is over the steps with and without an exchange.

    Attributes:
        sent_bytes: bytes on the link, with all headers and acknowledgements.
        received_bytes: the same of the other direction.
        compute_s: the caller's own time.
        encode_s: time to encode, an owner's result included.
        link_s: time for which the link is busy.
        processor_s: processor time of sending and receiving, parallel to the link.
        latency_s: latency of the link and of waking up.
        apply_s: time to decode and add.
        team_s: time to add up the updates of a machine's workers, and to copy the parameters to them.
        hidden_s: part of link, processor and latency that is hidden behind computation.
        step_s: time of the whole step.
    """

    sent_bytes: float
    received_bytes: float
    compute_s: float
    link_s: float
    latency_s: float
    apply_s: float
    hidden_s: float
    step_s: float
    encode_s: float = 0.0
    processor_s: float = 0.0
    team_s: float = 0.0

    @property
    def limit(self) -> str:
        """The part that takes longest: "compute", "link", "processor", "latency", "encode", "apply" or "team"."""
        waiting_s = max(self.link_s, self.processor_s) + self.latency_s
        visible_share = 1.0 - self.hidden_s / waiting_s if waiting_s else 0.0
        # Link and processor work at the same time, so only the slower of the two is waited for.
        link_s = self.link_s if self.link_s >= self.processor_s else 0.0
        processor_s = self.processor_s if self.link_s < self.processor_s else 0.0
        parts = {
            "compute": self.compute_s,
            "link": visible_share * link_s,
            "processor": visible_share * processor_s,
            "latency": visible_share * self.latency_s,
            "encode": self.encode_s,
            "apply": self.apply_s,
            "team": self.team_s,
        }
        return max(parts, key=parts.__getitem__)

    def speedup_over(self, other: Cost) -> float:
        """Return how many times as fast this step is as another."""
        return other.step_s / self.step_s if self.step_s else math.inf


# ---- bytes -----------------------------------------------------------------------------------------------------------


def message_bytes(elements: float, density: float, codec: Codec = "threshold") -> float:
    """Return the expected bytes of a message whose changes are at random places; real messages are usually smaller.

    Golomb-Rice: k bits of remainder, 1 / (1 - q^(2^k)) bits of quotient and a bit of sign for each changed element,
    with q = 1 - density and the best k. Where nearly all change, the unchanged elements are listed.

    Raises:
        ValueError: a number is impossible, or the codec unknown.
        TypeError: a value is of the wrong kind.
    """
    _check("elements", elements, 0, 2**48)
    _check("density", density, 0.0, 1.0)
    if codec not in ("threshold", *_FLOAT_BYTES):
        raise ValueError(f"codec is {codec!r}, must be one of threshold, {', '.join(_FLOAT_BYTES)}")
    if codec != "threshold":
        return _HEADER_BYTES + _FLOAT_BYTES[codec] * elements
    changed = elements * density
    if changed < 1.0:
        return float(_HEADER_BYTES)
    listed = density if density < _INVERTED_FROM else 1.0 - density
    bits = changed + elements * listed * min(_rice_bits(listed, k) for k in range(48))
    chunk = 1 << max(8, (math.ceil(changed) - 1).bit_length() // 2 + 2)
    return _HEADER_BYTES + _CHUNK_BYTES * max(1.0, changed / chunk) + bits / 8.0


def _rice_bits(density: float, k: int) -> float:
    """Return the bits of the distance to the next listed element."""
    if not 0.0 < density < 1.0:
        return density
    return k - 1.0 / math.expm1(float(1 << k) * math.log1p(-density))


def transfer_bytes(payload_bytes: float, job: Job) -> float:
    """Return the bytes on the link of one message to one peer: records, datagrams and frames.

    Raises:
        ValueError: ``payload_bytes`` is impossible.
        TypeError: it is no number.
    """
    _check("payload_bytes", payload_bytes, 0, math.inf)
    fragment = _DATAGRAM_BYTES - wire.HEADER_BYTES
    record = wire.fragments_per_record(_DATAGRAM_BYTES) * fragment - _RECORD_BYTES
    records = max(1, math.ceil(payload_bytes / record))
    sealed = payload_bytes + records * _RECORD_BYTES
    return sealed + math.ceil(sealed / fragment) * (wire.HEADER_BYTES + job.frame_bytes)


def _ack_bytes(payload_bytes: float, job: Job) -> float:
    """Return the bytes on the link of the acknowledgements of one message."""
    return (1 + payload_bytes // _ACK_EVERY_BYTES) * (_ACK_BYTES + job.frame_bytes)


def _tcp_bytes(payload_bytes: float, job: Job) -> float:
    """Return the bytes on the link of a TCP stream, and of the acknowledgements of an equal stream back."""
    per_segment = _TCP_BYTES + job.frame_bytes - _UDP_BYTES
    return payload_bytes * (1.0 + 1.5 * per_segment / _SEGMENT_BYTES)


def powersgd_bytes(shapes: Iterable[Sequence[int]], rank: int, nodes: int) -> float:
    """Return the bytes of PowerSGD's two factors, each way per step, all-reduced in a ring, without headers.

    Args:
        shapes: shapes of the model's tensors; dimensions after the first count as one. Tensors of one dimension are
            sent whole.
        rank: rank of the factors.
        nodes: nodes of the ring.

    Raises:
        ValueError: a number is impossible.
        TypeError: a value is of the wrong kind.
    """
    _check("rank", rank, 1, 1 << 30)
    _check("nodes", nodes, 1, 1 << 20)
    numbers = 0
    for shape in shapes:
        rows, *others = *shape, 1
        numbers += min(rank * (rows + math.prod(others)), math.prod(shape))
    return 2.0 * (nodes - 1) / nodes * 4.0 * numbers


def one_bit_bytes(elements: int, nodes: int) -> float:
    """Return the bytes each way per step of DeepSpeed's 1-bit all-reduce: signs to the owners, and signs back.

    Raises:
        ValueError: a number is impossible.
        TypeError: a value is of the wrong kind.
    """
    _check("elements", elements, 0, 2**48)
    _check("nodes", nodes, 1, 1 << 20)
    return 2.0 * (nodes - 1) / nodes * elements / 8.0


def ok_topk_bytes(elements: int, density: float, nodes: int) -> tuple[float, float]:
    """Return the least and the most bytes each way per step of Ok-Topk: 2k to 6k words of 4 bytes, k changed.

    Raises:
        ValueError: a number is impossible.
        TypeError: a value is of the wrong kind.
    """
    _check("elements", elements, 0, 2**48)
    _check("density", density, 0.0, 1.0)
    _check("nodes", nodes, 1, 1 << 20)
    word_bytes = 4.0 * (nodes - 1) / nodes * elements * density
    return 2.0 * word_bytes, 6.0 * word_bytes


# ---- times -----------------------------------------------------------------------------------------------------------


def exchange(
    job: Job,
    topology: Topology = "mesh",
    codec: Codec = "threshold",
    *,
    every: int = 1,
    overlap: int = 0,
) -> Cost:
    """Return the cost of a step of ``gw.Exchange`` with these options.

    Raises:
        ValueError: an option is impossible.
        TypeError: an option is of the wrong kind.
    """
    if topology not in ("mesh", "sharded"):
        raise ValueError(f"topology is {topology!r}, must be 'mesh' or 'sharded'")
    _check("every", every, 1, 1 << 30)
    _check("overlap", overlap, 0, every)
    phases, encode_s, apply_s = (_sharded if topology == "sharded" else _mesh)(job, codec)
    passes_s = job.elements * job.rates.copy_s_per_element
    team_s = 2.0 * job.workers * passes_s if job.workers > 1 else 0.0
    if every > 1:  # the difference to the shared copy, and the new copy
        encode_s += 3.0 * passes_s
    waiting_s = sum(max(phase.link_s, phase.processor_s) for phase in phases)
    latency_s = len(phases) * (job.latency_s + job.rates.message_s)
    hidden_s = min(waiting_s + latency_s, overlap * job.step_s)
    once_s = encode_s + apply_s + waiting_s + latency_s - hidden_s
    return Cost(
        sent_bytes=sum(phase.sent_bytes for phase in phases) / every,
        received_bytes=sum(phase.received_bytes for phase in phases) / every,
        compute_s=job.step_s,
        encode_s=encode_s / every,
        link_s=sum(phase.link_s for phase in phases) / every,
        processor_s=sum(phase.processor_s for phase in phases) / every,
        latency_s=latency_s / every,
        apply_s=apply_s / every,
        team_s=team_s,
        hidden_s=hidden_s / every,
        step_s=job.step_s + team_s + once_s / every,
    )


@dataclass(frozen=True)
class _Phase:
    """Messages that all nodes send at the same time; bytes on the link and times of the busiest node."""

    sent_bytes: float
    received_bytes: float
    link_s: float
    processor_s: float


# The phases of an exchange, the time to encode, and the time to apply.
_Parts: TypeAlias = tuple[list[_Phase], float, float]


def _mesh(job: Job, codec: Codec) -> _Parts:
    """Everybody's message to everybody: sealed once, sent and received n - 1 times, applied n times."""
    others = job.nodes - 1
    size_bytes = message_bytes(job.elements, job.density, codec)
    phase = _phase(job, size_bytes, others, others, sealed=1)
    encode_s = job.elements * _encode_s_per_element(job, job.density, codec)
    apply_s_per_element = _apply_s_per_element(job, job.density, codec)
    return [phase], encode_s, job.nodes * job.elements * apply_s_per_element


def _sharded(job: Job, codec: Codec) -> _Parts:
    """Parts to their owners, who add and encode them, and the owners' results to everybody."""
    owners = job.owner_count
    others = job.nodes - 1
    part_elements = job.elements / owners
    part_bytes = message_bytes(part_elements, job.density, codec)
    result_bytes = message_bytes(part_elements, job.owners_density, codec)
    scatter = _phase(job, part_bytes, owners - 1, others, sealed=owners - 1)
    gather = _phase(job, result_bytes, others, owners - 1, sealed=1)
    encode_s = job.elements * _encode_s_per_element(job, job.density, codec)
    encode_s += part_elements * _encode_s_per_element(job, job.owners_density, codec)
    owner_s = job.nodes * part_elements * _apply_s_per_element(job, job.density, codec)
    apply_s = job.elements * _apply_s_per_element(job, job.owners_density, codec)
    return [scatter, gather], encode_s + owner_s, apply_s


def _phase(job: Job, size_bytes: float, sent: int, received: int, sealed: int) -> _Phase:
    """Return the phase in which a node sends and receives so many messages; ``sealed`` of those sent are different."""
    data_bytes = transfer_bytes(size_bytes, job)
    ack_bytes = _ack_bytes(size_bytes, job)
    sent_bytes = sent * data_bytes + received * ack_bytes
    received_bytes = received * data_bytes + sent * ack_bytes
    processor_s = (
        sealed * size_bytes * job.rates.seal_s_per_byte
        + (sent + received) * size_bytes * job.rates.transport_s_per_byte
        + max(sent, received) * job.rates.message_s
    )
    link_s = max(sent_bytes, received_bytes) / job.link_bytes_per_s
    return _Phase(sent_bytes, received_bytes, link_s, processor_s)


def _encode_s_per_element(job: Job, density: float, codec: Codec) -> float:
    if codec != "threshold":
        return job.rates.dense_encode_s_per_element
    return job.rates.encode_s_per_element + density * job.rates.encode_s_per_change


def _apply_s_per_element(job: Job, density: float, codec: Codec) -> float:
    if codec != "threshold":
        return job.rates.dense_apply_s_per_element
    return density * job.rates.apply_s_per_change


def dense_ring(job: Job, element_bytes: int = 4) -> Cost:
    """Return the cost of a step with a ring all-reduce of all gradients over TCP.

    All buckets but the last travel during the backward pass, as DistributedDataParallel's do.

    Args:
        job: its density does not matter. The workers of a machine are ranks of the ring, neighbours where possible.
        element_bytes: 4, or 2 for float16.
    """
    ranks = job.nodes * job.workers
    share = (ranks - 1) / ranks
    link_bytes = _tcp_bytes(2.0 * share * element_bytes * job.elements, job)
    add_s = share * job.elements * job.rates.copy_s_per_element
    latency_s = 2.0 * (job.nodes - 1) * job.latency_s
    link_s = link_bytes / job.link_bytes_per_s
    whole_s = link_s + add_s + latency_s
    # The last bucket is full only when the backward pass is over, so nothing hides it.
    last_s = whole_s * min(1.0, _BUCKET_BYTES / (4.0 * job.elements))
    visible_s = max(whole_s - _BACKWARD_SHARE * job.step_s, last_s)
    return Cost(
        sent_bytes=link_bytes,
        received_bytes=link_bytes,
        compute_s=job.step_s,
        link_s=link_s,
        latency_s=latency_s,
        apply_s=add_s,
        hidden_s=whole_s - visible_s,
        step_s=job.step_s + visible_s,
    )


def topology_of(job: Job) -> Topology:
    """Return the faster topology."""
    is_faster = exchange(job, "sharded").step_s < exchange(job, "mesh").step_s
    return "sharded" if is_faster else "mesh"


def crossover(job: Job) -> float:
    """Return the link rate, in bytes per second, from which a float32 ring is as fast as an exchange in every step.

    0.0 if the ring is as fast at every rate, infinity if it is slower on the fastest links. The job's own link rate
    does not matter.
    """

    def is_slower(rate: float) -> bool:
        other = replace(job, link_bytes_per_s=rate)
        return exchange(other, topology_of(other)).step_s > dense_ring(other).step_s

    low, high = _RATES_BYTES_PER_S
    if not is_slower(high):
        return math.inf
    if is_slower(low):
        return 0.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_slower(middle) else (middle, high)
    return high


def dl4j_scalability(
    iteration_ms: float = 550.0,
    encode_ms: float = 50.0,
    decode_ms: float = 5.0,
    service_ms: float = 20.0,
    nodes: int = 8,
    workers: int = 4,
) -> float:
    """Return the expected scalability, 0 to 1, of the form in Deeplearning4j's documentation, with its defaults.

    The form has no link: neither rate, latency nor message size.

    Raises:
        ValueError: a number is impossible.
        TypeError: a value is of the wrong kind.

    >>> round(dl4j_scalability(), 3)
    0.705
    """
    for name, value in (("iteration_ms", iteration_ms), ("nodes", nodes), ("workers", workers)):
        _check(name, value, 1e-9, math.inf)
    overheads = (("encode_ms", encode_ms), ("decode_ms", decode_ms), ("service_ms", service_ms))
    for name, value in overheads:
        _check(name, value, 0.0, math.inf)
    overhead_ms = encode_ms + decode_ms * nodes * workers + service_ms
    return iteration_ms / (iteration_ms + overhead_ms)


def _check(name: str, value: float, least: float, most: float) -> None:
    number = as_number(name, value)
    if not least <= number <= most or number == math.inf:
        bounds = (
            f"at least {least:g}" if most == math.inf else f"from {least:,.15g} to {most:,.15g}"
        )
        raise ValueError(f"{name} is {number:g}, must be {bounds}")
