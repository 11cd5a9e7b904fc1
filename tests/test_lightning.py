"""Trainings of Lightning with two processes: everything as with "ddp", and every rank's residual is kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

from . import framework_runs as runs

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = """
import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning, Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from gradwire.lightning import GradwireStrategy

warnings.filterwarnings("ignore")
AS_PLAIN = {"codec": "dense", "update_scale": 1.0}

class Module(pl.LightningModule):
    def __init__(self, make=torch.optim.SGD):
        super().__init__()
        self.net, self.make, self.lr = layers(), make, LR
        self.validated = []

    def training_step(self, batch, _):
        SEEN.append(tuple(part.clone() for part in batch))
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.validated.append(copied(self))
        self.log("checked", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.make([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]

def loader():
    return torch.utils.data.DataLoader(data(), batch_size=4)

def trainer(strategy="gradwire", steps=6, **options):
    return pl.Trainer(
        **{"logger": False, "enable_checkpointing": False, "limit_val_batches": 0, "num_sanity_val_steps": 0,
           **options},
        strategy=strategy, accelerator="cpu", devices=local_size, num_nodes=2 // local_size,
        max_steps=steps, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )

def fitted(model, made, **options):
    initial = copied(model)
    made.fit(model, loader(), **options)
    return {"initial": initial, "final": copied(model), "steps": made.global_step}

def accumulation():
    model = Module()
    made = trainer(GradwireStrategy(**AS_PLAIN), accumulate_grad_batches=3, steps=4)
    return {**fitted(model, made), "exchanges": made.optimizers[0].step_number}

def clipping():
    return fitted(Module(), trainer(GradwireStrategy(**AS_PLAIN), gradient_clip_val=0.1))

def bf16():
    options = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "steps": 24}
    return fitted(Module(torch.optim.AdamW), trainer(max_epochs=8, **options))

def keeping(name):
    # Rank 0 alone decides; the others' metrics differ.
    path = folder / name
    return ModelCheckpoint(path, filename="{step}", every_n_train_steps=5, save_top_k=-1, save_last=True)

def resumed(name, **sharing):
    options = {"enable_checkpointing": True, "precision": "bf16-mixed", "gradient_clip_val": 0.5}
    options |= {"limit_train_batches": 5, "max_epochs": 8}
    def train(part, steps, **more):
        made = trainer(GradwireStrategy(**sharing), steps, callbacks=[keeping(f"{name} {part}")], **options)
        return fitted(Module(torch.optim.AdamW), made, **more)
    whole = train("whole", 15)
    train("half", 10)
    rest = train("rest", 15, ckpt_path=folder / f"{name} half" / "step=10.ckpt")
    return {**whole, "resumed": rest["final"], "resumed steps": rest["steps"],
            "files": sorted(path.name for path in (folder / f"{name} half").iterdir())}

def resume():
    return resumed("plain")

def overlapping():
    return resumed("overlapping", every=4, overlap=3, codec="dense")

def validation():
    model = Module(torch.optim.AdamW)
    with torch.no_grad():
        model.net[0].bias += rank
    options = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}
    options["num_sanity_val_steps"] = 1
    made = trainer(**options)
    made.fit(model, loader(), loader())
    return {"validated": model.validated, "checked": made.callback_metrics["checked"].item()}

class Unequal(Module):
    def validation_step(self, *_):
        self.log("checked", [[2.0, 1.0, 0.0, 3.0], [1.25, 2.25, 0.25, 3.25]][rank][self.current_epoch])

def unequal():
    def fit(callback, **options):
        made = trainer(steps=-1, max_epochs=4, limit_train_batches=3, limit_val_batches=1,
                       enable_checkpointing=True, callbacks=[callback])
        model = Unequal(torch.optim.AdamW)
        made.fit(model, loader(), loader(), **options)
        return copied(model)

    path, name = folder / "unequal", "{epoch}-{checked}"
    final = fit(ModelCheckpoint(path, monitor="checked", filename=name, save_top_k=2, save_last="link"))
    resumed = fit(ModelCheckpoint(folder / "unequal rest"), ckpt_path=path / "last.ckpt")
    return {"final": final, "resumed": resumed, "files": sorted(each.name for each in path.iterdir())}

class Requeuing(Callback):
    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == 1:  # as SLURM's signal does
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))

def requeued():
    model, again = Module(torch.optim.AdamW), Module(torch.optim.AdamW)
    options = {"steps": -1, "max_epochs": 3, "limit_train_batches": 3}
    trainer(callbacks=[Requeuing()], **options).fit(model, loader())
    trainer(**options).fit(again, loader(), ckpt_path="hpc")
    return {"final": copied(model), "resumed": copied(again)}

def lr_find():
    model = Module(torch.optim.AdamW)
    made = trainer(steps=12, max_epochs=8)
    initial = copied(model)
    found = Tuner(made).lr_find(model, loader(), num_training=30, min_lr=1e-4, max_lr=0.5)
    kept = copied(model)
    made.fit(model, loader())
    return {"initial": initial, "kept": kept, "final": copied(model), "lr": model.lr,
            "steps": made.optimizers[0].step_number if hasattr(made.optimizers[0], "step_number") else -1}

class Finetuning(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=LR)

def finetuning():
    def fit(name, epochs, **options):
        model = Module(torch.optim.AdamW)
        callbacks = [Finetuning(), ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)]
        made = trainer(steps=-1, max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks)
        return fitted(model, made, **options)

    whole = fit("tuned", 4)
    fit("tuned half", 2)
    resumed = fit("tuned rest", 4, ckpt_path=folder / "tuned half" / "epoch=1.ckpt")
    return {**whole, "resumed": resumed["final"]}

class Recording(Callback):
    def __init__(self):
        self.shared = []

    def on_train_start(self, trainer, module):
        with torch.no_grad():
            module.net[0].bias += rank  # as seeds that differ; all begin with those of rank 0

    def on_train_batch_end(self, trainer, module, *_):
        with trainer.optimizers[0].shared_parameters():
            self.shared.append(copied(module))

class Failing(Callback):
    def on_train_batch_end(self, *_):
        raise ValueError("as told")

class FromInside(EMAWeightAveraging):
    def on_train_batch_end(self, trainer, *rest):
        with trainer.optimizers[0].shared_parameters():
            super().on_train_batch_end(trainer, *rest)

def fit_averaging(average, *callbacks, **options):
    model = Module(torch.optim.AdamW)
    made = trainer(steps=-1, max_epochs=4, limit_train_batches=3, limit_val_batches=1,
                   enable_checkpointing=bool(callbacks), callbacks=[average, *callbacks])
    made.fit(model, loader(), loader(), **options)
    wrapped = [each for each in (average, average._average_model) if "update_parameters" in vars(each)]
    return {"initial": copied(layers()), "final": copied(model), "validated": model.validated[-1],
            "wrapped": len(wrapped)}

def averaging(make):
    recording, path = Recording(), folder / make.__name__
    keeping = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
    whole = fit_averaging(make(), recording, keeping)
    resumed = fit_averaging(make(), ckpt_path=path / "epoch=1.ckpt")
    return {**whole, "resumed": resumed["final"], "shared": recording.shared}

def moving():
    return EMAWeightAveraging(decay=0.5)

def stochastic():
    return StochasticWeightAveraging(LR, swa_epoch_start=1)

def ema():
    return {**averaging(moving), "inside": fit_averaging(FromInside(decay=0.5))["final"]}

def swa():
    return averaging(stochastic)

def ema_again():
    average = moving()
    try:
        fit_averaging(average, Failing(), ModelCheckpoint(folder / "failed"))
    except ValueError:
        wrapped = "update_parameters" in vars(average._average_model)
    return {**fit_averaging(average), "wrapped after failure": wrapped}

cases = [accumulation, clipping, bf16, resume, overlapping, validation, unequal, requeued, lr_find, finetuning,
         ema, swa, ema_again]
run({case.__name__: case for case in cases})
"""


@pytest.fixture(scope="module", params=runs.KINDS)
def done(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("lightning")
    return folder, runs.run_two(SCRIPT, folder, request.param)


def test_accumulation_exchanges_once_for_all_batches(done: tuple[Path, str]) -> None:
    results = runs.results_of(done[0], "accumulation", done[1])
    for result in results:
        assert (result["steps"], result["exchanges"]) == (4, 4)
        runs.assert_close(result["final"], runs.trained(results, lr=0.05, accumulate=3))


def test_gradients_are_clipped_on_every_rank(done: tuple[Path, str]) -> None:
    results = runs.results_of(done[0], "clipping", done[1])
    for result in results:
        runs.assert_close(result["final"], runs.trained(results, lr=0.05, clip=0.1))


def test_bfloat16_with_clipping_trains(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "bf16", done[1])
    runs.assert_same(first["final"], second["final"])
    assert first["steps"] == 24
    before, after = (runs.loss_of(first[name]) for name in ("initial", "final"))
    assert after < 0.7 * before


@pytest.mark.parametrize("case", ["resume", "overlapping"])
def test_a_training_is_resumed_bit_for_bit(done: tuple[Path, str], case: str) -> None:
    first, second = runs.results_of(done[0], case, done[1])
    runs.assert_same(first["final"], second["final"])
    for result in (first, second):
        assert result["resumed steps"] == 15
        runs.assert_same(result["resumed"], result["final"])
    names = ["last.ckpt", "step=10.ckpt", "step=5.ckpt"]
    assert first["files"] == sorted(each for name in names for each in (name, f"{name}.rank1"))


def test_all_ranks_validate_the_shared_parameters(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "validation", done[1])
    assert first["checked"] == second["checked"]
    assert len(first["validated"]) == 3  # the first before the training
    for mine, theirs in zip(first["validated"], second["validated"], strict=True):
        runs.assert_same(mine, theirs)


def test_rank_0_chooses_and_names_checkpoints_where_metrics_differ(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "unequal", done[1])
    kept = ["epoch=1-checked=1.0.ckpt", "epoch=2-checked=0.0.ckpt"]
    assert first["files"] == sorted([*kept, *(f"{name}.rank1" for name in kept), "last.ckpt"])
    for result in (first, second):
        runs.assert_same(result["resumed"], first["final"])


def test_slurm_finds_the_checkpoint_of_a_job_that_it_starts_again(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "requeued", done[1])
    for result in (first, second):
        runs.assert_same(result["resumed"], first["final"])


def test_a_learning_rate_is_found_and_leaves_no_trace(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "lr_find", done[1])
    assert first["lr"] == second["lr"] != 0.05
    runs.assert_same(first["kept"], first["initial"])
    runs.assert_same(first["final"], second["final"])
    assert runs.loss_of(first["final"]) < runs.loss_of(first["initial"])


def test_layers_are_unfrozen_in_the_middle_also_after_a_resumption(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "finetuning", done[1])
    runs.assert_same(first["final"], second["final"])
    runs.assert_same(first["resumed"], second["resumed"])
    for result in (first, second):
        runs.assert_same(result["resumed"], result["final"])


@pytest.mark.parametrize("case", ["ema", "swa"])
def test_averages_of_weights_are_the_same_on_all_ranks(done: tuple[Path, str], case: str) -> None:
    first, second = runs.results_of(done[0], case, done[1])
    runs.assert_same(first["final"], second["final"])
    runs.assert_same(first["validated"], second["validated"])
    for result in (first, second):
        runs.assert_same(result["resumed"], result["final"])
        assert not result["wrapped"]


def test_moving_averages_are_of_the_shared_parameters(done: tuple[Path, str]) -> None:
    for result in runs.results_of(done[0], "ema", done[1]):
        average, *others = result["shared"]
        assert len(others) == 11
        for state in others:
            average = {name: (average[name] + value) / 2 for name, value in state.items()}
        runs.assert_close(result["final"], average)
        runs.assert_close(result["validated"], average)


def test_swa_averages_the_shared_parameters_from_the_first_epoch(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "swa", done[1])
    for result in (first, second):
        states = [first["initial"], *result["shared"][2:-1:3]]
        assert len(states) == 4
        mean = {name: sum(state[name] for state in states) / 4 for name in states[0]}
        runs.assert_close(result["final"], mean)


def test_a_callback_averages_in_another_training_after_a_failure(done: tuple[Path, str]) -> None:
    first, second = runs.results_of(done[0], "ema_again", done[1])
    runs.assert_same(first["final"], second["final"])
    assert not first["wrapped after failure"]


def test_a_callback_may_enter_shared_parameters_itself(done: tuple[Path, str]) -> None:
    for result in runs.results_of(done[0], "ema", done[1]):
        runs.assert_same(result["inside"], result["final"])


ALONE = """
import os, sys
from pathlib import Path
import torch
import lightning.pytorch as pl
import gradwire.lightning

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

devices = int(sys.argv[2])
made = pl.Trainer(strategy="gradwire", accelerator="cpu", devices=devices, max_steps=5, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, default_root_dir=sys.argv[1])
model = Module()
made.fit(model, torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64))
made.save_checkpoint(Path(sys.argv[1]) / "end.ckpt")
torch.save(model.state_dict(), Path(sys.argv[1]) / f"alone-{made.global_rank}.pt")
if len(sys.argv) > 3:
    (Path(sys.argv[1]) / "end.ckpt.rank1").unlink(missing_ok=True)
    made.strategy.barrier()
    made.fit(model, torch.utils.data.DataLoader(torch.ones(16, 4)), ckpt_path=Path(sys.argv[1]) / "end.ckpt")
"""


def start(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    script = folder / "alone.py"
    script.write_text(ALONE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script), str(folder), *arguments]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_lightning_starts_the_processes_itself(tmp_path: Path) -> None:
    import torch

    status, output = start(tmp_path, "2")
    assert status == 0, output
    first, second = (torch.load(tmp_path / f"alone-{rank}.pt") for rank in range(2))
    runs.assert_same(first, second)
    assert (tmp_path / "end.ckpt").exists()
    assert (tmp_path / "end.ckpt.rank1").exists()


def test_a_trainer_with_other_ranks_than_the_launcher_is_refused(tmp_path: Path) -> None:
    status, output = start(tmp_path, "1", launcher=("-m", "gradwire", "run", "-n", "2"))
    assert status != 0
    assert re.search(r"rank \d of 2.*Trainer\(devices=2, num_nodes=1\)", output), output


def test_a_rank_without_its_file_is_refused(tmp_path: Path) -> None:
    launcher = ("-m", "gradwire", "run", "-n", "2")
    status, output = start(tmp_path, "2", "resume", launcher=launcher)
    assert status != 0
    assert re.search(r"FileNotFoundError: \S+end\.ckpt\.rank1 is missing: rank 1 of 2", output)
