"""Figures and warnings of an exchange: times of whole steps, the residual, Prometheus, and ``gradwire top``."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import clock
from ..state import check_range
from ..transport import Peer
from .groups import Groups
from .options import Options
from .results import ExchangeStats, StepResult

if TYPE_CHECKING:
    from ..codec import Encoder
    from .replica import Replica

__all__ = [
    "Listener",
    "Meter",
    "MetricsCollector",
    "ResidualMonitor",
    "log_every",
    "metrics_snapshot",
    "serve_snapshot",
    "socket_folder",
]

_LOG = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[StepResult, ExchangeStats], None]
Residuals: TypeAlias = Callable[[int], Iterable[NDArray[Any]]]

# The first steps wait for peers that still load; the share of gradwire is that of the steps that follow. They are taken
# in rounds, each an exchange with the local steps before it. The longest quarter of the rounds does not count: a member
# that is lost, stops for a while or evaluates makes all others wait once, which says nothing about the network.
_WARMUP_STEPS = 10
_JUDGED_STEPS = 20
_JUDGED_ROUNDS = 3
_SHARE_MAX = 1.0 / 3.0
# Of the local steps: with more the loss rises by more than 1 % (docs/algorithm.md).
_OVERLAP_SHARE = 0.25

# Steps between two checks of the residual, checks in a row that lead to a warning, sampled elements of each residual,
# and the most steps for which a residual grows at the start of any training: elements wait for about 1 / density steps.
_CHECK_STEPS = 10
_CHECKS = 5
_CHECK_NUMEL = 1 << 14
_FILL_STEPS_MAX = 200

_GAUGES = {
    "density",
    "residual_norm",
    "threshold",
    "staleness",
    "step_number",
    "members",
    "is_sharded",
    "send_log_bytes",
    "receive_queue_bytes",
}
_ANSWER_S = 1.0  # longest wait for an answer under way
_SOCKETS = Path("/tmp")  # noqa: S108
_SHUT_RDWR = 2  # of the module ``socket``, which only the transport imports
_PER_PEER = ("srtt_s", "rate_bytes_per_s", "loss_rate", "backlog_records")


# ---- warnings --------------------------------------------------------------------------------------------------------


class _Times(NamedTuple):
    """Times of a few steps: of all of it, which comes first for sorting, of gradwire, and of two parts of that."""

    whole_s: float
    ours_s: float
    encode_s: float
    apply_s: float

    @classmethod
    def of(cls, results: list[StepResult]) -> _Times:
        """Return the sums of the times of some results."""
        return cls(
            sum([result.step_s for result in results]),
            sum([result.step_s - result.compute_s for result in results]),
            sum([result.encode_s for result in results]),
            sum([result.apply_s for result in results]),
        )


class Meter:
    """Measures whole steps, the caller's time between them included, watches the residual, and calls the listeners.

    Args:
        options: of the exchange; a warning proposes those that it does not have.
        groups: of the exchange.
        residuals: ``SharedCopy.residuals_on_host``.

    Attributes:
        listeners: called after every step with its result and the totals.
        step_s: total time of all steps, the caller's computation included.
        compute_s: total time of the caller between steps.
        slowest: `StepResult.slowest` of the last exchange.
    """

    def __init__(self, options: Options, groups: Groups, residuals: Residuals) -> None:
        self.listeners: list[Listener] = []
        self.step_s = 0.0
        self.compute_s = 0.0
        self.slowest: Peer | None = None
        self._options = options
        self._groups = groups
        self._residual_monitor = ResidualMonitor(residuals)
        self._returned_s: float | None = None
        self._results = 0
        self._round: list[StepResult] = []
        self._rounds: list[_Times] = []
        self._has_judged = False

    def time(self, take: Callable[[], StepResult]) -> StepResult:
        """Take a step and return its result with the times filled in."""
        begin_s = clock.now_s()
        compute_s = 0.0 if self._returned_s is None else begin_s - self._returned_s
        try:
            result = take()
        finally:
            self._returned_s = clock.now_s()
        step_s = compute_s + self._returned_s - begin_s
        self.step_s += step_s
        self.compute_s += compute_s
        return replace(result, step_s=step_s, compute_s=compute_s)

    def notify_listeners(self, result: StepResult, stats: ExchangeStats) -> None:
        """Call the listeners, and warn once if the exchange takes a large share of the time."""
        if result.applied:  # with ``overlap`` the call that sends may finish no step
            self.slowest = result.slowest
            if self._options.codec == "threshold":
                self._residual_monitor.add(result, self._groups)
        if not self._has_judged:
            self._note_times(result, is_alone=not stats.members)
        for listener in self.listeners:
            listener(result, stats)

    def _note_times(self, result: StepResult, *, is_alone: bool) -> None:
        self._results += 1
        if self._results <= _WARMUP_STEPS:
            return
        self._round.append(result)
        if result.applied:
            self._rounds.append(_Times.of(self._round))
            self._round = []
        steps = self._results - _WARMUP_STEPS
        if steps >= _JUDGED_STEPS and len(self._rounds) >= _JUDGED_ROUNDS:
            self._has_judged = True
            self._judge(sorted(self._rounds), is_alone=is_alone)
            self._rounds.clear()

    def _judge(self, rounds: list[_Times], *, is_alone: bool) -> None:
        usual = rounds[: len(rounds) * 3 // 4]
        whole_s, ours_s, encode_s, apply_s = map(sum, zip(*usual, strict=True))
        if ours_s <= _SHARE_MAX * whole_s:
            return
        wait_s = ours_s - encode_s - apply_s
        options = self._options
        remedies = [f"every={4 * options.every} exchanges a quarter as often"]
        # Local steps always help. What else helps depends on whether the time goes into passes over memory or into
        # waiting.
        if is_alone:
            remedies = ["this node trains alone, and gradwire gains nothing without others"]
        elif wait_s < ours_s / 2.0:
            remedies.append("threads= of an Encoder of your own shares the passes over the data")
        elif self.slowest is not None and not options.is_sync:
            # Messages over a slow link come as late as those of a node that computes for longer.
            remedies = [
                f"{self.slowest.address} is behind, and this node may be {options.max_staleness} steps ahead "
                "(max_staleness): if it computes for longer, smaller batches there make its steps as long as those "
                f"here; if a link is slow, {remedies[0]}"
            ]
        else:
            remedies.append("`gradwire top` shows whether one node holds up the others")
            overlap = max(1, round(options.every * _OVERLAP_SHARE))
            if options.is_sync and options.overlap < overlap:
                remedies.insert(0, f"overlap={overlap} hides the network behind the computation")
        _LOG.warning(
            "gradwire takes %.0f %% of a step (encode %.0f %%, wait %.0f %%, apply %.0f %%): %s",
            *(100.0 * part_s / whole_s for part_s in (ours_s, encode_s, wait_s, apply_s)),
            "; ".join(remedies),
        )


class ResidualMonitor:
    """Logs warnings, with the remedy: of messages that are not sparse, of a residual that outgrows its threshold."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._full_steps = 0
        self._grown_checks = 0
        self._steps = 0
        self._norm = self._thresholds = math.inf

    def add(self, result: StepResult, groups: Groups) -> None:
        """Check a finished step."""
        self._full_steps = self._full_steps + 1 if result.density >= 1.0 else 0
        # Groups of small tensors are always sent whole.
        coded = [group.encoder for group in groups.groups if not group.is_dense]
        if coded and self._full_steps == _CHECK_STEPS * _CHECKS:
            policies = {type(encoder.policy).__name__ for encoder in coded}
            # A policy that aims at a density sends every element only where all are of about the same size.
            aims = policies & {"TargetDensity", "TargetBytes"}
            _LOG.warning(
                "every element has been sent for %d steps, at the threshold %g: %s",
                self._full_steps,
                result.threshold,
                'all updates are about equally large, so choosing among them saves nothing: codec="bfloat16" sends '
                "them whole"
                if aims
                else "it is too small for these updates: give TargetDensity(0.01)",
            )
        self._steps += 1
        if self._steps % _CHECK_STEPS == 0:
            self._check_norm(result, coded)

    def _check_norm(self, result: StepResult, coded: Sequence[Encoder]) -> None:
        square = 0.0
        for residual in self._residuals(_CHECK_NUMEL):
            square += float(np.square(residual.astype(np.float64)).sum())
        norm = math.sqrt(square)
        # On a device, where nothing is sampled, reading thresholds would make the training wait, too.
        threshold = max([encoder.threshold for encoder in coded], default=0.0) if norm else 0.0
        thresholds = norm / threshold if threshold else norm
        # At first every residual grows, until elements are sent as often as they fill up. Only growth after that is a
        # sign, and only if the threshold does not grow alike: while a learning rate is warmed up, all do.
        is_filled = self._steps * max(result.density, 1 / _FILL_STEPS_MAX) >= 1.0
        has_grown = norm > 1.1 * self._norm and thresholds > 1.1 * self._thresholds
        self._grown_checks = self._grown_checks + 1 if is_filled and has_grown else 0
        self._norm, self._thresholds = norm, thresholds
        if self._grown_checks == _CHECKS:
            self._warn_of_growth(result)

    def _warn_of_growth(self, result: StepResult) -> None:
        if self._full_steps >= _CHECK_STEPS * _CHECKS:
            return  # every element is sent, of which there is a warning with a remedy already
        higher = 2.0 * result.density
        # A sent element carries the threshold: where most are sent, a larger threshold sends more, not a smaller one.
        _LOG.warning(
            "the residual has grown for %d steps, at a density of %.2g and a threshold of %g: too little is sent; %s",
            _CHECK_STEPS * _CHECKS,
            result.density,
            result.threshold,
            f"give a higher density (twice as high: {higher:.2g}), or a smaller threshold"
            if higher < 1.0
            else 'the threshold is too small for these updates: give a larger one, or codec="bfloat16", which sends '
            "them whole",
        )


# ---- figures ---------------------------------------------------------------------------------------------------------


def log_every(steps: int) -> Listener:
    """Return a listener for ``Exchange.listeners`` that logs a line at level INFO every so many steps.

    Raises:
        TypeError, ValueError: ``steps`` is not an int of 1 or more.
    """
    check_range("steps", steps, 1, 2**53)
    seen: list[StepResult] = []

    def listen(result: StepResult, stats: ExchangeStats) -> None:
        seen.append(result)
        if len(seen) < steps:
            return
        step_s = sum(past.step_s for past in seen) / steps
        compute_s = sum(past.compute_s for past in seen) / steps
        sent_bytes = sum(past.sent_bytes for past in seen) / steps
        received_bytes = sum(past.received_bytes for past in seen) / steps
        share = 1.0 - compute_s / step_s if step_s else 0.0
        _LOG.info(
            "step %d: %.4g ms a step, %.0f %% of it gradwire's; sent %.0f B (in the mesh to each peer) and received "
            "%.0f B a step; density %.3g; other members: %d",
            stats.step_number - 1,
            1e3 * step_s,
            100.0 * share,
            sent_bytes,
            received_bytes,
            stats.density,
            stats.members,
        )
        seen.clear()

    return listen


def metrics_snapshot(
    node: Any, replica: Replica, stats: ExchangeStats, slowest: Peer | None
) -> dict[str, Any]:
    """Return the figures of an exchange, as JSON values; may be called from any thread.

    Args:
        node: node of the exchange.
        replica: of the exchange; residuals in host memory are measured in one pass on the calling thread.
        stats: totals of the exchange.
        slowest: `StepResult.slowest` of the last exchange.
    """
    counters = node.stats()
    groups = replica.groups
    residuals = replica.residuals_on_host(groups.numel)
    norm = float(np.sqrt(sum(float(np.dot(residual, residual)) for residual in residuals)))
    names: dict[int, str] = node.names
    return {
        "address": node.address,
        "rank": names.get(node.id, ""),
        "step": stats.step_number,
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "process": os.getpid(),
        "time_s": clock.now_s(),
        "stats": asdict(stats),
        "residual_norm": norm,
        "slowest": slowest and slowest.address,
        "transport": {
            field.name: getattr(counters, field.name)
            for field in fields(counters)
            if field.name not in ("socket", "peers")
        },
        "peers": [
            {"address": path.peer.address, **{name: getattr(path, name) for name in _PER_PEER}}
            for path in counters.peers
        ],
    }


class _HasMetrics(Protocol):
    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the figures of an exchange."""


class MetricsCollector:
    """Gives an exchange's figures to ``prometheus_client`` whenever an endpoint of the user's is read.

    >>> import gradwire as gw, prometheus_client
    >>> registry = prometheus_client.CollectorRegistry()
    >>> with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
    ...     exchange = gw.Exchange(gw.Encoder(4, threshold=1.0), node, min_peers=0)
    ...     registry.register(gw.exchange.MetricsCollector(exchange))
    ...     registry.get_sample_value("gradwire_steps_total")
    0.0

    Args:
        exchange: of this process; the collector does not keep it alive.

    Raises:
        ModuleNotFoundError: ``prometheus_client`` is not installed; the message says how to install it.
    """

    def __init__(self, exchange: _HasMetrics) -> None:
        try:
            from prometheus_client import core
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'MetricsCollector needs prometheus_client: pip install "gradwire[metrics]"'
            ) from error
        self._core = core
        self._exchange = weakref.ref(exchange)

    def describe(self) -> Iterable[Any]:
        """Name no figures in advance: a registry would refuse the process's next exchange, which has the same ones."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the totals, the transport's counters and every peer's path; nothing after the exchange is gone."""
        # The registry of ``prometheus_client`` lives as long as the process, and must not keep an exchange alive.
        exchange = self._exchange()
        if exchange is None:
            return
        snapshot = exchange.metrics_snapshot()
        figures = {**snapshot["stats"], "residual_norm": snapshot["residual_norm"]}
        del figures["codec"]  # not a number
        for prefix, values in (
            ("gradwire_", figures),
            ("gradwire_transport_", snapshot["transport"]),
        ):
            for name, value in values.items():
                kind = "Gauge" if name in _GAUGES else "Counter"
                family = getattr(self._core, f"{kind}MetricFamily")
                yield family(prefix + _metric_name(name), name, value=float(value))
        for name in _PER_PEER:
            path = self._core.GaugeMetricFamily(
                f"gradwire_peer_{_metric_name(name)}", name, labels=["peer"]
            )
            for peer in snapshot["peers"]:
                path.add_metric([peer["address"]], peer[name])
            yield path


def _metric_name(name: str) -> str:
    return re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", name))


# ---- gradwire top ----------------------------------------------------------------------------------------------------


def socket_folder() -> Path:
    """Return the folder of the sockets, one for every exchange of this user that ``gradwire top`` can show.

    Raises:
        PermissionError: the folder belongs to another user.
        OSError: the folder cannot be created.
    """
    # Not in XDG_RUNTIME_DIR: a batch job, a container or ``sudo`` may have another session's value, which names a
    # folder that does not exist there or is another user's, and ``gradwire top`` is called in a session of its own.
    folder = _SOCKETS / f"gradwire-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def serve_snapshot(exchange: _HasMetrics) -> None:
    """Serve an exchange's figures to ``gradwire top`` as long as it lives, from a thread, where the user wants it.

    Without a place for the socket the exchange goes on unseen.
    """
    if os.environ.get("GRADWIRE_TOP", "") in ("", "0"):
        return
    from socketserver import StreamRequestHandler, UnixStreamServer

    snapshot = weakref.WeakMethod(exchange.metrics_snapshot)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the reader is gone
                self.wfile.write(json.dumps((snapshot() or dict)()).encode())

    try:
        path = socket_folder() / f"{os.getpid()}-{id(exchange):x}.sock"
        path.unlink(missing_ok=True)  # of a dead process with the same number
        server = UnixStreamServer(str(path), Handler)
    except OSError as error:
        _LOG.warning("`gradwire top` cannot show this process, which goes on: %s", error)
        return

    # A forked child would keep the socket, which after the death of this process seemed to be that of a busy one.
    os.register_at_fork(after_in_child=weakref.finalize(exchange, server.socket.close))
    is_over = threading.Event()

    def serve() -> None:
        with server:
            while not is_over.is_set():
                server.handle_request()  # sleeps until a reader connects, or the socket is shut down

    # A thread of its own: ``gradwire top`` has to answer while the training waits for a peer. It holds the exchange
    # weakly, and so does not keep it alive.
    thread = threading.Thread(target=serve, name="gradwire-top", daemon=True)
    thread.start()

    def withdraw(process: int) -> None:
        if os.getpid() == process:
            path.unlink(missing_ok=True)
            is_over.set()
            with suppress(OSError):
                server.socket.shutdown(_SHUT_RDWR)
            if thread is not threading.current_thread():  # the collector runs in any
                thread.join(_ANSWER_S)

    weakref.finalize(exchange, withdraw, os.getpid())
