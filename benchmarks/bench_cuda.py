"""The codec on a GPU: fractions of the device's own copy bandwidth, and other tools.

Every time is a median of device events over repeated calls after a warm-up. Nothing is timed before its result equals
the CPU's, to the bit.

    python benchmarks/bench_cuda.py --json report.json
    python benchmarks/bench_cuda.py --smoke         # smaller, in seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_peers import PEERS
from harness import Report, Row, Target

import gradwire as gw
from gradwire import _core

SECTOR_BYTES = 32
# Density, target and prediction of an encode, as shares of the copy bandwidth.
ENCODES = (
    (1e-3, 0.85, 0.91),
    (1e-2, 0.75, 0.86),
    (0.1, 0.55, 0.72),
    (0.2, 0.40, 0.62),
    (0.3, 0.40, 0.58),
    (0.5, 0.40, 0.68),
    (0.9, 0.40, 0.55),
)


def median_s(
    run: Callable[[], object], prepare: Callable[[], object] = lambda: None, least: int = 9
) -> float:
    """Return the median device time of single calls: warm, at least ``least`` of them, for about 0.3 s."""
    samples: list[float] = []
    until = time.perf_counter() + 0.3
    while len(samples) < least + 3 or (time.perf_counter() < until and len(samples) < 200):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(samples[3:])


class Case:
    """An encoder on the device and an update that repeat the same encode; as `updates.SteadyState`."""

    def __init__(
        self, numel: int, density: float, dtype: Any = torch.float32, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        levels = torch.randint(-511, 512, (numel,), device="cuda", dtype=torch.int16)
        self.residual = levels.float() / 1024
        changed = torch.rand(numel, device="cuda") < density
        sign = torch.where(self.residual < 0, -1.0, 1.0)
        self.update = torch.where(changed, sign, torch.zeros_like(sign)).to(dtype)
        self.encoder = gw.Encoder(numel, threshold=1.0, device="cuda")
        self.own = torch.as_tensor(self.encoder.residual, device="cuda")
        self.own.copy_(self.residual)
        self.out = torch.empty(self.encoder.message_bytes_max, dtype=torch.uint8, device="cuda")

    def encode(self) -> Any:
        """Encode; the message stays on the device."""
        return self.encoder.encode(self.update, out=self.out)

    def check(self) -> None:
        """Check that an encode has left the residual as it was."""
        assert torch.equal(self.own, self.residual)


class Bench:
    """Measures and reports."""

    def __init__(self, log2: int, report: Report) -> None:
        self.numel, self.report = 1 << log2, report
        source = torch.empty(max(self.numel, 1 << 28), dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        self.copy_bytes_per_s = 2 * source.nbytes / median_s(lambda: target.copy_(source))
        self.launch_s = self.graph_s(lambda: target[:32].add_(1.0))

    def add(self, what: str, figure: float, unit: str, target: Target, *notes: str) -> None:
        more = {"unit": unit, "target": target, "note": "; ".join(notes)}
        self.report.add([Row("gpu", what, "measured", figure, figure, **more)])

    def add_share(
        self, what: str, moved_bytes: float, seconds: float, goal: float, predicted: float
    ) -> None:
        """Report a share of the copy bandwidth."""
        share = moved_bytes / seconds / self.copy_bytes_per_s
        notes = f"{seconds * 1e6:.1f} µs", f"predicted {predicted:g}"
        self.add(what, share, "of copy", Target(">=", goal), *notes)

    def graph_s(self, run: Callable[[], object], calls: int = 20) -> float:
        """Return the time of one call inside a graph of many."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        return median_s(graph.replay) / calls

    def answers(self) -> None:
        """Check the bytes, the residual and what is applied against the CPU's."""
        numel = 1 << 21
        for density, _, _ in ENCODES:
            case, cpu = Case(numel, density), gw.Encoder(numel, threshold=1.0)
            cpu.residual[...] = case.residual.cpu().numpy()
            expected, message = cpu.encode(case.update.cpu()), case.encoder.encode(case.update)
            assert bytes(message) == bytes(expected), density
            case.check()
            target, on_cpu = torch.zeros(numel, device="cuda"), np.zeros(numel, np.float32)
            gw.apply(message, target)
            gw.apply(expected, on_cpu)
            assert np.array_equal(target.cpu().numpy(), on_cpu), density

    def encode(self) -> None:
        for density, goal, predicted in ENCODES:
            case = Case(self.numel, density)
            seconds = median_s(case.encode)
            case.check()
            what = f"encode float32, {density:g}"
            self.add_share(what, 12 * self.numel, seconds, goal, predicted)
        seconds = median_s(Case(self.numel, 1e-3, torch.bfloat16).encode)
        self.add_share("encode bfloat16 update, 0.001", 10 * self.numel, seconds, 0.80, 0.89)

    def encode_accumulated(self) -> None:
        case = Case(self.numel, 1e-3)
        index = case.update.nonzero().view(-1)
        sign = case.update[index]
        refill = lambda: case.own.index_add_(0, index, sign)  # noqa: E731
        seconds = median_s(lambda: case.encoder.encode(out=case.out), refill)
        case.check()
        sectors = torch.unique(index // (SECTOR_BYTES // 4)).numel()
        moved = 4 * self.numel + SECTOR_BYTES * sectors
        self.add_share("encode() accumulated, 0.001", moved, seconds, 0.75, 0.80)

    def apply(self) -> None:
        messages, touched = [], torch.zeros(self.numel // 8, dtype=torch.bool, device="cuda")
        sectors = []
        for seed in range(16):
            case = Case(self.numel, 1e-3, seed=seed)
            case.encode().check()
            messages.append(gw.cuda_message(case.out))
            touched[case.update.nonzero().view(-1) // 8] = True
            sectors.append(int(touched.sum()))
            del case
        target = torch.zeros(self.numel, device="cuda")
        for count, predicted in ((1, 0.15), (16, 0.45)):
            what = f"apply_many of {count}, 0.001"
            seconds = median_s(lambda count=count: gw.apply_many(messages[:count], target))
            self.add_share(what, 2 * SECTOR_BYTES * sectors[count - 1], seconds, 0.40, predicted)

    def pinned(self) -> None:
        case = Case(min(self.numel, 1 << 25), 1e-3)
        nbytes = case.encoder.encode(case.update).nbytes
        kept = median_s(case.encode)
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        transfer = median_s(lambda: host.copy_(case.out[:nbytes], non_blocking=True))
        ready = median_s(lambda: case.encoder.encode(case.update))
        notes = f"encode {kept * 1e6:.1f} µs", f"transfer of {nbytes} bytes {transfer * 1e6:.1f} µs"
        what, share = "message in pinned memory over encode and transfer", ready / (kept + transfer)
        self.add(what, share, "x", Target("<=", 1.3), "predicted 1", *notes)

    def small(self) -> None:
        seconds, launch = self.graph_s(Case(1 << 16, 1e-3).encode), f"{self.launch_s * 1e6:.2f} µs"
        launches, notes = seconds / self.launch_s, ("predicted 8", f"one launch {launch}")
        self.add("encode of 2^16 in a graph", launches, "launches", Target("<=", 4.0), *notes)

    def synchronisations(self) -> None:
        """Enqueue behind a long kernel: a call that waited for the device would be seen."""
        case = Case(1 << 20, 1e-3)
        case.encode().check()
        torch.cuda._sleep(1_000_000_000)
        case.encode()
        waited = torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        self.add("host waits per encode", float(waited), "waits", Target("<=", 0.0))

    def peers(self) -> None:
        case = Case(min(self.numel, 1 << 26), 1e-3)
        ours = median_s(case.encode)
        for name, (make, goal, predicted) in PEERS.items():
            try:
                theirs = median_s(make(case.residual.clone(), case.update), least=3)
            except Exception as reason:  # the next reference is measured all the same
                self.report.skip(name, repr(reason))
                continue
            notes = f"predicted {predicted:g}", f"theirs {theirs * 1e6:.0f} µs"
            what = f"times as fast as {name}"
            self.add(what, theirs / ours, "x", Target(">=", goal), *notes)


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--smoke", action="store_true", help="2^22 elements; no figure counts")
    parser.add_argument("--log2", type=int, default=28, help="elements, as a power of two")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()
    if "cuda" not in gw.backends():
        print("skipped: no usable CUDA backend")
        return 0
    report = Report("gpu", {"cuda": _core.cuda_status()}, "smoke test" if options.smoke else "")
    bench = Bench(22 if options.smoke else options.log2, report)
    report.parameters |= {
        "gpu": torch.cuda.get_device_name(),
        "elements": bench.numel,
        "copy": f"{bench.copy_bytes_per_s / 1e12:.3f} TB/s, read and written",
    }
    failures = 0
    parts = (
        "encode",
        "encode_accumulated",
        "apply",
        "pinned",
        "small",
        "synchronisations",
        "peers",
    )
    bench.answers()
    for name in parts:
        try:
            getattr(bench, name)()
        except Exception as error:  # one broken part must not cost the others their figures
            failures += 1
            print(f"FAILED: {name}: {type(error).__name__}: {error}", flush=True)
    report.finish(options.json)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
