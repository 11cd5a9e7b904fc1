"""One node of a run: trains, and if it is the first tells on standard output how far it is.

The clock stands still while the nodes evaluate, which all do at the same steps.
"""

from __future__ import annotations

import json
import os
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

# However long they take: the first steps of a training are not like the others.
STEPS_MIN = 4


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
    method = kind(task, run["seed"], run["addresses"], rank, run["density"], run["steps"])
    if kind.uses_gloo:
        dist.barrier()
    end = train(task, method, run, rank)
    if rank == 0:
        report(end)
    # The others find the first gone, or are stopped.
    method.close()


def train(task: Task, method: Method, run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train until the target, the last step, or the end of the budget; return why, and the totals.

    A run that is for its whole curve has neither target nor budget.
    """
    step_s: list[float] = []
    elapsed_s = 0.0
    sent_before, reason = sent_bytes(), "steps"
    for number in range(run["steps"]):
        batch = task.batch(run["seed"], rank, number)
        begin_s = time.perf_counter()
        method.step(batch, number)
        step_s.append(time.perf_counter() - begin_s)
        elapsed_s += step_s[-1]
        if (number + 1) % run["evaluate_every"] and number + 1 < run["steps"]:
            is_spent = elapsed_s > run["budget_s"] and len(step_s) >= STEPS_MIN
            if rank == 0 and is_spent and not run["is_whole"]:
                reason = "budget"
                break
            continue
        with method.evaluated():
            loss = task.validation_loss(method.model)
        if rank == 0:
            report(
                {
                    "step": number + 1,
                    "seconds": elapsed_s,
                    "bytes": sent_bytes() - sent_before,
                    "loss": loss,
                }
            )
            if loss <= run["target"] and not run["is_whole"]:
                reason = "target"
                break
    return {
        "end": reason,
        "steps": len(step_s),
        "seconds": elapsed_s,
        "bytes": sent_bytes() - sent_before,
        "step_s": [round(one, 5) for one in step_s],
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
