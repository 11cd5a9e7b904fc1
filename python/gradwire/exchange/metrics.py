"""Metrics of an exchange: the times of whole steps, Prometheus' text, and the figures for ``gradwire top``."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..transport import Peer
from . import clock
from .options import Options
from .results import ExchangeStats, StepResult

__all__ = [
    "Listener",
    "Meter",
    "MetricsServer",
    "describe",
    "log_every",
    "offer_page",
    "page_folder",
    "prometheus_text",
]

_LOG = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[StepResult, ExchangeStats], None]

# The first steps wait for peers that still load; the share of gradwire is that of the steps that follow.
_WARMUP_STEPS, _JUDGED_STEPS = 10, 20
_SHARE_MAX = 1.0 / 3.0

_GAUGES = {
    "density",
    "residual_norm",
    "threshold",
    "staleness",
    "members",
    "send_log_bytes",
    "receive_queue_bytes",
}
_PER_PEER = ("srtt_s", "rate_bytes_per_s", "loss_rate", "backlog_records")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Meter:
    """Measures whole steps, the caller's time between them included, and calls the listeners.

    Args:
        options: of the exchange; a warning proposes those that it does not have.

    Attributes:
        listeners: called after every step with its result and the totals.
        step_s: total time of all steps, the caller's computation included.
        compute_s: total time of the caller between steps.
        slowest: the peer whose message came last in the last step.
    """

    def __init__(self, options: Options) -> None:
        self.listeners: list[Listener] = []
        self.step_s = self.compute_s = 0.0
        self.slowest: Peer | None = None
        self._options = options
        self._returned_s: float | None = None
        self._results = 0
        self._warm: ExchangeStats  # after the first steps

    def time(self, take: Callable[..., StepResult], *arguments: Any) -> StepResult:
        """Take a step and return its result with the times filled in."""
        begin_s = clock.now_s()
        compute_s = 0.0 if self._returned_s is None else begin_s - self._returned_s
        try:
            result = take(*arguments)
        finally:
            self._returned_s = clock.now_s()
        step_s = compute_s + self._returned_s - begin_s
        self.step_s += step_s
        self.compute_s += compute_s
        return replace(result, step_s=step_s, compute_s=compute_s)

    def show(self, result: StepResult, stats: ExchangeStats) -> None:
        """Call the listeners, and warn once if the exchange takes a large share of the time."""
        self.slowest = result.slowest
        self._results += 1
        if self._results == _WARMUP_STEPS:
            self._warm = stats
        elif self._results == _WARMUP_STEPS + _JUDGED_STEPS:
            self._judge(stats)
        for listener in self.listeners:
            listener(result, stats)

    def _judge(self, stats: ExchangeStats) -> None:
        whole_s, compute_s, encode_s, apply_s = (
            getattr(stats, name) - getattr(self._warm, name)
            for name in ("step_s", "compute_s", "encode_s", "apply_s")
        )
        ours_s = whole_s - compute_s
        if ours_s <= _SHARE_MAX * whole_s:
            return
        wait_s = ours_s - encode_s - apply_s
        options, remedies = self._options, []
        if options.optimizer is None:
            remedies.append(f"every={4 * options.every} exchanges a quarter as often")
        if wait_s < ours_s / 2.0:
            remedies.append("Encoder(threads=) shares the passes over the data")
        else:
            remedies.append("`gradwire top` shows whether one node holds up the others")
            if options.is_sync and not options.overlap:
                remedies.insert(0, "overlap=1 hides the network behind the computation")
        _LOG.warning(
            "gradwire takes %.0f %% of a step (encode %.0f %%, wait %.0f %%, apply %.0f %%): %s",
            *(100.0 * part_s / whole_s for part_s in (ours_s, encode_s, wait_s, apply_s)),
            "; ".join(remedies),
        )


def log_every(steps: int) -> Listener:
    """Return a listener for ``Exchange.listeners`` that logs a line at level INFO every so many steps.

    Raises:
        ValueError: ``steps`` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, must be 1 or more")
    seen: list[StepResult] = []

    def listen(result: StepResult, stats: ExchangeStats) -> None:
        seen.append(result)
        if len(seen) < steps:
            return
        mean_s, compute_s, sent, received = (
            sum(getattr(one, name) for one in seen) / steps
            for name in ("step_s", "compute_s", "sent_bytes", "received_bytes")
        )
        share = 1.0 - compute_s / mean_s if mean_s else 0.0
        _LOG.info(
            "step %d: %.4g ms a step, %.0f %% of it gradwire's; sent %.0f B, received %.0f B a step; density %.3g; "
            "%d other members",
            *(result.step, 1e3 * mean_s, 100.0 * share, sent, received),
            *(stats.density, stats.members),
        )
        seen.clear()

    return listen


def prometheus_text(figures: Mapping[str, Any]) -> str:
    """Return the figures of an exchange, from `describe`, in Prometheus' text format."""
    lines: list[str] = []

    def add(name: str, kind: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{labels} {value:.12g}" for labels, value in values)

    own = {**figures["stats"], "residual_norm": figures["residual_norm"]}
    del own["codec"]  # not a number
    for prefix, found in (("gradwire_", own), ("gradwire_transport_", figures["transport"])):
        for name, value in found.items():
            full = prefix + _spelled(name)
            if name in _GAUGES:
                add(full, "gauge", [("", value)])
            else:
                add(f"{full}_total", "counter", [("", value)])
    for name in _PER_PEER:
        peers = figures["peers"]
        full = f"gradwire_peer_{_spelled(name)}"
        add(full, "gauge", [(f'{{peer="{peer["address"]}"}}', peer[name]) for peer in peers])
    return "\n".join(lines) + "\n"


def _spelled(name: str) -> str:
    return re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", name))


def describe(
    node: Any, encoders: Iterable[Any], stats: ExchangeStats, slowest: Peer | None
) -> dict[str, Any]:
    """Return the figures of an exchange, as JSON values; may be called from any thread.

    Args:
        node: node of the exchange.
        encoders: encoders whose residuals are measured, in one pass over their memory on the calling thread.
        stats: totals of the exchange.
        slowest: the peer whose message came last in the last step, or None.
    """
    counters = node.stats()
    # A residual on a device is left out: reading it would make the training wait.
    residuals = [one.residual for one in encoders if one.device == "cpu"]
    norm = float(np.sqrt(sum(float(np.dot(one, one)) for one in residuals)))
    return {
        "address": node.address,
        "process": os.getpid(),
        "time_s": clock.now_s(),
        "stats": asdict(stats),
        "residual_norm": norm,
        "slowest": slowest and slowest.address,
        "transport": {
            one.name: getattr(counters, one.name)
            for one in fields(counters)
            if one.name not in ("socket", "peers")
        },
        "peers": [
            {"address": one.peer.address, **{name: getattr(one, name) for name in _PER_PEER}}
            for one in counters.peers
        ],
    }


class MetricsServer:
    """Serves Prometheus' text at ``http://host:port/metrics`` until it is closed."""

    def __init__(self, text: Callable[[], str], port: int, host: str) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] in ("/", "/metrics")
                body = text().encode() if is_known else b"there is only /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Log nothing: scrapes come every few seconds."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="gradwire-metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


# ---- gradwire top ----------------------------------------------------------------------------------------------------


def page_folder() -> Path:
    """Return the folder of the sockets, one for every exchange of this user that ``gradwire top`` can show.

    Raises:
        PermissionError: the folder belongs to another user.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) / "gradwire" if given else Path(f"/tmp/gradwire-{os.getuid()}")  # noqa: S108
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def offer_page(owner: object, page: Callable[[], dict[str, Any]]) -> None:
    """Offer an exchange's figures to ``gradwire top``, from a thread, as long as ``owner`` lives."""
    from socketserver import StreamRequestHandler, UnixStreamServer

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the reader is gone
                self.wfile.write(json.dumps(page()).encode())

    path = page_folder() / f"{os.getpid()}-{id(owner):x}.sock"
    path.unlink(missing_ok=True)  # of a dead process with the same number
    server = UnixStreamServer(str(path), Handler)

    def serve() -> None:
        while True:
            server.handle_request()  # sleeps until a reader connects

    threading.Thread(target=serve, name="gradwire-top", daemon=True).start()
    weakref.finalize(owner, _withdraw, path, os.getpid())


def _withdraw(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
