"""JAX arrays in host memory are taken as they are, through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradwire as gw

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
pytestmark = pytest.mark.jax


def update() -> Any:
    return jax.random.normal(jax.random.key(51), (1_000,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_array_encodes_as_its_values_do_in_numpy(dtype: str) -> None:
    array = update().astype(dtype)
    ours, theirs = gw.Encoder(1_000, 0.5), gw.Encoder(1_000, 0.5)
    assert bytes(ours.encode(array)) == bytes(theirs.encode(np.asarray(array.astype("float32"))))
    assert ours.residual.tobytes() == theirs.residual.tobytes()


def test_it_is_read_where_it_lies() -> None:
    # JAX takes the residual's memory as its own array, without a copy. Only an encoder that does not copy either can
    # find out that the update is its residual.
    encoder = gw.Encoder(1_000, 0.5)
    array = jax.numpy.from_dlpack(encoder.residual, copy=False)
    assert array.unsafe_buffer_pointer() == encoder.residual.ctypes.data
    with pytest.raises(ValueError, match="overlap"):
        encoder.encode(array)


def test_the_leaves_of_a_tree_are_one_update() -> None:
    tree = {"bias": update()[:10], "weights": update()[10:].reshape(90, 11)}
    leaves = jax.tree.leaves(tree)
    ours, theirs = gw.Encoder(1_000, 0.5), gw.Encoder(1_000, 0.5)
    assert bytes(ours.encode(leaves)) == bytes(theirs.encode(np.asarray(update())))


def test_an_array_is_never_changed_because_jax_relies_on_it() -> None:
    message = gw.Encoder(1_000, 0.5).encode(update())
    target = jax.numpy.zeros(1_000)
    with pytest.raises(ValueError, match="read-only"):
        gw.apply(message, target)
    assert not target.any()


def test_traced_arrays_are_refused() -> None:
    encoder = gw.Encoder(4, 0.5)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        jax.jit(lambda array: encoder.encode(array).nbytes)(jax.numpy.ones(4))
    assert not encoder.residual.any()


def test_an_exchange_takes_half_precision_for_a_policy_that_looks_at_the_first_update() -> None:
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        share = gw.Exchange(gw.Encoder(1_000, gw.TargetDensity(0.1)), node, min_peers=0)
        share.step(update().astype("bfloat16"), np.zeros(1_000, np.float32))
