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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradwire import cost
from gradwire.cost import Cost, Job, Topology
from gradwire.exchange.options import Options
from gradwire.policy import default_policy

from .units import si

DESCRIPTION = """\
Estimate the time and the bytes of a training step with gradwire and with PyTorch's ways to exchange gradients, from the
size of the model, the time that a step computes, and the link. docs/scale.md has the formulas. The speed of this
machine is measured once, in about two seconds. Units: 25M, 1.3B parameters; 10Mbit, 1Gbit/s, 1Gbps, 125MB (each per
second); 200ms, 0.2s.
"""

POWERSGD = "PowerSGD, rank 4"
POWERSGD_RANK = 4
SQUARE = (1_024, 1_024)  # shape of the weights, where only their number is known
# The names of optimisers, for the density that share would choose.
ADAPTIVE = (
    *("adamw", "adam", "adamax", "nadam", "radam", "adagrad", "adadelta", "adafactor", "rmsprop"),
    *("lamb", "lion", "muon", "novograd", "sophia", "shampoo"),
)
PLAIN = ("sgd", "momentum", "nesterov", "asgd")
# Spark's workers start, import torch and connect before the first step.
SPARK_START_S = (10.0, 20.0)
GAIN_MIN = 1.1  # times as fast: less is not worth a change
LOCAL_GAIN_MIN = 1.25  # the same for local steps, which cost accuracy
LOCAL_STEPS = (4, 15, 30)
LOCAL_ADVICE = (
    " Local steps raise the loss, the more so the more there are: try overlap=1 and fewer of them first, and compare "
    "the losses (docs/howto/slow-links.md)."
)
MEASURE_S = 1.5
# What the numbers of a `Job` are on the command line.
OPTIONS = {
    "elements": "--params",
    "nodes": "--nodes",
    "workers": "--workers",
    "step_s": "--step, in seconds,",
    "link_bytes_per_s": "--link, in bytes per second,",
    "latency_s": "--latency, in seconds,",
    "density": "--density",
}
PROCESSOR_SHARE_MAX = 0.25  # of the time, from which a measured rate is that of the processor
PLOT_DECADES = (6.0, 11.0)  # of the link rate in bit/s

_RATE = re.compile(r"([-\d.e+]+)\s*([kmgt]?)(bits?|bps|(?-i:[bB]))(?:/s|/sec|ps)?", re.ASCII | re.I)
_COUNT = re.compile(r"([-+\d.e]+)\s*([kmbgt]?)", re.ASCII | re.I)
_TIME = re.compile(r"([-\d.e+]+)\s*(s|ms|us|µs)?")
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIX, "b": 1e9}
_SECONDS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class Way(NamedTuple):
    """A way to exchange gradients: its line in the table, the cost of a step, and the code to write."""

    name: str
    cost: Cost
    code: str


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "estimate", help="say before training whether gradwire will help", description=DESCRIPTION
    )
    parser.add_argument("--params", help="parameters of the model, such as 25M")
    parser.add_argument("--model", help="module:factory that returns the model, to count them")
    parser.add_argument("--step", help="time that a node computes in one step, such as 200ms")
    parser.add_argument("--nodes", default="2", help="number of machines (default: 2)")
    parser.add_argument("--workers", default="1", help="workers of each machine (default: 1)")
    parser.add_argument("--link", help="rate of a node's link, such as 1Gbit")
    parser.add_argument("--latency", help="one-way latency, half of ping's time (default: 0.1ms)")
    optimizer = "of the training, such as adamw or sgd (default: adamw)"
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=optimizer)
    density = "density of messages (default: what share chooses for model and optimiser)"
    parser.add_argument("--density", help=density)
    spark = "the training runs on Spark, whose engine has to start first"
    parser.add_argument("--spark", action="store_true", help=spark)
    measure = "measure rate and latency to this address, where gradwire doctor --serve runs"
    parser.add_argument("--measure", metavar="host:port", help=measure)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up over link rate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the advice, and return the exit status."""
    try:
        job, shapes = _job(arguments)
        if arguments.plot:
            plot(job, arguments.plot, has_default_density=arguments.density is None)
    except (ValueError, OSError) as error:
        print(f"gradwire estimate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    is_default = arguments.density is None
    candidates = ways(job, is_spark=arguments.spark, has_default_density=is_default)
    crossover = cost.crossover(job)
    sentences = [advice(candidates)]
    if math.isfinite(crossover):
        where = f"from {_rate(crossover)} on" if crossover else "at any link rate"
        sentences.append(f"The float32 ring is as fast as an exchange in every step {where}.")
    if arguments.spark:
        sentences.append(spark_advice(job, candidates))
    if arguments.measure is not None and _is_processor_limited(job):
        sentences.append("The link may be faster than measured: give --link if you know its rate.")
    ring = candidates[0].cost
    rows: list[dict[str, Any]] = [
        {
            "name": way.name,
            "speedup": way.cost.speedup_over(ring),
            "limit": way.cost.limit,
            **asdict(way.cost),
        }
        for way in candidates
    ]
    factors_bytes = _powersgd_bytes(job, shapes)
    powersgd = {"name": POWERSGD, "sent_bytes": factors_bytes, "received_bytes": factors_bytes}
    rows.insert(2, powersgd)  # after the rings, which PyTorch has as well
    if arguments.json:
        page = {
            "job": asdict(job),
            "rows": rows,
            "advice": sentences,
            "crossover_bytes_per_s": crossover if math.isfinite(crossover) else None,
        }
        print(json.dumps(page, indent=1))
        return 0
    print(
        f"{job.elements:,} parameters, {job.nodes} nodes, {_time(job.step_s)} of computation, "
        f"{_rate(job.link_bytes_per_s)}, {_time(job.latency_s)} one way, density {job.density:.3g}"
        f"{' (share with ' + arguments.optimizer + ')' if is_default else ''}\n\n"
        f"{'':24}{'step':>10}{'sent':>11}{'received':>11}{'speed-up':>10}  limited by"
    )
    for row in rows:
        step = _time(row["step_s"]) if "step_s" in row else ""
        speedup = f"{row['speedup']:,.2f}x" if "speedup" in row else ""
        sizes = f"{si(row['sent_bytes'], 'B'):>11}{si(row['received_bytes'], 'B'):>11}"
        print(f"{row['name']:24}{step:>10}{sizes}{speedup:>10}  {row.get('limit', '')}".rstrip())
    print("", *sentences, sep="\n")
    return 0


# ---- the question ----------------------------------------------------------------------------------------------------


def _job(arguments: argparse.Namespace) -> tuple[Job, list[tuple[int, ...]]]:
    """Return the job, and the shapes of the parameters if a model is given.

    Raises:
        ValueError: an argument is missing or cannot be understood, or the peer does not answer.
    """
    if (arguments.params is None) == (arguments.model is None):
        raise ValueError("give either --params or --model")
    if arguments.step is None:
        raise ValueError("give --step, the time that a node computes in one step, such as 200ms")
    if (arguments.link is None) == (arguments.measure is None):
        raise ValueError("give either --link or --measure")
    step_s = seconds("--step", arguments.step)
    shapes = [] if arguments.model is None else model_shapes(arguments.model)
    elements = (
        sum(map(math.prod, shapes)) if shapes else whole("--params", arguments.params, least=1)
    )
    optimizer = arguments.optimizer.lower()
    if optimizer not in (*ADAPTIVE, *PLAIN):
        raise ValueError(f"--optimizer {optimizer}: not one of {', '.join((*ADAPTIVE, *PLAIN))}")
    density = default_policy(elements, is_adaptive=optimizer in ADAPTIVE).density
    if arguments.density is not None:
        density = number("--density", arguments.density)
    numbers: dict[str, Any] = {
        "elements": elements,
        "nodes": whole("--nodes", arguments.nodes, least=2),
        "workers": whole("--workers", arguments.workers, least=1),
        "step_s": step_s,
        "link_bytes_per_s": 1.0 if arguments.link is None else rate("--link", arguments.link),
        "latency_s": seconds("--latency", arguments.latency or "0.1ms"),
        "density": density,
    }
    try:
        job = Job(**numbers)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise ValueError(f"{OPTIONS[name]} {problem}") from None
    if arguments.measure is not None:
        job = _measured(job, arguments.measure, has_latency=arguments.latency is not None)
    # Imported here, and used last, because wrong arguments should not wait for it.
    from gradwire import calibration

    return replace(job, rates=calibration.rates()), shapes


def _measured(job: Job, target: str, *, has_latency: bool) -> Job:
    from .doctor import link

    try:
        measured = link.measure(target, MEASURE_S)
    except (TimeoutError, link.LinkError) as error:
        raise ValueError(
            f"--measure {target}: run `gradwire doctor --serve` there; {error}"
        ) from None
    goodput = min(measured.out.bytes_per_s, measured.back.bytes_per_s)
    overhead = cost.transfer_bytes(link.BULK_BYTES, job) / link.BULK_BYTES
    latency_s = job.latency_s if has_latency else measured.round_trip_p50_s / 2.0
    return replace(job, link_bytes_per_s=goodput * overhead, latency_s=latency_s)


def model_shapes(target: str) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a model: of ``parameters()``, or of all arrays in lists and mappings.

    Args:
        target: "module:factory"; modules of the current folder are found.
    """
    name, _, factory = target.partition(":")
    if not name or not factory:
        raise ValueError(f"--model {target}: write module:factory")
    sys.path.insert(0, os.getcwd())
    try:
        model = getattr(importlib.import_module(name), factory)()
        shapes = list(_shapes(model.parameters() if hasattr(model, "parameters") else model))
    except (Exception, SystemExit) as error:  # a foreign function may raise anything
        raise ValueError(f"--model {target}: {type(error).__name__}: {error}") from error
    finally:
        del sys.path[0]
    if not sum(map(math.prod, shapes)):
        raise ValueError(f"--model {target}: {type(model).__name__} has no parameters")
    return shapes


def _shapes(tree: Any) -> Iterator[tuple[int, ...]]:
    if hasattr(tree, "shape"):
        yield tuple(tree.shape)
    elif isinstance(tree, Mapping):
        yield from _shapes(list(tree.values()))
    elif hasattr(tree, "__iter__") and not isinstance(tree, (str, bytes)):
        for branch in tree:
            yield from _shapes(branch)


def _powersgd_bytes(job: Job, shapes: Sequence[Sequence[int]]) -> float:
    """Return the bytes of PowerSGD's factors; without shapes the parameters are square matrices."""
    if shapes:
        return cost.powersgd_bytes(shapes, POWERSGD_RANK, job.nodes)
    squares = max(1.0, job.elements / math.prod(SQUARE))
    square_bytes = cost.powersgd_bytes([SQUARE], POWERSGD_RANK, job.nodes)
    vector_bytes = cost.powersgd_bytes([(job.elements,)], POWERSGD_RANK, job.nodes)
    return min(squares * square_bytes, vector_bytes)


def _is_processor_limited(job: Job) -> bool:
    """Return whether the processor may have limited the measured rate, rather than the link."""
    processor_s = job.rates.transport_s_per_byte + job.rates.seal_s_per_byte
    return job.link_bytes_per_s * processor_s > PROCESSOR_SHARE_MAX


def number(name: str, text: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: the text is no finite number; the message names the option.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} {text}: not a number")
    return value


def whole(name: str, text: str, *, least: int) -> int:
    """Return a whole number.

    >>> whole("--params", "25e6", least=1), whole("--params", "1.3B", least=1), whole("--nodes", "8", least=2)
    (25000000, 1300000000, 8)

    Raises:
        ValueError: the text is no such number, or the number is too small; the message names the option.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} {text}: not a number such as 8, 25e6, 25M or 1.3B")
    digits, suffix = match.groups()
    value = number(name, digits) * _COUNTS[suffix.lower()]
    # 1.3 has no binary fraction, so 1.3B need not be whole to the last bit.
    if not math.isfinite(value) or abs(value - round(value)) > 1e-9 * abs(value):
        raise ValueError(f"{name} {text}: not a whole number")
    if value < least:
        raise ValueError(f"{name} is {round(value):,}, must be {least} or more")
    return round(value)


def rate(name: str, text: str) -> float:
    """Return bytes per second.

    >>> rate("--link", "1Gbit"), rate("--link", "10 mbps"), rate("--link", "1.5GB/s")
    (125000000.0, 1250000.0, 1500000000.0)
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} {text}: not a rate such as 10Mbit, 1Gbit/s or 125MB/s")
    digits, prefix, unit = match.groups()
    return number(name, digits) * _PREFIX[prefix.lower()] / (1.0 if unit == "B" else 8.0)


def seconds(name: str, text: str) -> float:
    """Return seconds.

    >>> seconds("--step", "200ms"), seconds("--step", "0.2")
    (0.2, 0.2)
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} {text}: not a time such as 0.2, 200ms or 50us")
    digits, unit = match.groups()
    return number(name, digits) * _SECONDS[unit]


# ---- the answer ------------------------------------------------------------------------------------------------------


def ways(job: Job, *, is_spark: bool = False, has_default_density: bool = False) -> list[Way]:
    """Return two rings, two exchanges in every step, and three of local steps, each with the code to write.

    Args:
        job: the question.
        is_spark: write the code for Spark.
        has_default_density: the density is what ``share`` chooses, which may be higher with local steps.
    """
    is_sharded = Options.of({}).is_sharded(job.nodes, job.elements)
    candidates = [
        Way("dense ring, float32", cost.dense_ring(job), "DistributedDataParallel(model)"),
        Way(
            "dense ring, float16",
            cost.dense_ring(job, 2),
            "model.register_comm_hook(None, fp16_compress_hook)",
        ),
    ]
    best = cost.topology_of(job)
    options: list[tuple[Topology, int]] = [("mesh", 1), ("sharded", 1)]
    options += [(best, every) for every in LOCAL_STEPS]
    for topology, every in options:
        name = f"{every} local steps, {topology}" if every > 1 else str(topology)
        # Only what is not the default anyway.
        chosen = [] if is_sharded == (topology == "sharded") else [f'topology="{topology}"']
        chosen += [f"every={every}"] if every > 1 else []
        if is_spark:
            code = f"TorchEstimator(..., training=SharedTraining({', '.join(chosen)}))"
        else:
            code = f"gradwire.torch.share({', '.join(['model', 'optimizer', *chosen])})"
        local = default_policy(job.elements, every=every).density if has_default_density else 0.0
        with_density = replace(job, density=max(job.density, local))
        candidates.append(Way(name, cost.exchange(with_density, topology, every=every), code))
    return candidates


def advice(candidates: Sequence[Way]) -> str:
    """Return what to use of the result of `ways`, why, and the code to write."""
    plain, half = candidates[:2]
    rival = half if half.cost.speedup_over(plain.cost) >= GAIN_MIN else plain
    best = min(candidates[2:4], key=lambda way: way.cost.step_s)
    for way in candidates[4:]:
        # More local steps than before have to pay again.
        gain = way.cost.speedup_over(rival.cost)
        best_gain = best.cost.speedup_over(rival.cost)
        if gain > LOCAL_GAIN_MIN * best_gain or gain >= GAIN_MIN > best_gain:
            best = way
    gain = best.cost.speedup_over(rival.cost)
    times = f"the {rival.name} takes {_time(rival.cost.step_s)}, and {best.name} "
    times += f"{_time(best.cost.step_s)}, limited by {best.cost.limit}"
    local = LOCAL_ADVICE if best in candidates[4:] else ""
    if gain < GAIN_MIN:
        return f"gradwire does not pay here: {times}; keep {rival.code}."
    return f"gradwire pays, {gain:,.3g} times as fast: {times}; write {best.code}.{local}"


def spark_advice(job: Job, candidates: Sequence[Way]) -> str:
    """Return the sentence about Spark's start: from which length of a training on Spark pays."""
    best = min(way.cost.step_s for way in candidates[2:])
    low_s, high_s = SPARK_START_S
    start = f"Spark's engine needs {low_s:.0f} to {high_s:.0f} s before the first step"
    # So many machines take a step of so many batches, which one machine would take one after the other.
    gain = job.nodes * job.step_s / best if best else math.inf
    if gain <= 1.0:
        return f"{start}, and {job.nodes} machines train no faster than one: train on one, without Spark."
    alone_s = high_s / (1.0 - 1.0 / gain)
    return (
        f"{start}: {job.nodes} machines train up to {gain:.3g} times as fast as one, so Spark is not worth it for "
        f"trainings that take one machine less than {alone_s:.0f} s."
    )


def plot(job: Job, path: Path, *, has_default_density: bool = False) -> None:
    """Draw the speed-up over a float32 ring at all link rates, and mark where there is none; see `ways`.

    Raises:
        ValueError: matplotlib is missing, or has no format of this name, or the path is a folder's.
    """
    if path.is_dir():  # matplotlib would write a file of another name beside it
        raise ValueError(f"--plot {path} is a folder: name a file, such as {path / 'speed.png'}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install "gradwire[demo]"') from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    low, high = PLOT_DECADES
    rates = [10.0 ** (low + index * (high - low) / 100) for index in range(101)]
    speedups: dict[str, list[float]] = {}
    for bits in rates:
        ring, _, *others = ways(
            replace(job, link_bytes_per_s=bits / 8.0), has_default_density=has_default_density
        )
        for way in others:
            speedups.setdefault(way.name.partition(",")[0], []).append(
                way.cost.speedup_over(ring.cost)
            )
    for name, values in speedups.items():
        axes.plot(rates, values, label=name)
    crossover = 8.0 * cost.crossover(job)
    if 0.0 < crossover < math.inf:
        axes.axvline(crossover, color="grey", linestyle=":")
        text = f"ring as fast from \n{si(crossover, 'bit/s')} on "
        axes.annotate(text, (crossover, 2.0), ha="right")
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
    return si(8.0 * bytes_per_s, "bit/s")
