"""One node of a run: trains, and if it is the first tells on standard output how far it is.

The clock stands still while the nodes evaluate, which all do at the same steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from training.methods import METHODS, Method
from training.network import DEVICE
from training.tasks import TASKS, Task


def main(run: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    kind = METHODS[run["method"]]
    if kind.uses_gloo:
        os.environ |= {
            "GLOO_SOCKET_IFNAME": DEVICE,
            "MASTER_ADDR": run["addresses"][0],
            "MASTER_PORT": "29400",
        }
        dist.init_process_group("gloo", rank=rank, world_size=len(run["addresses"]))
    task = TASKS[run["task"]]()
    method = kind(task, run["seed"], run["addresses"], rank, run["density"])
    if kind.uses_gloo:
        dist.barrier()
    end = train(task, method, run, rank)
    if rank == 0:
        report(end)
    # The others find the first gone, or are stopped.
    method.close()


def train(task: Task, method: Method, run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train until the target, the last step, or the end of the budget; return why, and the totals."""
    target, step_s, elapsed_s = run["target"], [], 0.0
    sent_before, reason = sent_bytes(), "steps"
    for number in range(run["steps"]):
        batch = task.batch(run["seed"], rank, number)
        begin_s = time.perf_counter()
        method.step(batch, number)
        step_s.append(time.perf_counter() - begin_s)
        elapsed_s += step_s[-1]
        if (number + 1) % run["evaluate_every"] and number + 1 < run["steps"]:
            if elapsed_s > run["budget_s"] and rank == 0:
                reason = "budget"
                break
            continue
        method.before_evaluation()
        point = {
            "step": number + 1,
            "seconds": elapsed_s,
            "bytes": sent_bytes() - sent_before,
            "loss": task.validation_loss(method.model),
        }
        if rank == 0:
            report(point)
            if run["stop_at_target"] and point["loss"] <= target:
                reason = "target"
                break
    return {
        "end": reason,
        "steps": len(step_s),
        "seconds": elapsed_s,
        "bytes": sent_bytes() - sent_before,
        "step_s_median": statistics.median(step_s),
        "step_s_mean": elapsed_s / len(step_s),
        "totals": method.totals(),
        "numel": sum(param.numel() for param in method.model.parameters()),
        "data": task.data,
    }


def sent_bytes() -> int:
    """Return what this node's device has sent, from the Ethernet header on; 0 without one, as on loopback."""
    counter = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def report(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
