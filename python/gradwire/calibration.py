"""The speed of this machine, for the cost model: measured in about two seconds, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from . import _core
from .codec import Encoder
from .cost import Rates
from .message import apply_many
from .transport import Node, generate_secret
from .transport.wire import RECORD_BYTES_MAX

__all__ = ["cache_path", "measure", "rates"]

_NUMEL = 1 << 22  # more than the caches hold: between two steps the model evicts everything
_DENSITIES = (0.01, 0.05)
_EACH_S = 0.12  # least time of one measurement
_ROUNDS_MIN = 3
_MESSAGE_BYTES = 1 << 24
_SMALL_BYTES = 1_000
_PATIENCE_S = 10.0


def rates() -> Rates:
    """Return the rates of this machine and this version of gradwire: from the file of an earlier call, or measured."""
    try:
        path = cache_path()
    except RuntimeError:  # a user without a home: measured each time
        return measure()
    with suppress(OSError, ValueError, TypeError):  # no file yet, or one of another version
        return Rates(**json.loads(path.read_text()))
    measured = measure()
    with suppress(OSError):  # a read-only home: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(measured), indent=1))
    return measured


def cache_path() -> Path:
    """Return the file for the rates of this machine and version.

    Raises:
        RuntimeError: this user has no home, as in a container with any number for a user, nor XDG_CACHE_HOME.
    """
    facts = (version("gradwire"), platform.node(), platform.machine(), os.cpu_count(), _core.isa())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "gradwire" / f"rates-{name}.json"


def measure() -> Rates:
    """Measure this machine; every rate is the best of several rounds, because other work only adds time."""
    rng = np.random.default_rng(0)
    target = np.zeros(_NUMEL, np.float32)
    encoder = Encoder(_NUMEL, threshold=1.0)
    encode_s = []
    apply_s = []
    for density in _DENSITIES:
        # The residual is zero before and after each encode, so that all do the same work.
        update = np.where(rng.random(_NUMEL, np.float32) < density, np.float32(1.0), 0.0)
        update = update.astype(np.float32)
        encode_s.append(_best_s(partial(encoder.encode, update)))
        apply_s.append(_best_s(partial(apply_many, [encoder.encode(update)], target)))
    changes = _NUMEL * (_DENSITIES[1] - _DENSITIES[0])
    per_change_s = max(0.0, encode_s[1] - encode_s[0]) / changes
    dense_encode_s = _best_s(lambda: encoder.encode(update, dense=True))
    dense = encoder.encode(update, dense=True)
    seal_s_per_byte = _seal_s_per_byte()
    transport_s_per_byte, message_s = _transport_rates(seal_s_per_byte)
    return Rates(
        encode_s_per_element=max(0.0, encode_s[0] / _NUMEL - _DENSITIES[0] * per_change_s),
        encode_s_per_change=per_change_s,
        apply_s_per_change=apply_s[0] / (_NUMEL * _DENSITIES[0]),
        dense_encode_s_per_element=dense_encode_s / _NUMEL,
        dense_apply_s_per_element=_best_s(lambda: apply_many([dense], target)) / _NUMEL,
        copy_s_per_element=_best_s(lambda: np.add(target, update, out=target)) / _NUMEL,
        seal_s_per_byte=seal_s_per_byte,
        transport_s_per_byte=transport_s_per_byte,
        message_s=message_s,
    )


def _best_s(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    samples: list[float] = []
    end_s = time.perf_counter() + _EACH_S
    while len(samples) < _ROUNDS_MIN or time.perf_counter() < end_s:
        begin_s = clock()
        call()
        samples.append(clock() - begin_s)
    return min(samples)


def _seal_s_per_byte() -> float:
    key = AESGCM(bytes(16))
    record = bytes(RECORD_BYTES_MAX)
    return _best_s(lambda: key.encrypt(bytes(12), record, None)) / RECORD_BYTES_MAX


def _transport_rates(seal_s_per_byte: float) -> tuple[float, float]:
    """Return the processor time per byte at each end, without sealing, and the time of a small message."""
    secret = generate_secret()
    with (
        Node("127.0.0.1:0", secret=secret) as sender,
        Node("127.0.0.1:0", [sender.address], secret=secret) as receiver,
    ):
        sender.wait_for_peers(1, _PATIENCE_S)

        def send(payload: bytes) -> None:
            sender.publish(payload)
            if not receiver.receive(_PATIENCE_S):
                raise TimeoutError(f"a message over loopback took more than {_PATIENCE_S:g} s")

        message_s = _best_s(partial(send, bytes(_SMALL_BYTES)))
        best_s = _best_s(partial(send, os.urandom(_MESSAGE_BYTES)), time.process_time)
    # Both nodes are in this process, so its processor time is that of both ends.
    both_ends_s_per_byte = max(0.0, best_s / _MESSAGE_BYTES - seal_s_per_byte)
    return both_ends_s_per_byte / 2.0, message_s
