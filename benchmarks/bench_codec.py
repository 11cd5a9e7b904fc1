"""The codec's table: what encode, apply and messages cost, as ratios against references in the same run.

    python benchmarks/bench_codec.py [--quick | --smoke] [--json FILE] [--only NAME ...]

See README.md for how it is measured and docs/performance.md for results.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import updates
from harness import (
    Clock,
    Effort,
    Operation,
    Reach,
    Report,
    Row,
    Timing,
    aligned,
    cost,
    figure,
    measure,
    speedup,
)
from numpy.typing import NDArray
from updates import THRESHOLD, SteadyState

import gradwire as gw

__all__ = ["main"]

ENCODE_REACH = {1e-3: 1.15, 1e-2: 1.4, 0.1: 2.2}
ANY_DENSITY_REACH = Reach("<=", 3.5)
OTHER_DENSITIES = (0.2, 0.3, 0.37, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
SIZE_DENSITIES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.37, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
CLUSTERED = ((1e-3, 1.5), (1e-2, 1.0), (1e-2, 1.5), (0.1, 1.0))
# Regions of a layer's size go below the floor; those smaller than a chunk are averaged by it.
CLUSTER_REGIONS = ((2**18, 1.0), (2**12, None))
PEER_REACH = {
    "NumPy, three lines": Reach(">=", 3.5),
    "torch, nonzero and index": Reach(">=", 10.0),
    "torch.topk": Reach(">=", 40.0),
    "pi-quant int4, no residual": Reach("<=", 1.3),
}
SMALL_NUMEL = 1024
SMALL_REACH = Reach("<=", 5.0)
MANY = 16
TRAINING_STEPS = 20

# Law 4 holds from this size on, and allows the header and 16 bytes beside its factor.
LAW_4_NUMEL = 2**22
HEADER_BYTES = 48
SLACK_BYTES = 16

_ADD = "np.add"
_ADD_BYTES = 12  # per element: read residual and update, write residual
_LINE = 16  # float32 elements of a cache line


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        numels: sizes of the timed arrays.
        adversarial_numel: size of the adversarial patterns.
        training_numel: a small size for the training steps, beside the others.
        effort: for a group of two operations; larger groups get as much for each of theirs.
        small_calls: calls per sample of the 1,024-element encode.
        repetitions: of the training steps.
        clock: nanoseconds of the wall clock, or of CPU time.
        evict: whether caches are emptied before each timed call.
        seed: of all random numbers.
    """

    numels: tuple[int, ...]
    adversarial_numel: int
    training_numel: int
    effort: Effort
    small_calls: int
    repetitions: int
    clock: Clock = time.perf_counter_ns
    evict: bool = True
    seed: int = 2026

    def measure(self, operations: Sequence[Operation]) -> dict[str, Timing]:
        """Time the operations in turn."""
        seconds = self.effort.seconds * len(operations) / 2
        return self.measure_with(replace(self.effort, seconds=seconds), operations)

    def measure_with(self, effort: Effort, operations: Sequence[Operation]) -> dict[str, Timing]:
        """Time the operations in turn with another effort."""
        return measure(operations, effort, evict=self.evict, clock=self.clock)


FULL = Settings((2**24, 2**26), 2**24, 2**20, Effort(2.5, 5, 60), small_calls=2_000, repetitions=4)
QUICK = Settings((2**24,), 2**22, 2**20, Effort(1.0, 4, 10), small_calls=1_000, repetitions=2)
SMOKE = Settings(
    (2**16,), 2**16, 2**12, Effort(0.0, 2, 2, warmup=1), small_calls=20, repetitions=1, evict=False
)

Group = Callable[[Settings, Report], Iterator[Row]]


def bench_encode(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield encode(update) against np.add at every density, and the worst of all."""
    for numel in settings.numels:
        rows = []
        for density in (*ENCODE_REACH, *OTHER_DENSITIES):
            state = SteadyState.make(numel, density, settings.seed)
            encode, message = _encode(state, "encode")
            timings = settings.measure([_np_add(state.update), encode])
            row = cost(
                "encode",
                f"encode at density {density:g}",
                numel,
                timings["encode"],
                timings[_ADD],
                reach=Reach("<=", ENCODE_REACH[density]) if density in ENCODE_REACH else None,
                floor=1.0 + message.nbytes / (_ADD_BYTES * numel),
            )
            rows.append(row)
            yield row
        worst = max(rows, key=lambda row: row.minimum)
        yield Row(
            "encode",
            "encode at the worst density",
            numel,
            "x",
            worst.minimum,
            max(row.median for row in rows),
            reference=_ADD,
            reach=ANY_DENSITY_REACH,
            floor=worst.floor,
            note=worst.what.removeprefix("encode at "),
            timings=worst.timings,
        )


def bench_accumulated(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield encode() of a residual that the caller has filled; it is refilled outside of the timed region."""
    density = 1e-3
    for numel in settings.numels:
        state = SteadyState.make(numel, density, settings.seed)
        encoder = _encoder(state)
        positions = np.flatnonzero(state.update)
        values = state.update[positions]

        def refill(
            residual: NDArray[Any] = encoder.residual,
            positions: NDArray[Any] = positions,
            values: NDArray[Any] = values,
        ) -> None:
            residual[positions] += values

        refill()
        _assert_sends(encoder, None, state)
        timings = settings.measure(
            [_np_add(state.update), Operation("encode()", encoder.encode, prepare=refill)]
        )
        yield cost(
            "accumulated",
            f"encode() of the residual at {density:g}",
            numel,
            timings["encode()"],
            timings[_ADD],
            reach=Reach("<=", 0.6),
            floor=(4 + 4 * _touched(density)) / _ADD_BYTES,
        )


def bench_threads(settings: Settings, report: Report) -> Iterator[Row]:
    """Yield what a second thread gains encode, beside what it gains np.add."""
    if (os.cpu_count() or 1) < 2:
        report.skip("threads", "this machine has one CPU")
        return
    if settings.clock is not time.perf_counter_ns:
        report.skip("threads", "CPU time does not tell what a second thread gains")
        return
    with ThreadPoolExecutor(1) as pool:
        for numel in settings.numels:
            state = SteadyState.make(numel, 1e-3, settings.seed)
            one, message = _encode(state, "encode, 1 thread")
            two, same = _encode(state, "encode, 2 threads", threads=2)
            if bytes(message) != bytes(same):
                raise AssertionError("two threads wrote other bytes than one")
            split = _np_add_split(state.update, pool)
            timings = settings.measure([_np_add(state.update), split, one, two])
            add = speedup(
                "threads", "np.add on 2 threads", numel, timings[split.name], timings[_ADD]
            )
            yield add
            yield speedup(
                "threads",
                "encode at 0.001 on 2 threads",
                numel,
                timings[two.name],
                timings[one.name],
                reach=Reach(">=", 1.6),
                void="" if add.minimum >= 1.6 else f"np.add gains {add.minimum:.2f}x",
            )


def bench_apply(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield apply of one message against np.add."""
    for numel in settings.numels:
        for density, reach in ((1e-3, 0.1), (0.1, 1.1), (0.5, None), (1.0, None)):
            state = SteadyState.make(numel, density, settings.seed)
            message = _encoder(state).encode(state.update)
            target = aligned(numel)
            gw.apply(message, target)
            _assert_equal(target, state.update, "apply")
            timings = settings.measure(
                [
                    _np_add(state.update),
                    Operation("apply", partial(gw.apply, message, target)),
                ]
            )
            yield cost(
                "apply",
                f"apply at density {density:g}",
                numel,
                timings["apply"],
                timings[_ADD],
                reach=Reach("<=", reach) if reach else None,
                floor=(8 * _touched(density) + message.nbytes / numel) / _ADD_BYTES,
            )


def bench_apply_many(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield apply_many of 16 peers' messages against one np.add and against 16 single applies."""
    cases = [(numel, 1e-3, Reach("<=", 0.4)) for numel in settings.numels]
    for numel, density, reach in (*cases, *((settings.numels[0], p, None) for p in (1e-2, 0.1))):
        messages, expected = [], aligned(numel)
        for peer in range(MANY):
            update = _random_update(numel, density, settings.seed + peer)
            messages.append(_send(update))
            expected += update
        target = aligned(numel)
        gw.apply_many(messages, target)
        _assert_equal(target, expected, "apply_many")
        timings = settings.measure(
            [
                _np_add(expected),
                Operation("apply_many", partial(gw.apply_many, messages, target)),
                Operation("apply, 16 times", partial(_apply_each, messages, target)),
            ]
        )
        message_bytes = sum(message.nbytes for message in messages)
        what = f"apply_many of {MANY} messages at {density:g}"
        many = timings["apply_many"]
        yield cost(
            "apply_many",
            what,
            numel,
            many,
            timings[_ADD],
            reach=reach,
            floor=(8 * _touched(density, MANY) + message_bytes / numel) / _ADD_BYTES,
        )
        yield cost("apply_many", what, numel, many, timings["apply, 16 times"])


def bench_size(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield message sizes against the entropy of random places (law 4) and the ceiling (law 3)."""
    for numel in settings.numels:
        for density in SIZE_DENSITIES:
            if density * numel < 1:
                continue
            message = _send(_random_update(numel, density, settings.seed))
            yield _size_row(message, f"random places, density {density:g}", _law_4(density))
    numel = settings.adversarial_numel
    rng = np.random.default_rng(settings.seed)
    for density, sigma in CLUSTERED:
        for region, factor in CLUSTER_REGIONS:
            mask = updates.clustered_mask(numel, density, sigma, region, rng)
            message = _send(updates.signed(mask, rng))
            what = f"lognormal regions of {region:,}, density {density:g}, sigma {sigma:g}"
            yield _size_row(message, what, factor)
    worst: tuple[float, str] = (0.0, "")
    for name, mask in updates.adversarial_masks(numel):
        message = _send(updates.signed(mask, rng))
        worst = max(worst, (_share_of_ceiling(message), name))
    yield _ceiling_row(numel, worst[0], worst[1])
    smallest = max((_worst_of_small(n), n) for n in (*range(1, 300), 500, 1_000, 2_000, 5_000))
    yield _ceiling_row(smallest[1], smallest[0], "worst of N = 1 ... 5,000")


def bench_small(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield the typical time of one encode of 1,024 elements, all in the cache."""
    for count in (1, 10, 100):
        state = SteadyState.make(SMALL_NUMEL, 0.0, settings.seed, count=count)
        encode, _ = _encode(state, "encode", calls=settings.small_calls)
        timing = replace(settings, evict=False).measure_with(
            Effort(settings.effort.seconds / 2, 5, 200), [encode]
        )["encode"]
        yield Row(
            "small",
            f"encode, one call, {count} changed",
            SMALL_NUMEL,
            "µs",
            timing.minimum_s * 1e6,
            timing.median_s * 1e6,
            reach=SMALL_REACH,
            timings=(timing,),
        )


def bench_peers(settings: Settings, report: Report) -> Iterator[Row]:
    """Yield encode with residual at 1e-3 against what others need for the same or less."""
    for numel in settings.numels:
        state = SteadyState.make(numel, 0.0, settings.seed, count=max(1, numel // 1000))
        encode, _ = _encode(state, "encode")
        operations = [encode]
        for name, make in peers.MAKERS:
            try:
                operations.append(make(state))
            except peers.Missing as reason:
                report.skip(name, str(reason))
        timings = settings.measure(operations)
        for operation in operations[1:]:
            reach = PEER_REACH[operation.name]
            row = cost if reach.relation == "<=" else speedup
            yield row(
                "peers",
                "encode with residual at 0.001",
                numel,
                timings["encode"],
                timings[operation.name],
                reach=reach,
            )


def bench_training(settings: Settings, report: Report) -> Iterator[Row]:  # noqa: ARG001
    """Yield 20 steps of Gaussian updates under TargetDensity(1e-3), whose first threshold is 300 times too low."""
    policy = gw.TargetDensity(1e-3)
    for numel in (settings.training_numel, *settings.numels):
        encoder = gw.Encoder(numel, threshold=policy)
        fresh = encoder.state_dict()
        # Every step's update is a window of the same noise: for each element another draw.
        stride = _LINE * 64
        noise = aligned(numel + TRAINING_STEPS * stride)
        rng = np.random.default_rng(settings.seed)
        rng.standard_normal(noise.size, np.float32, out=noise)
        noise *= np.float32(1e-2)
        steps = [noise[i * stride : i * stride + numel] for i in range(TRAINING_STEPS)]
        densities = _assert_conserved(encoder, steps)
        encoder.load_state_dict(fresh)

        def start_over(encoder: gw.Encoder = encoder, fresh: dict[str, Any] = fresh) -> None:
            if encoder.step == TRAINING_STEPS:
                encoder.load_state_dict(fresh)

        rounds = TRAINING_STEPS * settings.repetitions
        timings = settings.measure_with(
            Effort(0.0, rounds, rounds, warmup=0),
            [
                _np_add(noise[:numel]),
                Operation("encode", partial(_encode_next, encoder, steps), start_over),
            ],
        )
        samples = np.reshape(timings["encode"].samples_s, (-1, TRAINING_STEPS))
        settled = TRAINING_STEPS // 2
        for what, first, some in (
            (f"mean of {TRAINING_STEPS} steps", 0, samples),
            (f"mean of steps {settled + 1} to {TRAINING_STEPS}", settled, samples[:, settled:]),
        ):
            yield cost(
                "training",
                f"Gaussian updates, TargetDensity(1e-3), {what}",
                numel,
                Timing("encode", tuple(some.mean(axis=1))),
                timings[_ADD],
                note=f"density {np.mean(densities[first:]):.2g}",
            )


GROUPS: dict[str, Group] = {
    "encode": bench_encode,
    "accumulated": bench_accumulated,
    "threads": bench_threads,
    "apply": bench_apply,
    "apply_many": bench_apply_many,
    "size": bench_size,
    "small": bench_small,
    "peers": bench_peers,
    "training": bench_training,
}


def _np_add(update: NDArray[np.float32]) -> Operation:
    """Return the reference: the least that accumulating an update costs."""
    residual = aligned(update.size)
    np.add(residual, update, out=residual)
    _assert_equal(residual, update, _ADD)
    return Operation(_ADD, partial(np.add, residual, update, out=residual))


def _np_add_split(update: NDArray[np.float32], pool: ThreadPoolExecutor) -> Operation:
    """Return np.add with one half of the elements on another thread."""
    residual = aligned(update.size)
    half = update.size // 2 // _LINE * _LINE
    parts = [(residual[s], update[s]) for s in (slice(half), slice(half, None))]

    def add(residual: NDArray[Any], update: NDArray[Any]) -> None:
        np.add(residual, update, out=residual)

    def run() -> None:
        other = pool.submit(add, *parts[1])
        add(*parts[0])
        other.result()

    run()
    _assert_equal(residual, update, "np.add on 2 threads")
    return Operation("np.add, 2 threads", run)


def _encoder(state: SteadyState, threads: int = 1) -> gw.Encoder:
    encoder = gw.Encoder(state.numel, threshold=gw.FixedThreshold(THRESHOLD), threads=threads)
    encoder.residual[...] = state.residual
    return encoder


def _encode(
    state: SteadyState, name: str, *, threads: int = 1, calls: int = 1
) -> tuple[Operation, gw.Message]:
    encoder = _encoder(state, threads)
    message = _assert_sends(encoder, state.update, state)
    return Operation(name, partial(encoder.encode, state.update), calls=calls), message


def _assert_sends(
    encoder: gw.Encoder, update: NDArray[np.float32] | None, state: SteadyState
) -> gw.Message:
    """Assert that one encode sends the whole update and nothing else, and that the rest stays, to the bit."""
    message = encoder.encode(update)
    _assert_equal(gw.decode(message), state.update, "encode's message")
    _assert_equal(encoder.residual, state.residual, "encode's residual")
    return message


def _assert_conserved(encoder: gw.Encoder, steps: list[NDArray[np.float32]]) -> list[float]:
    """Assert that what goes in is sent or left, within rounding, and return the steps' densities."""
    put_in, sent = aligned(encoder.numel), aligned(encoder.numel)
    densities = []
    for update in steps:
        message = encoder.encode(update)
        gw.apply(message, sent)
        put_in += update
        densities.append(message.density)
    sent += encoder.residual
    if not np.allclose(sent, put_in, rtol=0.0, atol=1e-6):
        raise AssertionError("what was sent and what is left are not what was put in")
    return densities


def _assert_equal(got: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    if not np.array_equal(got, expected):
        wrong = np.flatnonzero(got != expected)
        raise AssertionError(f"{what}: {wrong.size} elements are wrong, the first at {wrong[0]}")


def _apply_each(messages: list[gw.Message], target: NDArray[np.float32]) -> None:
    for message in messages:
        gw.apply(message, target)


def _encode_next(encoder: gw.Encoder, steps: list[NDArray[np.float32]]) -> None:
    encoder.encode(steps[encoder.step])


def _random_update(numel: int, density: float, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return updates.signed(updates.random_mask(numel, density, rng), rng)


def _send(update: NDArray[np.float32]) -> gw.Message:
    """Return the message that sends the whole update, checked."""
    message = gw.Encoder(update.size, threshold=gw.FixedThreshold(THRESHOLD)).encode(update)
    _assert_equal(gw.decode(message), update, "message")
    return message


def _touched(density: float, messages: int = 1) -> float:
    """Return the share of cache lines in which at least one element changes."""
    return 1.0 - (1.0 - density) ** (_LINE * messages)


def _law_4(density: float) -> float:
    return 1.03 if 1e-4 <= density <= 0.1 else 1.05


def _size_row(message: gw.Message, what: str, factor: float | None) -> Row:
    """Return the payload over the entropy floor; the law allows ``factor`` times the floor and 16 bytes."""
    _assert_below_ceiling(message)
    floor_bits = updates.entropy_floor_bits(message.numel, message.count)
    return figure(
        "size",
        f"size, {what}",
        message.numel,
        8 * (message.nbytes - HEADER_BYTES) / floor_bits,
        "x",
        reference="log2 C(N, k) + k",
        reach=None
        if factor is None or message.numel < LAW_4_NUMEL
        else Reach("<=", factor + 8 * SLACK_BYTES / floor_bits),
        note=f"{8 * message.nbytes / max(message.count, 1):.2f} bits per change",
    )


def _share_of_ceiling(message: gw.Message) -> float:
    _assert_below_ceiling(message)
    return message.nbytes / gw.max_message_bytes(message.numel)


def _assert_below_ceiling(message: gw.Message) -> None:
    ceiling = gw.max_message_bytes(message.numel)
    if message.nbytes > ceiling:
        raise AssertionError(f"a message of {message.nbytes} bytes is above its ceiling, {ceiling}")


def _ceiling_row(numel: int, share: float, note: str) -> Row:
    return figure(
        "size",
        "size, worst adversarial pattern",
        numel,
        share,
        "x",
        reference="max_message_bytes",
        reach=Reach("<=", 1.0),
        note=note,
    )


def _worst_of_small(numel: int) -> float:
    worst = 0.0
    rng = np.random.default_rng(numel)
    for _, mask in updates.adversarial_masks(numel):
        positions = np.flatnonzero(mask).astype(np.int64)
        message = gw.Message.from_entries(
            positions, rng.random(positions.size) < 0.5, numel=numel, threshold=THRESHOLD
        )
        worst = max(worst, _share_of_ceiling(message))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Run the groups asked for, print the table and return 0; a wrong answer raises AssertionError."""
    parser = argparse.ArgumentParser(
        description="Time the codec against references in one process."
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument(
        "--quick", action="store_true", help="N = 2^24 only, fewer rounds, a minute"
    )
    effort.add_argument("--smoke", action="store_true", help="tiny N: the answers only, seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=GROUPS,
        default=list(GROUPS),
        metavar="NAME",
        help=", ".join(GROUPS),
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time of this process: for a busy machine"
    )
    arguments = parser.parse_args(argv)
    settings = SMOKE if arguments.smoke else QUICK if arguments.quick else FULL
    if arguments.cpu_time:
        settings = replace(settings, clock=time.process_time_ns)
    mode = "smoke" if arguments.smoke else "quick" if arguments.quick else "full"
    report = Report(
        {
            "mode": mode,
            "clock": "cpu" if arguments.cpu_time else "wall",
            "numels": settings.numels,
            "seed": settings.seed,
        },
        "smoke" if arguments.smoke else "",
    )
    for name in arguments.only:
        print(name, flush=True)
        report.add(GROUPS[name](settings, report))
    report.print()
    if arguments.json:
        report.write(arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
