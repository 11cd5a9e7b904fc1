"""What a run of the demo measured, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.cli.demo.training import Recipe

LAST_EPOCHS = 5


@dataclass(frozen=True)
class Epoch:
    """One epoch, of one worker or of all; what is not a sum of bytes is a mean.

    Attributes:
        number: from 1.
        loss: cross-entropy of the training batches.
        accuracy: on the held-out half, 0 to 1.
        udp_bytes: UDP payload bytes sent since the start of the run, of every kind; all workers together.
        message_bytes: size of one message.
        density: share of the elements that one message changes.
        threshold: quantum of the changes; 0.0 for dense messages.
        encode_s: seconds per step to encode.
        wait_s: seconds per step until everybody's message was there.
        apply_s: seconds per step to add them to the parameters.
    """

    number: int
    loss: float
    accuracy: float
    udp_bytes: int
    message_bytes: float
    density: float
    threshold: float
    encode_s: float
    wait_s: float
    apply_s: float


@dataclass(frozen=True)
class Outcome:
    """How one worker ended.

    Attributes:
        udp_bytes: UDP payload bytes the worker has sent in all, the farewell included.
        control_bytes: the part of them that is acknowledgements, keys and other control.
        digest: of the bits of the final parameters.
    """

    udp_bytes: int
    control_bytes: int
    digest: str


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        recipe: what was trained.
        numel: parameters of the network.
        epochs: all of them, in order.
        outcomes: of all workers.
        seconds: wall time of the training; starting the processes is not included.
    """

    recipe: Recipe
    numel: int
    epochs: tuple[Epoch, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Mean test accuracy of the last 5 epochs, 0 to 1."""
        return _mean([epoch.accuracy for epoch in self.epochs[-LAST_EPOCHS:]])

    @property
    def udp_bytes(self) -> int:
        """UDP payload bytes sent by all workers, acknowledgements included."""
        return sum(outcome.udp_bytes for outcome in self.outcomes)

    @property
    def control_bytes(self) -> int:
        """The part of ``udp_bytes`` that is acknowledgements, keys and other control."""
        return sum(outcome.control_bytes for outcome in self.outcomes)

    @property
    def worker_steps(self) -> int:
        """Steps of all workers together."""
        return self.recipe.workers * self.recipe.steps

    @property
    def is_identical(self) -> bool:
        """Whether all workers ended with the same bits."""
        return len({outcome.digest for outcome in self.outcomes}) == 1

    def mean(self, name: str) -> float:
        """Return the mean over the epochs of one field of `Epoch`."""
        return _mean([float(getattr(epoch, name)) for epoch in self.epochs])


def merge(reports: Sequence[Epoch]) -> Epoch:
    """Join all workers' reports on one epoch."""

    def mean(name: str) -> float:
        return _mean([float(getattr(report, name)) for report in reports])

    return Epoch(
        number=reports[0].number,
        loss=mean("loss"),
        accuracy=mean("accuracy"),
        udp_bytes=sum(report.udp_bytes for report in reports),
        message_bytes=mean("message_bytes"),
        density=mean("density"),
        threshold=mean("threshold"),
        encode_s=mean("encode_s"),
        wait_s=mean("wait_s"),
        apply_s=mean("apply_s"),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
