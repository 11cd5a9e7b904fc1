"""Hugging Face: Trainer and Accelerate with shared updates in the place of DistributedDataParallel."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .torch import SharedOptimizer, share
from .torch.rank_files import RankFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .exchange import ExchangeOptions
    from .sharing import Density

__all__ = ["gradwire_trainer", "prepare"]

# The optimiser's state of a checkpoint, as Trainer and Accelerate name it.
_TRAINER_FILE = "optimizer.pt"
_ACCELERATE_FILE = "optimizer.bin"


def prepare(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    density: Density | None = None,
    **options: Unpack[ExchangeOptions],
) -> tuple[Any, Any]:
    """Prepare model and optimiser for Accelerate, and share the optimiser; prepare loaders and schedules as usual.

    In the place of ``accelerator.prepare(model, optimizer)``, once per ``Accelerator``. Accumulation, mixed precision,
    clipping, ``save_state`` and ``load_state`` are as usual: the folder of a state has one file more for each further
    process, ``optimizer.bin.rank1``. For machines without a common file system let every machine save,
    ``ProjectConfiguration(save_on_each_node=True)``.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: as for ``accelerator.prepare``.
        optimizer: of the model's parameters.
        density: as in `gradwire.torch.share`.
        options: see `ExchangeOptions`.

    Returns:
        Model and optimiser to train with.

    Raises:
        TypeError: ``accelerator`` is none; or as `gradwire.torch.share`.
        ValueError: this accelerator has prepared an optimiser already; or as `gradwire.torch.share`.
    """
    if not hasattr(accelerator, "prepare_optimizer"):
        kind = type(accelerator).__name__
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {kind}")
    if accelerator._optimizers:
        raise ValueError(
            "this accelerator has prepared an optimiser already, and one is shared: give all parameters to one "
            "optimiser, and do not prepare it before"
        )
    model = accelerator.prepare_model(model, evaluation_mode=True)
    shared = share(accelerator.unwrap_model(model), optimizer, density=density, **options)
    prepared = accelerator.prepare_optimizer(shared)

    def save(_models: Any, _weights: Any, folder: str) -> None:
        _save_rank(prepared, os.path.join(folder, _ACCELERATE_FILE), accelerator)

    def load(_models: Any, folder: str) -> None:
        _load_rank(shared, os.path.join(folder, _ACCELERATE_FILE), accelerator)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return model, prepared


def gradwire_trainer(
    trainer: type[Any], *, density: Density | None = None, **options: Unpack[ExchangeOptions]
) -> type[Any]:
    """Return a subclass of a Hugging Face Trainer that shares its optimiser; use it in the place of the Trainer.

    ``gradwire_trainer(Trainer)(model=..., args=...)``, or with a subclass such as TRL's. The model is not wrapped in
    DistributedDataParallel. Evaluations have the parameters that all processes share. ``save_strategy`` and
    ``resume_from_checkpoint`` are as usual: a checkpoint has one file more for each further process,
    ``optimizer.pt.rank1``. For machines without a common file system let every machine save,
    ``TrainingArguments(save_on_each_node=True)``.

    Args:
        trainer: ``transformers.Trainer``, or a class derived from it.
        density: as in `gradwire.torch.share`.
        options: see `ExchangeOptions`.

    Raises:
        TypeError: ``trainer`` is no class.
    """
    if not isinstance(trainer, type):
        raise TypeError(f"trainer must be a class such as transformers.Trainer, got {trainer!r}")

    class GradwireTrainer(trainer):  # type: ignore[misc,valid-type]
        """A trainer whose optimiser is shared."""

        optimizer: Any

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # Without DistributedDataParallel, which would average whole gradients besides.
            self.accelerator.prepare_model = functools.partial(
                self.accelerator.prepare_model, evaluation_mode=True
            )

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            super().create_optimizer(*args, **kwargs)
            if _shared_of(self.optimizer) is None:
                inner = getattr(self.optimizer, "optimizer", self.optimizer)
                self.optimizer = share(self.model, inner, density=density, **options)
            return self.optimizer

        def train(self, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.push(self._end_sharing)
                return super().train(*args, **kwargs)

        def _end_sharing(self, *error: object) -> None:
            shared = _shared_of(self.optimizer)
            if shared is not None:
                shared.__exit__(*error)
                self.optimizer = shared.optimizer  # for another training

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            with _evaluating(_shared_of(self.optimizer)):
                return super().evaluation_loop(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            _catch_up(_shared_of(self.optimizer))
            super()._save_checkpoint(*args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            _save_rank(self.optimizer, os.path.join(output_dir, _TRAINER_FILE), self.accelerator)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            shared = _shared_of(self.optimizer)
            if checkpoint is not None and shared is not None:
                file = os.path.join(checkpoint, _TRAINER_FILE)
                _load_rank(shared, file, self.accelerator)
            super()._load_optimizer_and_scheduler(checkpoint)

    GradwireTrainer.__name__ = f"Gradwire{trainer.__name__}"
    return GradwireTrainer


def _shared_of(optimizer: Any) -> SharedOptimizer | None:
    """Return the shared optimiser in an optimiser that Accelerate has prepared; None if there is none that is open."""
    while optimizer is not None and not isinstance(optimizer, SharedOptimizer):
        optimizer = vars(optimizer).get("optimizer")
    return optimizer


@contextmanager
def _evaluating(optimizer: SharedOptimizer | None) -> Iterator[None]:
    if optimizer is None:
        yield
        return
    optimizer.catch_up()  # joins before the first step
    with optimizer.shared_parameters():
        yield


def _catch_up(optimizer: SharedOptimizer | None) -> None:
    """Take what is still on its way, with ``overlap`` or ``mode="async"``."""
    if optimizer is not None and optimizer.has_joined:
        optimizer.catch_up()


def _save_rank(optimizer: Any, path: str, accelerator: Any) -> None:
    """Save the optimiser's state of every rank but 0, whose state the framework saves, and of no further ranks."""
    rank = accelerator.process_index
    files = RankFiles(path, rank, accelerator.num_processes)
    if rank:
        Path(files.own).parent.mkdir(parents=True, exist_ok=True)
        torch.save(optimizer.state_dict(), files.own)
    files.remove_further()


def _load_rank(optimizer: SharedOptimizer, path: str, accelerator: Any) -> None:
    """Let the framework's next load give the optimiser this rank's state, where it reads rank 0's.

    Raises:
        FileNotFoundError: this rank has no file.
    """
    rank = accelerator.process_index
    if not Path(path).exists():
        return
    files = RankFiles(path, rank, accelerator.num_processes)
    files.check()
    if not rank:
        return

    def replace(_: Any, _state: Mapping[str, Any]) -> Any:
        handle.remove()
        return torch.load(files.own, map_location="cpu", weights_only=True)

    handle = optimizer.register_load_state_dict_pre_hook(replace)
