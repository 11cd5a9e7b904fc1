"""Trainings of Accelerate and Trainer with two processes: all as usual, and every rank's residual is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from . import framework_runs as runs

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ACCELERATE = """
from accelerate import Accelerator
import gradwire.hf

AS_PLAIN = {"codec": "dense"}

def session(make=torch.optim.SGD, options=AS_PLAIN, **given):
    for borg in (Accelerator().state, Accelerator().gradient_state):
        borg._reset_state()
    accelerator = Accelerator(cpu=True, **given)
    model = layers()
    optimizer = make(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    loader, schedule = accelerator.prepare(loader, schedule)
    model, optimizer = gradwire.hf.prepare(accelerator, model, optimizer, **options)
    return accelerator, model, optimizer, schedule, loader

def train(session, epochs, clip=0.0):
    accelerator, model, optimizer, schedule, loader = session
    for _ in epochs:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                SEEN.append((inputs.clone(), targets.clone()))
                accelerator.backward((model(inputs) - targets).square().mean())
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

def ended(session, initial):
    accelerator, model, optimizer, *_ = session
    inner = accelerator.unwrap_model(model)
    result = {"initial": initial, "final": copied(inner), "exchanges": optimizer.optimizer.step_number}
    optimizer.optimizer.close()
    return result

def trained(made, clip=0.0, epochs=range(1)):
    initial = copied(made[0].unwrap_model(made[1]))
    train(made, epochs, clip)
    return ended(made, initial)

def accumulation():
    return trained(session(gradient_accumulation_steps=3))

def clipping():
    return trained(session(), clip=0.1)

def bf16():
    made = session(torch.optim.AdamW, {}, mixed_precision="bf16")
    return trained(made, 0.5, range(3))

def resume():
    # One more accelerator in the same process, as a restarted script has it.
    def begin():
        return session(torch.optim.AdamW, {}, mixed_precision="bf16", gradient_accumulation_steps=2)

    whole = trained(begin(), 0.5, range(4))
    half = begin()
    train(half, range(2), 0.5)
    half[0].save_state(str(folder / "state"))
    half[0].wait_for_everyone()
    ended(half, {})
    rest = begin()
    rest[0].load_state(str(folder / "state"))
    train(rest, range(2), 0.5)
    files = sorted(path.name for path in (folder / "state").glob("optimizer*"))
    return {**whole, "resumed": ended(rest, {})["final"], "files": files}

def ddp_besides():
    import logging
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    for borg in (Accelerator().state, Accelerator().gradient_state):
        borg._reset_state()
    accelerator = Accelerator(cpu=True)
    model = layers()
    optimizer = gradwire.torch.share(model, torch.optim.SGD(model.parameters(), lr=LR))
    wrapped, prepared = accelerator.prepare(model, optimizer)
    for _ in range(3):
        wrapped(torch.ones(2, 8)).sum().backward()
        prepared.step()
    optimizer.close()
    return {"wrapped": type(wrapped).__name__, "said": [text for text in records if "averages whole" in text]}

run({case.__name__: case for case in [accumulation, clipping, bf16, resume, ddp_besides]})
"""

TRAINER = """
from transformers import Trainer, TrainingArguments
from gradwire.hf import gradwire_trainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = layers()
        self.evaluated = []

    def forward(self, inputs, labels):
        if not self.training:
            self.evaluated.append({k: v.detach().clone() for k, v in self.net.named_parameters()})
        else:
            SEEN.append((inputs.clone(), labels.clone()))
        return {"loss": (self.net(inputs) - labels).square().mean()}

def rows():
    return [{"inputs": x, "labels": y} for x, y in data()]

def trainer(name, optim="sgd", plain=True, steps=6, model=None, sharing={}, **options):
    arguments = TrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=4, learning_rate=LR, optim=optim,
        **{"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", **options},
        max_steps=steps, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1000,
    )
    kind = gradwire_trainer(Trainer, **({"codec": "dense"} if plain else sharing))
    return kind(model=model or Model(), args=arguments, train_dataset=rows(), eval_dataset=rows()[:8])

def fitted(made, **options):
    initial = copied(made.model)
    made.train(**options)
    return {"initial": initial, "final": copied(made.model), "steps": made.state.global_step}

def accumulation():
    return fitted(trainer("accumulation", gradient_accumulation_steps=3, steps=4))

def clipping():
    return fitted(trainer("clipping", max_grad_norm=0.1))

def bf16():
    return fitted(trainer("bf16", "adamw_torch", False, 30, bf16=True, max_grad_norm=0.5))

def resumed(name, **sharing):
    options = {"bf16": True, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "steps": 16,
               "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 5, "sharing": sharing}
    whole = fitted(trainer(f"{name} whole", "adamw_torch", False, **options))
    made = trainer(f"{name} rest", "adamw_torch", False, **options)
    saved = folder / f"{name} whole" / "checkpoint-10"
    rest = fitted(made, resume_from_checkpoint=str(saved))
    files = sorted(path.name for path in saved.glob("optimizer*"))
    return {**whole, "resumed": rest["final"], "files": files}

def resume():
    return resumed("plain")

def overlapping():
    return resumed("overlapping", every=4, overlap=3, codec="dense")

def evaluation():
    made = trainer("evaluation", "adamw_torch", False, eval_strategy="steps", eval_steps=3, eval_on_start=True)
    with torch.no_grad():
        made.model.net[0].bias += rank
    made.train()
    kept = {name: value.clone() for name, value in made.model.net.named_parameters()}
    made.train()  # once more in the same process
    return {"evaluated": made.model.evaluated}

run({case.__name__: case for case in [accumulation, clipping, bf16, resume, overlapping, evaluation]})
"""

SCRIPTS = {"accelerate": ACCELERATE, "trainer": TRAINER}


@pytest.fixture(
    scope="module", params=[(name, kind) for name in SCRIPTS for kind in runs.KINDS], ids=str
)
def done(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    name, kind = request.param
    folder = tmp_path_factory.mktemp(name)
    return name, folder, runs.run_two(SCRIPTS[name], folder, kind)


def test_accumulation_exchanges_once_for_all_batches(done: tuple[str, Path, str]) -> None:
    results = runs.results_of(done[1], "accumulation", done[2])
    for result in results:
        assert result.get("exchanges", 4) == 4
        assert len(result["seen"]) == 12
        runs.assert_close(result["final"], runs.trained(results, lr=0.05, accumulate=3))


def test_gradients_are_clipped_on_every_rank(done: tuple[str, Path, str]) -> None:
    results = runs.results_of(done[1], "clipping", done[2])
    for result in results:
        runs.assert_close(result["final"], runs.trained(results, lr=0.05, clip=0.1))


def test_bfloat16_with_clipping_trains(done: tuple[str, Path, str]) -> None:
    first, second = runs.results_of(done[1], "bf16", done[2])
    runs.assert_same(first["final"], second["final"])
    assert runs.loss_of(first["final"]) < 0.7 * runs.loss_of(first["initial"])


@pytest.mark.parametrize("case", ["resume", "overlapping"])
def test_a_training_is_resumed_bit_for_bit(done: tuple[str, Path, str], case: str) -> None:
    if (done[0], case) == ("accelerate", "overlapping"):
        pytest.skip("Accelerate's loop calls catch_up() itself")
    first, second = runs.results_of(done[1], case, done[2])
    runs.assert_same(first["final"], second["final"])
    for result in (first, second):
        runs.assert_same(result["resumed"], result["final"])
    name = {"accelerate": "optimizer.bin", "trainer": "optimizer.pt"}[done[0]]
    assert first["files"] == [name, f"{name}.rank1"]


def test_ddp_besides_share_is_said_once(done: tuple[str, Path, str]) -> None:
    if done[0] != "accelerate":
        pytest.skip("the trainer has a case of its own")
    for result in runs.results_of(done[1], "ddp_besides", done[2]):
        assert result["wrapped"] == "DistributedDataParallel"
        assert len(result["said"]) == 1
        assert "gradwire.hf.prepare(accelerator, model, optimizer)" in result["said"][0]


def test_all_ranks_evaluate_the_shared_parameters(done: tuple[str, Path, str]) -> None:
    if done[0] != "trainer":
        pytest.skip("with Accelerate the caller evaluates")
    first, second = runs.results_of(done[1], "evaluation", done[2])
    assert len(first["evaluated"]) >= 4
    for mine, theirs in zip(first["evaluated"], second["evaluated"], strict=True):
        runs.assert_same(mine, theirs)
