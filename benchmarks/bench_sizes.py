"""What training costs at 5 to 124 million parameters, over np.add of as many elements.

Two processes train with AdamW under ``gradwire.torch.share`` on loopback: first one alone, then both. The optimiser's
own step is subtracted. One node alone is measured in processor time, two nodes in seconds, waiting included.

    python benchmarks/bench_sizes.py --json sizes.json      # 5 minutes, 8 GB of memory
"""

from __future__ import annotations

import argparse
import io
import resource
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from children import children
from harness import Report, Row, Target, Timing, aligned, ratio
from transport_goodput import SECRET

WIDTH, DENSITY, SETTLING_STEPS, STEPS = 1_600, 0.05, 8, 5  # as wide as a large GPT-2
REFERENCE_NUMEL = 1 << 26  # beyond the caches, which may have 300 MB
TARGETS = {"step, float32": 3.0, "step, bfloat16": 5.0, "first step": 10.0}


class Samples(dict[str, list[float]]):
    """The seconds of every operation, by name, beside those of np.add of ``numel`` elements."""

    def __init__(self, numel: int, now: Callable[[], float]) -> None:
        super().__init__()
        self._numel, self._now = numel, now
        self._arrays = aligned(REFERENCE_NUMEL), np.ones(REFERENCE_NUMEL, np.float32)
        np.add(*self._arrays, out=self._arrays[0])  # or the first touch would count

    def time(self, name: str, call: Callable[[], Any]) -> None:
        """Note the time of a call and of np.add."""
        begin_s = self._now()
        call()
        self.setdefault(name, []).append(self._now() - begin_s)
        begin_s = time.process_time()
        np.add(*self._arrays, out=self._arrays[0])
        added_s = time.process_time() - begin_s
        self.setdefault("np.add", []).append(added_s * self._numel / REFERENCE_NUMEL)

    def row(self, name: str, kind: str, note: str = "") -> Row:
        ours, theirs = Timing(name, tuple(self[name])), Timing("np.add", tuple(self["np.add"]))
        most = TARGETS.get(what := f"{name}, {kind}", TARGETS.get(name))
        target, where = Target("<=", most) if most else None, f"{round(self._numel / 1e6)} M"
        return ratio(("real-sizes", what, where), ours, theirs, target=target, note=note)


def train(pipe: Connection, numel: int, dtype: str, member: str) -> None:
    """Be one node: without a member it trains alone; with one it joins late, takes some steps and leaves."""
    import torch

    import gradwire as gw
    import gradwire.torch

    torch.set_num_threads(1)
    numel = (layers := round(numel / WIDTH**2)) * WIDTH**2
    np.ones(10 * numel)  # a virtual machine gets memory slowly at the first touch
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    samples = Samples(numel, now := time.perf_counter if member else time.process_time)
    base_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = partial(torch.nn.Linear, WIDTH, WIDTH, bias=False, dtype=getattr(torch, dtype))
    model = torch.nn.Sequential(*[layer() for _ in range(layers)])
    inner = torch.optim.AdamW(model.parameters())
    take_step, own_s = inner.step, [0.0]

    def timed_step() -> None:
        own_s[0] -= now()
        take_step()
        own_s[0] += now()

    def step(name: str) -> None:
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        own_s[0] = 0.0
        samples.time(name, shared.step)
        samples[name][-1] -= own_s[0]
        samples.setdefault(f"encode, {name}", []).append(shared.result.encode_s)

    inner.step = timed_step  # type: ignore[method-assign,assignment]
    with gw.Node("127.0.0.1:0", secret=SECRET, peers=[member] if member else []) as node:
        options: Any = {"density": DENSITY, "min_peers": 1 if member else 0, "timeout_s": 600.0}
        shared: Any = gradwire.torch.share(model, inner, node=node, **options)
        if member:
            samples.time("join", shared.join)
        for count in range(SETTLING_STEPS + STEPS):
            step("step" if count >= SETTLING_STEPS else "settling" if count else "first step")
        assert 0.0 < shared.result.density <= 2.0 * DENSITY
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base_kib
        peak = f"peak of {1024 * peak_kib / numel:.1f} bytes per parameter"
        if member:
            samples.time("leave", shared.leave)
            sent_gb = numel * (4e-9 + 2e-9 * next(model.parameters()).element_size())
            notes = {"join": f"{sent_gb / samples['join'][0]:.2f} GB/s", "step": peak, "leave": ""}
            pipe.send([samples.row(name, f"{dtype}, two", notes[name]) for name in notes])
            return
        with io.BytesIO() as file:
            both = model.state_dict, shared.state_dict
            samples.time("save", lambda: torch.save([state() for state in both], file))
            stored = f"{file.tell() / numel:.1f} bytes per parameter"
            file.seek(0)
            samples.time("load", lambda: torch.load(file, weights_only=False))
        notes = {"encode, step": "", "first step": "", "step": peak, "save": stored, "load": ""}
        pipe.send([samples.row(name, dtype, notes[name]) for name in notes])
        pipe.send(node.address)
        while not pipe.poll():
            step("with the other")


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--smoke", action="store_true", help="5 million parameters in float32")
    parser.add_argument("--millions", nargs="+", type=int, default=[5, 25, 124])
    options = parser.parse_args()
    report = Report("real-sizes", {"density": DENSITY}, "smoke test" if options.smoke else "")
    for millions in [5] if options.smoke else options.millions:
        for dtype in ["float32"] if options.smoke else ["float32", "bfloat16"]:
            with children((train, millions * 1_000_000, dtype, "")) as (first,):
                report.add(first.recv())
                with children((train, millions * 1_000_000, dtype, first.recv())) as (second,):
                    report.add(second.recv())
                first.send("end")
    report.finish(options.json)


if __name__ == "__main__":
    main()
