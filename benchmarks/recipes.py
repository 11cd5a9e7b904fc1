"""The recipes of bench_frontier.py: how n nodes, all in this process, train one model together.

Every recipe is written from its paper. Bytes are those that the mean node receives: 2 (n - 1) / n times an array where
it is all-reduced, n - 1 messages where messages are gathered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from training.tasks import Batch, Task

import gradwire as gw
from gradwire.agreement import Agreement, sample_of
from gradwire.exchange.options import training_defaults
from gradwire.policy import default_policy, owners_policy

CLIP_NORM, WEIGHT_DECAY, WARMUP_STEPS = 1.0, 0.1, 40
ADAMW_BETAS = (0.9, 0.95)
FLOAT_BYTES, INDEX_BITS, TILE = 4, 12, 64
PIECE_BYTES = 8  # before the messages of one part, in the sharded exchange

Inner = Callable[["Replica"], list[torch.optim.Optimizer]]


class Replica:
    """A copy of the model; its parameters and gradients are views of two flat arrays."""

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, task.model()
        self.views = list(self.model.parameters())
        self.params = torch.cat([view.detach().flatten() for view in self.views])
        self.gradient = torch.zeros_like(self.params)
        for view, params, gradient in zip(
            self.views,
            split(self.params, self.views),
            split(self.gradient, self.views),
            strict=True,
        ):
            view.data, view.grad = params, gradient

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradient of a batch; return it."""
        self.gradient.zero_()
        self.task.loss(self.model, batch).backward()
        return self.gradient

    def clip(self) -> None:
        """Shorten the gradient as `clip_grad_norm_` does."""
        self.gradient.mul_(min(1.0, CLIP_NORM / (float(self.gradient.norm()) + 1e-6)))


def split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat array with the shapes of some tensors."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def adamw(replica: Replica) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, which it takes as one: it treats every element alike."""
    whole = Parameter(replica.params)
    whole.grad = replica.gradient
    return [torch.optim.AdamW([whole], betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY)]


def sgd(replica: Replica) -> list[torch.optim.Optimizer]:
    """Return SGD with momentum for all parameters."""
    whole = Parameter(replica.params)
    whole.grad = replica.gradient
    return [torch.optim.SGD([whole], momentum=0.9)]


def muon(replica: Replica, momentum: float = 0.9) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for everything else, at the same rate."""
    named = dict(replica.model.named_parameters())
    matrices = [view for name, view in named.items() if view.ndim == 2 and "blocks" in name]
    taken = set(map(id, matrices))
    others = [view for view in replica.views if id(view) not in taken]
    options: dict[str, Any] = {"weight_decay": WEIGHT_DECAY}
    first = torch.optim.Muon(matrices, momentum=momentum, nesterov=False, **options)
    return [first, torch.optim.AdamW(others, betas=(0.9, 0.99), **options)]


class Recipe:
    """One way to train; a subclass says what a step exchanges.

    Attributes:
        rates: learning rates to try.
        received: bytes that the mean node has received.
        replicas: of all nodes; a single one where the nodes' parameters never differ.
        shared: float32[numel], the parameters that count.
    """

    rates: tuple[float, ...] = (0.001, 0.002, 0.004)

    def __init__(
        self,
        task: Task,
        nodes: int,
        steps: int,
        rate: float,
        *,
        replicas: int = 1,
        inner: Inner = adamw,
    ) -> None:
        self.nodes, self.steps, self.rate = nodes, steps, rate
        self.received = 0.0
        self.replicas = [Replica(task) for _ in range(replicas)]
        for replica in self.replicas[1:]:
            replica.params.copy_(self.replicas[0].params)
        self.optimizers = [inner(replica) for replica in self.replicas]
        self.shapes = [view.detach() for view in self.replicas[0].views]
        self.numel = self.replicas[0].params.numel()

    @property
    def shared(self) -> Tensor:
        return self.replicas[0].params

    def rate_at(self, number: int) -> float:
        """Return the rate of a step: a linear rise, then half a cosine down to a tenth."""
        fall = 0.1 + 0.45 * (1.0 + math.cos(math.pi * number / self.steps))
        return self.rate * min(1.0, (number + 1) / WARMUP_STEPS) * fall

    def step(self, batches: Sequence[Batch], number: int) -> None:
        """Take one step, with a batch for each node."""
        raise NotImplementedError

    def optimize(self, index: int, number: int, factor: float = 1.0) -> None:
        """Let a replica's optimiser use its gradient; the factor does not multiply weight decay."""
        for optimizer in self.optimizers[index]:
            for group in optimizer.param_groups:
                group["lr"] = self.rate_at(number) * factor
                if factor != 1.0:
                    group["weight_decay"] = WEIGHT_DECAY / factor
            optimizer.step()

    def count_reduced(self, nbytes: float) -> None:
        """Count an all-reduce of an array."""
        self.received += 2 * (self.nodes - 1) / self.nodes * nbytes

    def count_gathered(self, nbytes: float) -> None:
        """Count messages of all nodes, of so many bytes together, to all others."""
        self.received += (self.nodes - 1) / self.nodes * nbytes


# ---- every step ------------------------------------------------------------------------------------------------------


class Dense(Recipe):
    """The mean of whole gradients: DistributedDataParallel."""

    def step(self, batches: Sequence[Batch], number: int) -> None:
        replica = self.replicas[0]
        # Batches of one size: the gradient of all is the mean of the nodes' gradients.
        replica.backward(tuple(map(torch.cat, zip(*batches, strict=True))))
        replica.clip()
        self.optimize(0, number)
        self.count_reduced(FLOAT_BYTES * self.numel)


class PowerSGD(Recipe):
    """PyTorch's hook: products of two narrow matrices, with the error fed back.

    T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD", NeurIPS 2019. As in the hook, a node keeps the difference
    between its own gradient and the mean that all got.
    """

    START = 2  # whole gradients before: the fewest that the hook accepts
    LEAST_COMPRESSION = 2

    def __init__(self, *where: Any, rank: int, **options: Any) -> None:
        super().__init__(*where, **options)
        self.rank = rank
        self.errors = torch.zeros(self.nodes, self.numel)
        self.factors: dict[int, Tensor] = {}  # Q of a tensor, kept between steps
        self.generator = torch.Generator().manual_seed(0)

    def step(self, batches: Sequence[Batch], number: int) -> None:
        replica = self.replicas[0]
        gradients = torch.stack([replica.backward(batch).clone() for batch in batches])
        replica.gradient.copy_(self.reduced(gradients, number))
        replica.clip()
        self.optimize(0, number)

    def reduced(self, gradients: Tensor, number: int) -> Tensor:
        """Return what the nodes take for the mean of float32[nodes, numel]."""
        if number < self.START:
            self.count_reduced(FLOAT_BYTES * self.numel)
            return gradients.mean(0)
        inputs = gradients + self.errors
        mean = inputs.mean(0)  # of tensors that go whole, and in the place of all-reduces
        for index, tensor in enumerate(split(mean, self.shapes)):
            matrix = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
            rows, columns = matrix.shape
            rank = min(self.rank, rows, columns)
            if (rows + columns) * rank * self.LEAST_COMPRESSION >= rows * columns:
                self.count_reduced(FLOAT_BYTES * tensor.numel())
                continue
            fresh = partial(torch.randn, columns, rank, generator=self.generator)
            right = self.factors.get(index)
            left = matrix @ torch.linalg.qr(fresh() if right is None else right).Q
            # The all-reduce of P, which is linear, as is the following one of Q.
            left = torch.linalg.qr(left).Q
            self.factors[index] = right = matrix.T @ left
            self.count_reduced(FLOAT_BYTES * rank * (rows + columns))
            matrix.copy_(left @ right.T)
        self.errors = inputs - mean
        return mean


class DeMo(Recipe):
    """The largest cosine coefficients of a momentum that keeps the rest; a step has the sign of their mean.

    B. Peng, J. Quesnelle, D. P. Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
    """

    rates = (0.0005, 0.001, 0.002)
    DECAY, KEPT, BITS = 0.999, 32, 16

    def __init__(self, *where: Any, kept: int = KEPT, **options: Any) -> None:
        super().__init__(*where, **options)
        self.momenta = torch.zeros(self.nodes, self.numel)
        self.tiles = tiles_of(self.shapes)
        self.kept = kept

    def step(self, batches: Sequence[Batch], number: int) -> None:
        replica, rate = self.replicas[0], self.rate_at(number)
        for momentum, batch in zip(self.momenta, batches, strict=True):
            replica.backward(batch)
            replica.clip()
            momentum.mul_(self.DECAY).add_(replica.gradient, alpha=rate)
        update = torch.zeros(self.numel)
        for tiles, (rows, columns) in self.tiles:
            down, across = cosines(rows), cosines(columns)
            blocks = self.momenta[:, tiles].unflatten(-1, (rows, columns))
            coefficients = (down @ blocks @ across.T).flatten(-2)
            places = coefficients.abs().topk(min(self.kept, rows * columns)).indices
            sent = torch.zeros_like(coefficients).scatter(
                -1, places, coefficients.gather(-1, places)
            )
            back = down.T @ sent.unflatten(-1, (rows, columns)) @ across
            self.momenta[:, tiles] -= back.flatten(-2)
            mean = mean_of_senders(sent).unflatten(-1, (rows, columns))
            update[tiles] = (down.T @ mean @ across).flatten(-2).sign()
            self.count_gathered(places.numel() * (INDEX_BITS + self.BITS) / 8)
        replica.params.mul_(1.0 - rate * WEIGHT_DECAY).sub_(update, alpha=rate)


# ---- local steps -----------------------------------------------------------------------------------------------------


class LocalSteps(Recipe):
    """Every node trains alone for ``every`` steps; then all share how far they have moved."""

    def __init__(self, task: Task, nodes: int, *where: Any, every: int, **options: Any) -> None:
        super().__init__(task, nodes, *where, replicas=nodes, **options)
        self.every = every
        self._shared = self.replicas[0].params.clone()

    @property
    def shared(self) -> Tensor:
        return self._shared

    @property
    def movements(self) -> Tensor:
        """What the nodes would descend, against the shared parameters: float32[nodes, numel]."""
        return self._shared - torch.stack([replica.params for replica in self.replicas])

    def step(self, batches: Sequence[Batch], number: int) -> None:
        for index, (replica, batch) in enumerate(zip(self.replicas, batches, strict=True)):
            replica.backward(batch)
            replica.clip()
            self.optimize(index, number)
        if (number + 1) % self.every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Change the shared parameters, and let all nodes go on from them."""
        raise NotImplementedError

    def restart(self) -> None:
        """Let all nodes go on from the shared parameters."""
        for replica in self.replicas:
            replica.params.copy_(self._shared)


class DiLoCo(LocalSteps):
    """Whole movements, and Nesterov's momentum of the shared parameters.

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    def __init__(
        self, *where: Any, outer_rate: float = 0.7, outer_momentum: float = 0.9, **options: Any
    ) -> None:
        super().__init__(*where, **options)
        self.outer_rate, self.outer_momentum = outer_rate, outer_momentum
        self.velocity = torch.zeros(self.numel)

    def exchange(self) -> None:
        self.count_reduced(FLOAT_BYTES * self.numel)
        self.descend(self.movements.mean(0), slice(None))
        self.restart()

    def descend(self, movement: Tensor, places: Any) -> None:
        """Move the shared parameters at some places, as SGD with Nesterov's momentum does."""
        velocity = self.velocity[places].mul(self.outer_momentum).add(movement)
        self.velocity[places] = velocity
        self._shared[places] -= self.outer_rate * (movement + self.outer_momentum * velocity)


class StreamingDiLoCo(DiLoCo):
    """One part of the layers after the other, in four bits, mixed into the parameters a step later.

    A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
    """

    MIXED, BITS = 0.5, 4

    def __init__(self, *where: Any, fragments: int = 3, **options: Any) -> None:
        super().__init__(*where, **{"outer_rate": 0.4, **options})
        names = [name for name, _ in self.replicas[0].model.named_parameters()]
        numbers = torch.arange(self.numel)
        # Blocks in turn; what stands before and after them is a fragment of its own.
        of_name = [
            int(name.split(".")[1]) % (fragments - 1)
            if name.startswith("blocks")
            else fragments - 1
            for name in names
        ]
        self.fragments = [
            torch.cat(
                [
                    part.flatten()
                    for part, number in zip(split(numbers, self.shapes), of_name, strict=True)
                    if number == fragment
                ]
            )
            for fragment in range(fragments)
        ]
        self.travelling: tuple[Tensor, Tensor] | None = None

    def step(self, batches: Sequence[Batch], number: int) -> None:
        super().step(batches, number)
        if self.travelling is not None:
            places, movement = self.travelling
            self.descend(movement, places)
            for replica in self.replicas:
                replica.params[places] += self.MIXED * (self._shared - replica.params)[places]
            self.travelling = None
        for fragment, places in enumerate(self.fragments):
            offset = self.every * (fragment + 1) // len(self.fragments)
            if (number + 1) % self.every == offset % self.every:
                self.travelling = places, exponents_of(self.movements[:, places]).mean(0)
                self.count_reduced(self.BITS / 8 * len(places))

    def exchange(self) -> None:
        """Do nothing: fragments travel at their own steps."""


class SparseLoCo(LocalSteps):
    """The largest 3 % of every tile in two bits, with the rest fed back.

    A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. The paper divides by the
    number of nodes, its code by the number of those that sent an element.
    """

    DECAY, KEPT, BITS = 0.95, 128 / TILE**2, 2

    def __init__(
        self, *where: Any, over_senders: bool, kept: float = KEPT, bits: int = BITS, **options: Any
    ) -> None:
        super().__init__(*where, **options)
        self.over_senders, self.kept, self.bits = over_senders, kept, bits
        self.errors = torch.zeros(self.nodes, self.numel)
        self.tiles = tiles_of(self.shapes)

    def exchange(self) -> None:
        self.errors.mul_(self.DECAY).add_(self.movements)
        for tiles, (rows, columns) in self.tiles:
            values = self.errors[:, tiles]
            count = max(1, round(rows * columns * self.kept))
            places = values.abs().topk(count).indices
            chosen = values.gather(-1, places)
            if self.bits < 32:
                chosen = torch.stack([quantized(own, self.bits) for own in chosen])
            self.count_gathered(places.numel() * (INDEX_BITS + self.bits) / 8)
            self.count_gathered(self.nodes * FLOAT_BYTES * (1 + 2**self.BITS) * (self.bits < 32))
            sent = torch.zeros_like(values).scatter(-1, places, chosen)
            self.errors[:, tiles] -= sent
            is_sent = torch.zeros_like(values).scatter(-1, places, 1.0)
            count_of = is_sent.sum(0).clamp(min=1.0) if self.over_senders else self.nodes
            self._shared[tiles] -= sent.sum(0) / count_of
        self.restart()


class MuLoCo(DiLoCo):
    """DiLoCo with Muon inside, and two bits with the rest fed back: from the nodes to the owners, and back.

    B. Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025.
    """

    rates = (0.005, 0.01, 0.02)
    DECAY, BITS = 0.9, 2

    def __init__(self, *where: Any, **options: Any) -> None:
        outer = {"outer_rate": 0.9, "outer_momentum": 0.8}
        super().__init__(*where, **{"inner": muon, **outer, **options})
        self.errors = torch.zeros(self.nodes, self.numel)

    def exchange(self) -> None:
        self.errors.mul_(self.DECAY).add_(self.movements)
        sent = torch.stack([self.rounded(error) for error in self.errors])
        self.errors -= sent
        self.count_reduced(self.BITS / 8 * self.numel)
        self.descend(self.rounded(sent.mean(0)), slice(None))
        self.restart()

    def rounded(self, flat: Tensor) -> Tensor:
        """Return what two bits tell of every tensor; biases and norms go whole, as in the authors' code."""
        pieces = split(flat, self.shapes)
        return torch.cat(
            [
                (quantized(piece, self.BITS) if piece.ndim > 1 else piece).flatten()
                for piece in pieces
            ]
        )


# ---- gradwire --------------------------------------------------------------------------------------------------------


class Gradwire(LocalSteps):
    """What ``gradwire.torch.share`` does, with its codec: the residual applied locally, and a factor by agreement.

    Args:
        every: steps between exchanges.
        owners: of the sharded exchange; 0: the mesh.
        density, outer_momentum: None: the defaults of ``share``.
    """

    def __init__(
        self,
        *where: Any,
        every: int = 1,
        owners: int = 0,
        density: float | None = None,
        outer_momentum: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*where, every=every, **options)
        inner = options.get("inner", adamw)
        is_adaptive = inner is not sgd
        policy = default_policy(self.numel, is_adaptive=is_adaptive, every=every)
        policy = policy if density is None else gw.TargetDensity(density)
        self.partition = gw.Partition(self.numel, owners) if owners else None
        self.encoders = [gw.Encoder(self.numel, policy) for _ in range(self.nodes)]
        sizes = self.partition.sizes if self.partition else ()
        self.owners = [gw.Encoder(n, owners_policy(policy, sizes, every=every)) for n in sizes]
        self.begins = [self._shared.clone() for _ in range(self.nodes)]
        if outer_momentum is None:
            outer_momentum = training_defaults({"every": every})["outer_momentum"]
        self.outer_momentum, self.velocity = outer_momentum, torch.zeros(self.numel)
        self.agreement = Agreement(repeats=every == 1)
        self.sketchers = [Agreement(repeats=every == 1) for _ in range(self.nodes)]
        if is_adaptive:
            self.rate *= 1.0 - outer_momentum
            for own in (self.agreement, *self.sketchers):
                own.start(ADAMW_BETAS[0] if inner is adamw else 0.0)

    def optimize(self, index: int, number: int, factor: float = 1.0) -> None:
        self.number = number
        super().optimize(index, number, factor * self.agreement.factor)

    def exchange(self) -> None:
        updates = [
            (replica.params - begin).numpy()
            for replica, begin in zip(self.replicas, self.begins, strict=True)
        ]
        if self.agreement.is_on:
            self.measure(updates)
        decoded = torch.zeros(self.numel)
        self.gather(updates, decoded.numpy())
        if self.outer_momentum:
            self.velocity.add_(decoded).mul_(self.outer_momentum)
            decoded += self.velocity
        self._shared += decoded
        for replica, begin, encoder in zip(self.replicas, self.begins, self.encoders, strict=True):
            torch.add(self._shared, torch.from_numpy(encoder.residual), out=begin)
            replica.params.copy_(begin)

    def gather(self, updates: list[Any], decoded: Any) -> None:
        """Encode all updates, and add the mean of their messages to ``decoded``."""
        if self.partition is None:
            messages = [
                own.encode(update) for own, update in zip(self.encoders, updates, strict=True)
            ]
            gw.apply_many(messages, decoded, 1.0 / self.nodes)
            self.count_gathered(sum(message.nbytes for message in messages))
            return
        parts = [
            own.encode(update, parts=self.partition)
            for own, update in zip(self.encoders, updates, strict=True)
        ]
        self.received += (
            self.others_share(part.nbytes for own in parts for part in own) / self.nodes
        )
        for index, owner in enumerate(self.owners):
            gw.apply_many([own[index] for own in parts], owner.residual, 1.0 / self.nodes)
            result = owner.encode()
            gw.apply(result, decoded, part=self.partition[index])
            self.received += self.others_share([result.nbytes])

    def others_share(self, sizes: Iterator[int] | Sequence[int]) -> float:
        """Return the bytes of messages that do not stay at the node that makes them."""
        return (self.nodes - 1) / self.nodes * sum(size + PIECE_BYTES for size in sizes)

    def measure(self, updates: list[Any]) -> None:
        """Let sketches travel, as the notes of steps have them."""
        sketches, exchange = [], self.number // self.every
        for own, update in zip(self.sketchers, updates, strict=True):
            own.measure(exchange, [sample_of(split(torch.from_numpy(update), self.shapes))])
            measured = own.take_own()
            if measured is not None and measured.sketch is not None:
                sketches.append(measured.sketch)
        self.agreement.add(sketches)
        self.count_gathered(sum(len(json.dumps(sketch.encode())) for sketch in sketches))


class GradwireMuon(Gradwire):
    """The same with Muon."""

    rates = MuLoCo.rates

    def __init__(self, *where: Any, **options: Any) -> None:
        super().__init__(*where, inner=muon, **options)


# ---- tiles and quantisation ------------------------------------------------------------------------------------------


def tiles_of(shapes: Sequence[Tensor]) -> list[tuple[Tensor, tuple[int, int]]]:
    """Return for every tensor int64[tiles, elements], where the elements of a tile are, and rows and columns of a tile.

    The sides are the largest divisors of at most 64; a tensor of one dimension is cut into pieces.
    """
    numbers = torch.arange(sum(tensor.numel() for tensor in shapes))
    listed = []
    for part in split(numbers, shapes):
        matrix = part.flatten(1) if part.ndim > 1 else part[None]
        rows, columns = (
            max(d for d in range(1, TILE + 1) if side % d == 0) for side in matrix.shape
        )
        tiles = matrix.unfold(0, rows, rows).unfold(1, columns, columns)
        listed.append((tiles.reshape(-1, rows * columns), (rows, columns)))
    return listed


def cosines(size: int) -> Tensor:
    """Return the orthonormal matrix of the cosine transform (DCT-II)."""
    places = torch.arange(size)
    matrix = torch.cos(math.pi / size * (places + 0.5) * places[:, None]) * math.sqrt(2.0 / size)
    matrix[0] /= math.sqrt(2.0)
    return matrix


def mean_of_senders(sent: Tensor) -> Tensor:
    """Return the mean over the nodes whose value is not 0; 0 where none is."""
    return sent.sum(0) / (sent != 0).sum(0).clamp(min=1)


def quantized(values: Tensor, bits: int) -> Tensor:
    """Return values rounded to the means of 2^bits bins, over six standard deviations around their mean."""
    levels, mean = 2**bits, values.mean()
    centred = values - mean
    width = 6.0 * centred.std(correction=0) / levels
    if not width > 0.0:
        return values.clone()
    bins = (centred / width + levels / 2).round().clamp(0, levels - 1).long().flatten()
    sums = torch.zeros(levels).index_add(0, bins, centred.flatten())
    means = sums / bins.bincount(minlength=levels).clamp(min=1)
    return means[bins].view_as(values) + mean


def exponents_of(values: Tensor) -> Tensor:
    """Return values rounded to a sign and a power of two (E3M0), below the largest of each row."""
    largest = values.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    exponents = torch.floor(torch.log2(values.abs() / largest / 0.75)).clamp(max=0.0)
    return torch.where(exponents < -6, 0.0, values.sign() * largest * torch.exp2(exponents))
