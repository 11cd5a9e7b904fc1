"""One node: trains, once for each run, and the first node prints its progress as lines of JSON.

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

from training import METHODS, methods
from training.network import DEVICE
from training.tasks import TASKS

PORT, STORE_PORT = 40123, 29400  # of the first run
STEPS_MIN = 4  # whatever they take: the first steps of a training are not like the others
SENT = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")


def main(runs: list[dict[str, Any]], hosts: list[str], rank: int) -> None:
    torch.set_num_threads(1)
    if SENT.exists():
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    for number, run in enumerate(runs):
        kind = getattr(methods, METHODS[run["method"]])
        if kind.uses_gloo:
            store = f"tcp://{hosts[0]}:{STORE_PORT + number}"
            dist.init_process_group("gloo", store, rank=rank, world_size=len(hosts))
        task, addresses = TASKS[run["task"]](), [f"{host}:{PORT + number}" for host in hosts]
        method = kind(task, run["seed"], addresses, rank, run["density"], run["steps"])
        if kind.uses_gloo:
            dist.barrier()
        for line in train(method, run, rank):
            if rank == 0:
                print(json.dumps(line), flush=True)
        # The others find the first node gone, or are stopped.
        method.close()
        if kind.uses_gloo and run is not runs[-1]:
            dist.destroy_process_group()


def train(method: methods.Method, run: dict[str, Any], rank: int) -> Any:
    """Train until the target, the last step, or the end of the budget; yield every loss, and the totals at the end.

    A run for its curve has neither target nor budget.
    """
    step_s: list[float] = []
    sent_before, reason, ends_early = sent_bytes(), "steps", rank == 0 and not run["is_curve"]
    for number in range(1, run["steps"] + 1):
        batch = method.task.batch(run["seed"], rank, number - 1)
        begin_s = time.perf_counter()
        method.step(batch, number - 1)
        step_s.append(time.perf_counter() - begin_s)
        if number % run["evaluate_every"] == 0 or number == run["steps"]:
            with method.evaluated():
                loss = method.task.validation_loss(method.model)
            sent = sent_bytes() - sent_before
            yield {"step": number, "seconds": sum(step_s), "bytes": sent, "loss": loss}
            if ends_early and loss <= method.task.target:
                reason = "target"
                break
        elif ends_early and sum(step_s) > run["budget_s"] and number >= STEPS_MIN:
            reason = "budget"
            break
    yield {
        "end": reason,
        "target": method.task.target,
        "steps": len(step_s),
        "seconds": sum(step_s),
        "bytes": sent_bytes() - sent_before,
        "step_s": [round(one, 5) for one in step_s],
        "totals": method.totals(),
        "numel": sum(param.numel() for param in method.model.parameters()),
    }


def sent_bytes() -> int:
    """Return the bytes this node's device has sent, Ethernet headers included; 0 on loopback."""
    return int(SENT.read_text()) if SENT.exists() else 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
