"""``gradwire estimate``: whether gradwire will help, before training."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradwire import cost
from gradwire.cost import Cost, Job, Topology

DESCRIPTION = """\
Estimate the time and the bytes of a training step with gradwire and with PyTorch's ways to exchange gradients: from the
model's size, the time that a step computes, and the link. docs/scale.md has the formulas. The speed of this machine is
measured once, in about two seconds. Units: 10Mbit, 1Gbit, 125MB (each per second); 200ms, 0.2s; --params 25e6.
"""

POWERSGD_RANK = 4
SQUARE = (1_024, 1_024)  # of the weights, where only their number is known
LITTLE = 1.1  # times as fast: less is not worth a change
LOCAL_GAIN = 1.25  # the same of local steps, which cost accuracy
MEASURE_S = 1.5
PLOT_DECADES = 6.0, 11.0  # of the link rate in bit/s

_RATE = re.compile(r"([\d.e+-]+)\s*([kMGT]?)(bit|bps|B)(?:/s|ps)?", re.ASCII)
_TIME = re.compile(r"([\d.e+-]+)\s*(s|ms|us|µs)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True)
class Line:
    """One line of the table; a cost of None: only the bytes are known."""

    name: str
    sent_bytes: float
    received_bytes: float
    cost: Cost | None = None
    code: str = ""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "estimate", help="say before training whether gradwire will help", description=DESCRIPTION
    )
    parser.add_argument("--params", help="parameters of the model, such as 25e6")
    parser.add_argument("--model", help="module:factory that returns the model, to count them")
    parser.add_argument("--step", help="time that a node computes in one step, such as 200ms")
    parser.add_argument("--nodes", default="2", help="machines (default: 2)")
    parser.add_argument("--workers", default="1", help="workers of one machine (default: 1)")
    parser.add_argument("--link", help="rate of a node's link, such as 1Gbit")
    parser.add_argument("--latency", help="one way, half of what ping shows (default: 0.1ms)")
    parser.add_argument("--density", default="0.01", help="of the messages (default: 0.01)")
    measure = "measure rate and latency to this address, where gradwire doctor --serve runs"
    parser.add_argument("--measure", metavar="host:port", help=measure)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up over link rate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the advice, and return the exit status."""
    try:
        shapes, job = _job(arguments)
        lines = list(table(job, shapes))
        if arguments.plot:
            plot(job, arguments.plot)
    except (ValueError, OSError) as error:
        print(f"gradwire estimate: {error}", file=sys.stderr)
        return 2
    says, crossover = advice(lines), cost.crossover(job)
    if arguments.json:
        print(_as_json(job, lines, says, crossover))
        return 0
    facts = f"{job.elements:,} parameters, {job.nodes} nodes, {_time(job.step_s)} of computation, "
    facts += (
        f"{_rate(job.link_bytes_per_s)}, {_time(job.latency_s)} one way, density {job.density:g}"
    )
    print(f"{facts}\n\n{'':24}{'step':>10}{'sent':>11}{'received':>11}{'speed-up':>10}  limited by")
    ring = lines[0].cost
    for line in lines:
        sizes = f"{_bytes(line.sent_bytes):>11}{_bytes(line.received_bytes):>11}"
        if line.cost is None or ring is None:
            print(f"{line.name:24}{'':10}{sizes}")
            continue
        step, faster = _time(line.cost.step_s), f"{line.cost.speedup_over(ring):.2f}x"
        print(f"{line.name:24}{step:>10}{sizes}{faster:>10}  {line.cost.limit}")
    print(f"\n{says}")
    if math.isfinite(crossover):
        print(f"The float32 ring is as fast from {_rate(crossover)} on.")
    return 0


# ---- the question ----------------------------------------------------------------------------------------------------


def _job(arguments: argparse.Namespace) -> tuple[list[tuple[int, ...]], Job]:
    """Return the shapes of the parameters and the job.

    Raises:
        ValueError: an argument is missing, or cannot be understood, or no peer answers.
    """
    if (arguments.params is None) == (arguments.model is None):
        raise ValueError("give either --params or --model")
    if arguments.step is None:
        raise ValueError("give --step, the time that a node computes in one step, such as 200ms")
    if (arguments.link is None) == (arguments.measure is None):
        raise ValueError("give either --link or --measure")
    step_s = seconds("--step", arguments.step)
    if arguments.model is not None:
        shapes = model_shapes(arguments.model)
        elements = sum(map(math.prod, shapes))
    else:
        elements = whole("--params", arguments.params)
        side = elements / math.prod(SQUARE)
        shapes = [SQUARE] * int(side) or [(elements,)]
    job = Job(
        elements=elements,
        nodes=whole("--nodes", arguments.nodes),
        workers=whole("--workers", arguments.workers),
        step_s=step_s,
        link_bytes_per_s=rate("--link", arguments.link) if arguments.link else 1.0,
        latency_s=seconds("--latency", arguments.latency or "0.1ms"),
        density=number("--density", arguments.density),
    )
    if arguments.measure:
        job = _measured(job, arguments.measure, has_latency=arguments.latency is not None)
    # Imported here, and used last, because wrong arguments should not wait for it.
    from gradwire import calibration

    return shapes, replace(job, rates=calibration.rates())


def _measured(job: Job, target: str, *, has_latency: bool) -> Job:
    from .doctor import link

    try:
        found = link.measure(target, MEASURE_S)
    except (TimeoutError, link.LinkError) as error:
        raise ValueError(
            f"--measure {target}: run `gradwire doctor --serve` there; {error}"
        ) from None
    goodput = min(found.out.bytes_per_s, found.back.bytes_per_s)
    overhead = cost.transfer_bytes(link.BULK_BYTES, job) / link.BULK_BYTES
    latency_s = job.latency_s if has_latency else found.round_trip_p50_s / 2.0
    return replace(job, link_bytes_per_s=goodput * overhead, latency_s=latency_s)


def model_shapes(target: str) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a model: of ``parameters()``, or of all arrays in lists and mappings.

    Args:
        target: "module:factory"; modules of the current folder are found.
    """
    name, _, factory = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(name), factory or "?")()
    except Exception as error:  # a foreign function may raise anything
        raise ValueError(f"--model {target}: {type(error).__name__}: {error}") from error
    finally:
        del sys.path[0]
    shapes = list(_shapes(made.parameters() if hasattr(made, "parameters") else made))
    if not shapes:
        raise ValueError(f"--model {target}: {type(made).__name__} has no parameters")
    return shapes


def _shapes(found: Any) -> Iterator[tuple[int, ...]]:
    if hasattr(found, "shape"):
        yield tuple(found.shape)
    elif isinstance(found, Mapping):
        yield from _shapes(list(found.values()))
    elif hasattr(found, "__iter__") and not isinstance(found, (str, bytes)):
        for one in found:
            yield from _shapes(one)


def number(name: str, text: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none; the message names the option.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} {text}: not a number")
    return value


def whole(name: str, text: str) -> int:
    """Return a whole number, which may be written as 25e6."""
    value = number(name, text)
    if value != int(value):
        raise ValueError(f"{name} {text}: not a whole number")
    return int(value)


def rate(name: str, text: str) -> float:
    """Return bytes per second.

    >>> rate("--link", "1Gbit"), rate("--link", "10 Mbit/s"), rate("--link", "1.5GB/s")
    (125000000.0, 1250000.0, 1500000000.0)
    """
    found = _RATE.fullmatch(text)
    if found is None:
        raise ValueError(f"{name} {text}: not a rate such as 10Mbit, 1Gbit/s or 125MB/s")
    bits = number(name, found[1]) * _PREFIX[found[2]] * (8.0 if found[3] == "B" else 1.0)
    return bits / 8.0


def seconds(name: str, text: str) -> float:
    """Return seconds.

    >>> seconds("--step", "200ms"), seconds("--step", "0.2")
    (0.2, 0.2)
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{name} {text}: not a time such as 0.2, 200ms or 50us")
    return number(name, found[1]) * _SECONDS[found[2]]


# ---- the answer ------------------------------------------------------------------------------------------------------


def table(job: Job, shapes: Sequence[Sequence[int]]) -> Iterator[Line]:
    """Yield the lines of the table, the float32 ring first."""
    for ring, code in (
        (cost.dense_ring(job), "DistributedDataParallel(model)"),
        (cost.dense_ring(job, 2), "model.register_comm_hook(None, fp16_compress_hook)"),
    ):
        yield Line(f"dense {ring.name}", ring.sent_bytes, ring.received_bytes, ring, code)
    factors = cost.powersgd_bytes(shapes, POWERSGD_RANK, job.nodes)
    yield Line(f"PowerSGD, rank {POWERSGD_RANK}", factors, factors)
    best = cost.topology_of(job)
    ways: list[tuple[Topology, int]] = [("mesh", 1), ("sharded", 1), (best, 4), (best, 20)]
    for topology, every in ways:
        options = f'topology="{topology}"' + (f", every={every}" if every > 1 else "")
        name = topology if every == 1 else f"{every} local steps, {topology}"
        found = cost.exchange(job, topology, every=every)
        code = f"gw.Exchange(encoder, node, {options})"
        yield Line(name, found.sent_bytes, found.received_bytes, found, code)


def advice(lines: Sequence[Line]) -> str:
    """Return one sentence: what to use, why, and the code to write."""
    timed = [(line, line.cost) for line in lines if line.cost is not None]
    ring = timed[0][1]
    rival, rival_cost = min(timed[:2], key=lambda pair: pair[1].step_s)
    line, best = min(timed[2:4], key=lambda pair: pair[1].step_s)
    for other, found in timed[4:]:
        if best.step_s > LOCAL_GAIN * found.step_s:
            line, best = other, found
    if rival_cost.step_s < LITTLE * best.step_s:
        return (
            f"gradwire does not pay here: {rival.name} takes {_time(rival_cost.step_s)} and {line.name} "
            f"{_time(best.step_s)}, limited by {best.limit}; keep {rival.code}."
        )
    return (
        f"gradwire pays: {line.name} takes {_time(best.step_s)} instead of {_time(ring.step_s)}, "
        f"{best.speedup_over(ring):.3g} times as fast, limited by {best.limit}; write {line.code}."
    )


def _as_json(job: Job, lines: Sequence[Line], says: str, crossover: float) -> str:
    ring = lines[0].cost
    rows = [
        {
            "name": line.name,
            "sent_bytes": line.sent_bytes,
            "received_bytes": line.received_bytes,
            "step_s": line.cost.step_s,
            "speedup": line.cost.speedup_over(ring),
            "limit": line.cost.limit,
            "parts": asdict(line.cost),
        }
        if line.cost is not None and ring is not None
        else {
            "name": line.name,
            "sent_bytes": line.sent_bytes,
            "received_bytes": line.received_bytes,
        }
        for line in lines
    ]
    content = {
        "job": asdict(job),
        "rows": rows,
        "advice": says,
        "crossover_bytes_per_s": crossover if math.isfinite(crossover) else None,
    }
    return json.dumps(content, indent=1)


def plot(job: Job, path: Path) -> None:
    """Draw the speed-up over a float32 ring at all link rates, and mark where there is none.

    Raises:
        ValueError: matplotlib is missing, or has no format of this name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install "gradwire[demo]"') from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    low, high = PLOT_DECADES
    rates = [10.0 ** (low + index * (high - low) / 100) for index in range(101)]
    ways: list[tuple[Topology, int]] = [("mesh", 1), ("sharded", 1), ("mesh", 4), ("mesh", 20)]
    for topology, every in ways:
        speedups = []
        for bits in rates:
            there = replace(job, link_bytes_per_s=bits / 8.0)
            best = topology if every == 1 else cost.topology_of(there)
            ring = cost.dense_ring(there)
            speedups.append(cost.exchange(there, best, every=every).speedup_over(ring))
        axes.plot(rates, speedups, label=topology if every == 1 else f"{every} local steps")
    crossover = cost.crossover(job)
    if math.isfinite(crossover):
        axes.axvline(8.0 * crossover, color="grey", linestyle=":")
        axes.annotate(f" ring as fast from\n {_rate(crossover)} on", (8.0 * crossover, 2.0))
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axvline(8.0 * job.link_bytes_per_s, color="black", linewidth=0.8, label="this link")
    axes.set(xscale="log", yscale="log", xlabel="link rate, bit/s")
    axes.set(ylabel="times as fast as a float32 ring")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _time(time_s: float) -> str:
    return f"{time_s:.4g} s" if time_s >= 10.0 else f"{time_s * 1e3:.4g} ms"


def _rate(bytes_per_s: float) -> str:
    bits = 8.0 * bytes_per_s
    prefix = next((one for one in "TGMk" if bits >= _PREFIX[one]), "")
    return f"{bits / _PREFIX[prefix]:.3g} {prefix}bit/s"


def _bytes(count: float) -> str:
    prefix = next((one for one in "TGMk" if count >= _PREFIX[one]), "")
    return f"{count / _PREFIX[prefix]:.3g} {prefix}B"
