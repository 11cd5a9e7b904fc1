"""One worker of the demo: a process that trains on its own images and exchanges updates over UDP."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from multiprocessing.connection import Connection

import gradwire as gw
from gradwire.cli.demo.network import Floats
from gradwire.cli.demo.results import Epoch, Outcome
from gradwire.cli.demo.training import Digits, Recipe, Trainer


def work(recipe: Recipe, rank: int, secret: bytes, pipe: Connection) -> None:
    """Train to the end; the entry point of a worker process.

    The parent sends the addresses of the workers before this one and gets this one's address back, then an `Epoch`
    for every epoch and an `Outcome`.
    """
    trainer = Trainer(recipe, rank, Digits.load(recipe.seed))
    params = trainer.network.initial(recipe.seed)
    node = gw.Node(bind="127.0.0.1:0", peers=pipe.recv(), secret=secret)
    with node:
        pipe.send(node.address)
        share = gw.Exchange(
            gw.Encoder(trainer.network.numel, threshold=_policy(recipe)),
            node,
            min_peers=recipe.workers - 1,
            codec="dense" if recipe.dense else "threshold",
        )
        for number in range(1, recipe.epochs + 1):
            losses, results = _train_epoch(trainer, share, params, number)
            accuracy = trainer.test_accuracy(params)
            udp_bytes = node.stats().udp_bytes_sent
            pipe.send(_summarise(number, losses, results, accuracy, udp_bytes))
    stats = node.stats()
    digest = hashlib.sha256(params.tobytes()).hexdigest()
    pipe.send(Outcome(stats.udp_bytes_sent, stats.control_bytes_sent, digest))


def _policy(recipe: Recipe) -> gw.FixedThreshold | gw.AdaptiveThreshold:
    if recipe.threshold is not None:
        return gw.FixedThreshold(recipe.threshold)
    # A threshold near the size of the first updates' largest elements: a far smaller one would send coarse noise first.
    return gw.AdaptiveThreshold(initial=1e-2, density_min=1e-3, density_max=1e-2)


def _train_epoch(
    trainer: Trainer, share: gw.Exchange, params: Floats, number: int
) -> tuple[list[float], list[gw.StepResult]]:
    """Train one epoch, numbered from 1; ``params`` (float32, shape (numel,)) is modified."""
    losses, results = [], []
    first = (number - 1) * trainer.recipe.steps_per_epoch
    for step, batch in enumerate(trainer.batches(), start=first):
        update, loss = trainer.update(params, batch, step)
        result = share.step(update, params)
        if result.lost:
            raise gw.PeerLost(f"worker {result.lost[0].address} went down in step {step}")
        losses.append(loss)
        results.append(result)
    return losses, results


def _summarise(
    number: int,
    losses: Sequence[float],
    results: Sequence[gw.StepResult],
    accuracy: float,
    udp_bytes: int,
) -> Epoch:
    def mean(name: str) -> float:
        return sum(float(getattr(result, name)) for result in results) / len(results)

    return Epoch(
        number=number,
        loss=sum(losses) / len(losses),
        accuracy=accuracy,
        udp_bytes=udp_bytes,
        message_bytes=mean("sent_bytes"),
        density=mean("density"),
        threshold=mean("threshold"),
        encode_s=mean("encode_s"),
        wait_s=mean("wait_s"),
        apply_s=mean("apply_s"),
    )
