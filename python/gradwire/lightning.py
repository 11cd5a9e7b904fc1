"""Lightning: ``Trainer(strategy="gradwire")`` trains with shared updates where "ddp" averages whole gradients."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import rendezvous
from .torch import SharedOptimizer, share
from .torch.rank_files import RankFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .exchange import ExchangeOptions
    from .sharing import Density

__all__ = ["GradwireStrategy"]


def _lightning() -> str:
    """Return the package of Lightning that this process uses: there are two with the same contents."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    loaded = [name for name in names if name in sys.modules]
    for name in loaded or names:
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        "gradwire.lightning needs Lightning: pip install lightning", name="lightning"
    )


_PACKAGE = _lightning()
DDPStrategy: Any = importlib.import_module(f"{_PACKAGE}.strategies").DDPStrategy
StochasticWeightAveraging: Any = importlib.import_module(
    f"{_PACKAGE}.callbacks"
).StochasticWeightAveraging


class GradwireStrategy(DDPStrategy):
    """Shares the optimiser that ``configure_optimizers`` returns; everything else is as with Lightning's "ddp".

    Lightning starts the processes, or torchrun, SLURM or ``gradwire run`` do; it divides the data, and reduces metrics
    and decisions over a process group of gloo, which no gradient uses. The optimiser is any except L-BFGS. Validation
    and callbacks that average weights have the parameters that all processes share. A checkpoint has one file more for
    each further process, with that process's residual: ``last.ckpt`` and ``last.ckpt.rank1``. Where machines do not
    share a file system, each has the checkpoint and its own processes' files. Import this module, then
    ``Trainer(strategy="gradwire")``; or pass an object with options.

    Args:
        density, update_scale: as in `gradwire.torch.share`.
        strategy: arguments of Lightning's ``DDPStrategy``, such as ``timeout``, by name.
        options: see `ExchangeOptions`.
    """

    strategy_name = "gradwire"

    def __init__(
        self,
        *,
        density: Density | None = None,
        update_scale: float | Literal["auto"] = "auto",
        strategy: Mapping[str, Any] | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        super().__init__(**{"process_group_backend": "gloo", **(strategy or {})})
        self._share_options: dict[str, Any] = {
            "density": density,
            "update_scale": update_scale,
            **options,
        }
        self._failure: tuple[object, ...] = ()
        self._is_evaluating = False
        self._evaluation = ExitStack()
        self._averages = ExitStack()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "gradwire" with Lightning."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Processes that Lightning starts on this machine inherit the secret.
        if (
            not self.cluster_environment.creates_processes_externally
            and self.num_nodes == 1
            and not rendezvous.has_secret()
        ):
            os.environ["GRADWIRE_SECRET"] = secrets.token_hex(32)
        super()._configure_launcher()

    @contextmanager
    def _as_launched(self) -> Iterator[None]:
        """Let the environment say what Lightning knows, where Lightning has started the processes."""
        added = {}
        if self.world_size > 1 and _launched().rank is None:
            added = {
                "RANK": str(self.global_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.num_processes),
                "MASTER_ADDR": self.cluster_environment.main_address,
                "MASTER_PORT": str(self.cluster_environment.main_port),
            }
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _check_place(self) -> None:
        place = _launched()
        if place.rank is not None and (place.rank, place.size) != (
            self.global_rank,
            self.world_size,
        ):
            machines = place.machines or -(-(place.size or 1) // place.local_size)
            raise ValueError(
                f"{place.launcher} says that this is rank {place.rank} of {place.size}, the Trainer that it is rank "
                f"{self.global_rank} of {self.world_size}: give Trainer(devices={place.local_size}, "
                f"num_nodes={machines})"
            )

    # ---- model and optimiser -----------------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Leave the model as it is: no gradient is averaged."""

    def _setup_model(self, model: Any) -> Any:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Share the optimiser that the module has configured.

        Raises:
            ValueError: the module has configured several optimisers, or none; or the trainer has other ranks than the
                launcher.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers() returned {len(self.optimizers)} optimisers, and one is shared: give all "
                "parameters to one optimiser, with a parameter group for each"
            )
        self._failure = ()
        [optimizer] = self.optimizers
        if not isinstance(optimizer, SharedOptimizer):
            self._share(optimizer)

    def _share(self, optimizer: Any) -> None:
        with self._as_launched():
            self._check_place()
            # Schedules keep the module's own optimiser, whose parameter groups are the shared optimiser's.
            self.optimizers = [share(self.lightning_module, optimizer, **self._share_options)]

    def _shared_optimizers(self) -> list[SharedOptimizer]:
        return [each for each in self.optimizers if isinstance(each, SharedOptimizer)]

    def on_train_start(self) -> None:
        """Let callbacks that average weights, as SWA and EMA do, average the parameters that all processes share."""
        from torch.optim.swa_utils import AveragedModel

        super().on_train_start()
        self._averages.close()  # LearningRateFinder starts the training twice
        averages = {
            each
            for callback in self.lightning_module.trainer.callbacks
            for each in (callback, *vars(callback).values())
            if isinstance(each, (StochasticWeightAveraging, AveragedModel))
        }
        for average in averages:
            average.update_parameters = self._with_shared(average.update_parameters)
            self._averages.callback(delattr, average, "update_parameters")
        if averages:
            # SWA may take the parameters before the first step. They are those of rank 0 from here on.
            for optimizer in self._shared_optimizers():
                if not optimizer.has_joined:
                    optimizer.join()

    def _with_shared(self, update: Callable[..., None]) -> Callable[..., None]:
        # Lightning calls no hook of the strategy around those of callbacks that update averages.
        @functools.wraps(update)
        def update_from_shared(*args: Any, **kwargs: Any) -> None:
            with ExitStack() as stack:
                for optimizer in self._shared_optimizers():
                    stack.enter_context(optimizer.shared_parameters())
                update(*args, **kwargs)

        return update_from_shared

    def _catch_up(self) -> None:
        """Take what is still on its way, with ``overlap`` or ``mode="async"``."""
        for optimizer in self._shared_optimizers():
            if optimizer.has_joined:
                optimizer.catch_up()

    def on_validation_start(self) -> None:
        """Evaluate the parameters that all processes share, also before the first step."""
        super().on_validation_start()
        for optimizer in self._shared_optimizers():
            optimizer.catch_up()  # joins
        self._is_evaluating = True
        for optimizer in self._shared_optimizers():
            self._evaluation.enter_context(optimizer.shared_parameters())

    def on_validation_end(self) -> None:
        """Go on with this process's own parameters."""
        self._is_evaluating = False
        self._evaluation.close()
        super().on_validation_end()

    def on_exception(self, exception: BaseException) -> None:
        """Let the other processes know that this one has failed."""
        self._failure = type(exception), exception
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the training: the model is a plain one, with the parameters that all share."""
        self._averages.close()
        self._is_evaluating = False  # an error may have ended a validation
        self._evaluation.close()
        for optimizer in self._shared_optimizers():
            optimizer.__exit__(*self._failure)
        super().teardown()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state for a checkpoint, of which the optimiser's state is taken next."""
        if not self._is_evaluating:
            self._catch_up()
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the checkpoint once for each file system, and beside it the optimiser's state of every other rank."""
        filepath = self._as_first(filepath)
        files = RankFiles(filepath, self.global_rank, self.world_size)
        if files.is_writer(self.local_rank, self.barrier, self.broadcast):
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )
            files.remove_further()
        if self.global_rank and "optimizer_states" in checkpoint:
            own = {"optimizer_states": checkpoint["optimizer_states"]}
            self.checkpoint_io.save_checkpoint(own, files.own, storage_options=storage_options)

    def _as_first(self, filepath: Any) -> str:
        """Return a checkpoint's path with the name that rank 0 gives it: a metric in it may be this rank's own."""
        folder, name = os.path.split(os.fspath(filepath))
        return os.path.join(folder, self.broadcast(name))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, where a training goes on with this rank's state of the optimiser.

        Raises:
            FileNotFoundError: this rank has no file.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        state = self.lightning_module.trainer.state.fn
        is_training = state is not None and state.value == "fit"
        if not is_training or "optimizer_states" not in checkpoint:
            return checkpoint
        # ModelCheckpoint(save_last="link") makes a link to the checkpoint alone.
        is_link = os.path.islink(checkpoint_path)
        path = os.path.realpath(checkpoint_path) if is_link else checkpoint_path
        files = RankFiles(path, self.global_rank, self.world_size)
        files.check()
        if self.global_rank:
            own = self.checkpoint_io.load_checkpoint(files.own, *args, **kwargs)
            checkpoint["optimizer_states"] = own["optimizer_states"]
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove all of a checkpoint's files, each once."""
        filepath = self._as_first(filepath)
        files = RankFiles(filepath, self.global_rank, self.world_size)
        if self.is_global_zero or (self.local_rank == 0 and Path(filepath).exists()):
            # Machines with one file system remove it at the same time.
            with suppress(FileNotFoundError):
                self.checkpoint_io.remove_checkpoint(filepath)
            files.remove_further()
        if self.global_rank:
            self.checkpoint_io.remove_checkpoint(files.own)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimiser's state; in the middle of training, as the search for a learning rate does, begin anew."""
        for optimizer in self._shared_optimizers():
            if optimizer.has_joined:
                optimizer.close()
                self._share(optimizer.optimizer)
            # A callback for fine-tuning has restored the groups, and frozen the layers that were trained already when
            # the checkpoint was saved.
            known = set(optimizer.shared_params())
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param not in known:
                        param.requires_grad_(True)
        super().load_optimizer_state_dict(checkpoint)


GradwireStrategy.register_strategies(
    importlib.import_module(f"{_PACKAGE}.strategies").StrategyRegistry
)


def _launched() -> rendezvous.Placement:
    """Return what a launcher says. Lightning sets WORLD_SIZE without RANK, and deletes WORLD_SIZE after a run."""
    variables = dict(os.environ)
    if not {"RANK", "WORLD_SIZE"} <= variables.keys():
        variables.pop("RANK", None)
        variables.pop("WORLD_SIZE", None)
    return rendezvous.placement(variables)
