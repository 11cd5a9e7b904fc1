"""The codec on a GPU against the bytes that must move, and against other tools.

Every time is a median of device events over repeated calls after a warm-up, and is shown as a fraction of the device's
own copy bandwidth, measured in the same run. Answers come first: nothing is timed whose result is not the CPU's, to the
bit.

    python benchmarks/bench_cuda.py --json result.json
    python benchmarks/bench_cuda.py --log2 24       # smaller, in seconds
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from cuda_peers import PEERS, Missing

import gradwire as gw
from gradwire import _core

SECTOR_BYTES = 32
LAUNCHES_MAX = 4.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: the operation.
        figure: what was reached, in the row's unit.
        reach: what is wanted; None: only told.
        unit: "of copy" (a fraction of the copy bandwidth, more is better), "x faster", "x" (of a reference, less is
            better) or "launches" (less is better).
        predicted: what the bytes to move say it should be; None where nothing was predicted.
        median_us: the operation's time.
        note: what the figure is made of.
    """

    what: str
    figure: float
    reach: float | None
    unit: str
    predicted: float | None
    median_us: float
    note: str = ""

    @property
    def met(self) -> str:
        if self.reach is None:
            return ""
        less_is_better = self.unit in ("x", "launches", "syncs")
        reached = self.figure <= self.reach if less_is_better else self.figure >= self.reach
        return "met" if reached else "not met"


def median_s(
    run: Callable[[], object], prepare: Callable[[], object] | None = None, least: int = 9
) -> float:
    """Return the median time on the device of calls one by one: warm, at least ``least`` of them, for 0.3 s or so."""
    for _ in range(3):
        if prepare:
            prepare()
        run()
    torch.cuda.synchronize()
    samples: list[float] = []
    until = time.perf_counter() + 0.3
    while len(samples) < least or (time.perf_counter() < until and len(samples) < 200):
        if prepare:
            prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(samples)


def steady(
    numel: int, density: float, dtype: Any = torch.float32, seed: int = 1
) -> tuple[Any, Any]:
    """Return a residual and an update that give the same message and leave the same residual in every call.

    The residual holds multiples of 2^-10 below half the threshold, 1; the update is 0, or 1 with the residual's sign at
    a random share of the elements.
    """
    torch.manual_seed(seed)
    residual = torch.randint(-511, 512, (numel,), device="cuda", dtype=torch.int16).float() / 1024
    changed = torch.rand(numel, device="cuda") < density
    sign = torch.where(residual < 0, -1.0, 1.0)
    return residual, torch.where(changed, sign, torch.zeros_like(sign)).to(dtype)


def encoder_with(residual: Any) -> Any:
    """Return an encoder on the device with this residual, and threshold 1."""
    encoder = gw.Encoder(residual.numel(), threshold=1.0, device="cuda")
    torch.as_tensor(encoder.residual, device="cuda").copy_(residual)
    return encoder


def buffer_for(encoder: Any) -> Any:
    return torch.empty(encoder.message_bytes_max, dtype=torch.uint8, device="cuda")


def time_encode(encoder: Any, update: Any) -> float:
    """Return the seconds of an encode whose message stays on the device."""
    out = buffer_for(encoder)
    return median_s(lambda: encoder.encode(update, out=out))


class Bench:
    """Measures and collects rows."""

    def __init__(self, log2: int) -> None:
        self.numel = 1 << log2
        self.rows: list[Row] = []
        source = torch.empty(max(self.numel, 1 << 28), dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        self.copy_bytes_per_s = 2 * source.nbytes / median_s(lambda: target.copy_(source))
        self.launch_s = self.graph_s(lambda: target[:32].add_(1.0))

    def add(self, *arguments: Any, **named: Any) -> None:
        row = Row(*arguments, **named)
        self.rows.append(row)
        print(line(row), flush=True)

    def share_of_copy(self, moved_bytes: float, seconds: float) -> float:
        return moved_bytes / seconds / self.copy_bytes_per_s

    def graph_s(self, run: Callable[[], object], calls: int = 20) -> float:
        """Return the time of one call inside of a graph of many."""
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
        """The bytes and the residual of the CPU, before anything is timed."""
        for density in (1e-3, 1e-2, 0.1, 0.3, 0.5, 0.9):
            residual, update = steady(1 << 21, density)
            cpu = gw.Encoder(1 << 21, threshold=1.0)
            cpu.residual[...] = residual.cpu().numpy()
            cuda = encoder_with(residual)
            expected = cpu.encode(update.cpu())
            message = cuda.encode(update)
            assert bytes(message) == bytes(expected), density
            assert torch.equal(torch.as_tensor(cuda.residual, device="cuda"), residual), density
            target, on_cpu = torch.zeros(1 << 21, device="cuda"), np.zeros(1 << 21, np.float32)
            gw.apply(message, target)
            gw.apply(expected, on_cpu)
            assert np.array_equal(target.cpu().numpy(), on_cpu), density

    def encode(self) -> None:
        reaches = ((1e-3, 0.85, 0.91), (1e-2, 0.75, 0.86), (0.1, 0.55, 0.72))
        others = ((0.2, 0.40, 0.62), (0.3, 0.40, 0.58), (0.5, 0.40, 0.68), (0.9, 0.40, 0.55))
        for density, reach, predicted in reaches + others:
            residual, update = steady(self.numel, density)
            encoder = encoder_with(residual)
            seconds = time_encode(encoder, update)
            assert torch.equal(torch.as_tensor(encoder.residual, device="cuda"), residual)
            share = self.share_of_copy(12 * self.numel, seconds)
            self.add(
                f"encode float32, {density:g}",
                share,
                reach,
                "of copy",
                predicted,
                seconds * 1e6,
                "12 B/element",
            )
        residual, update = steady(self.numel, 1e-3, torch.bfloat16)
        seconds = time_encode(encoder_with(residual), update)
        share = self.share_of_copy(10 * self.numel, seconds)
        self.add(
            "encode bfloat16 update, 0.001",
            share,
            0.80,
            "of copy",
            0.89,
            seconds * 1e6,
            "10 B/element",
        )

    def encode_accumulated(self) -> None:
        residual, update = steady(self.numel, 1e-3)
        encoder = encoder_with(residual)
        own = torch.as_tensor(encoder.residual, device="cuda")
        index = update.nonzero().view(-1)
        sign = update[index]
        out = buffer_for(encoder)
        seconds = median_s(
            lambda: encoder.encode(out=out), prepare=lambda: own.index_add_(0, index, sign)
        )
        assert torch.equal(own, residual)
        sectors = torch.unique(index // (SECTOR_BYTES // 4)).numel()
        moved = 4 * self.numel + SECTOR_BYTES * sectors
        self.add(
            "encode() accumulated, 0.001",
            self.share_of_copy(moved, seconds),
            0.75,
            "of copy",
            0.80,
            seconds * 1e6,
            f"{moved / self.numel:.2f} B/element",
        )

    def apply(self) -> None:
        messages, touched = [], torch.zeros(self.numel // 8, dtype=torch.bool, device="cuda")
        first_sectors = 0
        for seed in range(16):
            residual, update = steady(self.numel, 1e-3, seed=seed)
            encoder = encoder_with(residual)
            out = buffer_for(encoder)
            encoder.encode(update, out=out).check()
            messages.append(gw.cuda_message(out))
            touched[update.nonzero().view(-1) // 8] = True
            first_sectors = first_sectors or int(touched.sum())
            del encoder, residual, update
        target = torch.zeros(self.numel, device="cuda")
        for many, sectors, predicted in (
            (messages[:1], first_sectors, 0.15),
            (messages, int(touched.sum()), 0.45),
        ):
            seconds = median_s(lambda many=many: gw.apply_many(many, target))
            share = self.share_of_copy(2 * SECTOR_BYTES * sectors, seconds)
            note = f"{sectors} sectors read and written"
            what = f"apply_many of {len(many)}, 0.001" if len(many) > 1 else "apply, 0.001"
            self.add(what, share, 0.40, "of copy", predicted, seconds * 1e6, note)

    def pinned(self) -> None:
        numel = min(self.numel, 1 << 25)
        residual, update = steady(numel, 1e-3)
        encoder = encoder_with(residual)
        out = buffer_for(encoder)
        nbytes = encoder.encode(update).nbytes
        kept = median_s(lambda: encoder.encode(update, out=out))
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        transfer = median_s(lambda: host.copy_(out[:nbytes], non_blocking=True))
        ready = median_s(lambda: encoder.encode(update))
        note = f"encode {kept * 1e6:.1f} us, transfer of {nbytes} bytes {transfer * 1e6:.1f} us"
        self.add(
            "message in pinned memory", ready / (kept + transfer), 1.3, "x", 1.0, ready * 1e6, note
        )

    def small(self) -> None:
        residual, update = steady(1 << 16, 1e-3)
        encoder = encoder_with(residual)
        out = buffer_for(encoder)
        seconds = self.graph_s(lambda: encoder.encode(update, out=out))
        note = f"in a graph; one launch {self.launch_s * 1e6:.2f} us"
        self.add(
            "encode, 2^16",
            seconds / self.launch_s,
            LAUNCHES_MAX,
            "launches",
            8.0,
            seconds * 1e6,
            note,
        )

    def synchronisations(self) -> None:
        """Enqueue behind a kernel that takes long: whoever waited for the device would be seen."""
        residual, update = steady(1 << 20, 1e-3)
        encoder = encoder_with(residual)
        out = buffer_for(encoder)
        encoder.encode(update, out=out).check()
        torch.cuda._sleep(1_000_000_000)
        encoder.encode(update, out=out)
        waited = torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        self.add("host synchronisations per encode", float(waited), 0.0, "syncs", 0.0, 0.0)

    def peers(self) -> None:
        numel = min(self.numel, 1 << 26)
        residual, update = steady(numel, 1e-3)
        ours = time_encode(encoder_with(residual), update)
        for name, (make, reach, predicted) in PEERS.items():
            try:
                run = make(residual.clone(), update)
            except Missing as reason:
                print(f"skipped: {name}: {reason}", flush=True)
                continue
            except Exception as error:  # a peer that breaks must not cost the next one its number
                print(f"FAILED: {name}: {type(error).__name__}: {error}", flush=True)
                continue
            theirs = median_s(run, least=3)
            note = f"theirs {theirs * 1e6:.0f} us, N = 2^{numel.bit_length() - 1}"
            self.add(
                f"encode against {name}",
                theirs / ours,
                reach,
                "x faster",
                predicted,
                ours * 1e6,
                note,
            )


def line(row: Row) -> str:
    reach = "" if row.reach is None else f"{row.reach:g}"
    predicted = "" if row.predicted is None else f"{row.predicted:g}"
    return (
        f"| {row.what} | {row.figure:.3g} {row.unit} | {reach} | {predicted} | {row.median_us:.1f} us | {row.met} "
        f"| {row.note} |"
    )


def about(bench: Bench) -> dict[str, Any]:
    """Return what a number needs to mean something."""
    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "copy_bytes_per_s": bench.copy_bytes_per_s,
        "launch_us": bench.launch_s * 1e6,
        "torch": torch.__version__,
        "cuda_status": _core.cuda_status(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "numel": bench.numel,
        "commit": commit,
    }


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--log2", type=int, default=28, help="elements, as a power of two")
    parser.add_argument("--json", help="also write the result to this file")
    arguments = parser.parse_args()
    if "cuda" not in gw.backends():
        print("skipped: no usable CUDA backend")
        return 0
    bench = Bench(arguments.log2)
    machine = about(bench)
    print(f"{machine['gpu']}: copy {bench.copy_bytes_per_s / 1e12:.3f} TB/s, read and written")
    bench.answers()
    print(
        "| what | reached | reach | predicted | median |  | note |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    failures = 0
    for part in (
        bench.encode,
        bench.encode_accumulated,
        bench.apply,
        bench.pinned,
        bench.small,
        bench.synchronisations,
        bench.peers,
    ):
        try:
            part()
        except Exception as error:  # one broken part must not cost the others their numbers
            failures += 1
            print(f"FAILED: {part.__name__}: {type(error).__name__}: {error}", flush=True)
    if arguments.json:
        rows = [{**asdict(row), "met": row.met} for row in bench.rows]
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "rows": rows, "failures": failures}, file, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
