"""What a shared optax transformation refuses changes nothing: the next update is what it would have been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
optax: Any = pytest.importorskip("optax", reason="optax is not installed")

import gradwire as gw  # noqa: E402
import gradwire.jax  # noqa: E402
from gradwire.sharing import Training  # noqa: E402

pytestmark = pytest.mark.jax


def test_what_cannot_be_shared_is_refused_and_the_next_update_is_what_it_would_have_been() -> None:
    def train(*, errs: bool) -> Any:
        params = {"weights": jax.numpy.ones((3, 2)), "bias": jax.numpy.zeros(2)}
        gradients = jax.tree.map(jax.numpy.ones_like, params)
        with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
            optimizer = gradwire.jax.share(optax.adam(0.1), node=node, min_peers=0)
            state = optimizer.init(params)
            for _ in range(3):
                if errs:
                    for wrong in (None, "state", {}, 1):
                        with pytest.raises(TypeError, match="state must be that of init"):
                            optimizer.update(gradients, wrong, params)
                    for value in (np.nan, np.inf):
                        far = jax.tree.map(lambda leaf: leaf + value, params)  # noqa: B023
                        with pytest.raises(gw.NonFiniteUpdate, match="8 elements of the param"):
                            optimizer.update(gradients, state, far)
                        bad = jax.tree.map(lambda leaf: leaf + value, gradients)  # noqa: B023
                        with pytest.raises(gw.NonFiniteUpdate, match="elements of the update"):
                            optimizer.update(bad, state, gradients)  # ones, not the parameters
                updates, state = optimizer.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
            optimizer.close()
        return params

    plain, after_errors = train(errs=False), train(errs=True)
    jax.tree.map(np.testing.assert_array_equal, plain, after_errors)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    params = [jax.numpy.ones(3), jax.numpy.zeros(())]
    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        optimizer = gradwire.jax.share(optax.sgd(0.1), node=node, min_peers=0)
        optimizer.init(params)
        state = optimizer.state_dict()
        state["exchange"]["encoders"][0]["residual"][:] = 1.0
        before = repr(optimizer.state_dict())
        for name in ("params", "returned"):
            for value in ("1", {}, 10**30, (np.zeros(2, np.uint8), np.zeros(0), np.zeros(0))):
                damaged = {**state, name: [state[name][0], value]}
                with pytest.raises(
                    ValueError,
                    match=r"array 1 of the state is of .*, must be of|"
                    "cannot be read, and nothing was loaded",
                ):
                    optimizer.load_state_dict(damaged)
                assert repr(optimizer.state_dict()) == before
        optimizer.close()


def test_a_state_of_parameters_with_other_names_is_refused() -> None:
    """Trees are in the order of their names: a renamed layer may change places with another of its shape."""
    before = {"decoder": jax.numpy.ones(3), "encoder": jax.numpy.zeros(3)}
    after = {"encoder": before["encoder"], "reader": before["decoder"]}
    with gradwire.jax.share(optax.sgd(0.1)) as optimizer:
        optimizer.init(before)
        saved = optimizer.state_dict()
    with gradwire.jax.share(optax.sgd(0.1)) as optimizer:
        optimizer.init(after)
        with pytest.raises(ValueError, match=r"\('decoder', 'encoder'\), \('encoder', 'reader'\)"):
            optimizer.load_state_dict(saved)
        names = optimizer.state_dict()["names"]
        given = optimizer.load_state_dict({**saved, "names": names})
    np.testing.assert_array_equal(given["encoder"], before["decoder"])


@pytest.mark.parametrize("options", [{}, {"every": 4}, {"overlap": 1}, {"codec": "dense"}], ids=str)
def test_a_step_that_is_not_finite_may_be_left_out(options: Any) -> None:
    """Its finite part is not taken either: the caller goes on with the parameters and the state that it had."""

    def train(*, errs: bool) -> Any:
        params = {"weights": jax.numpy.ones((30, 2)), "bias": jax.numpy.zeros(2)}
        gradients = jax.tree.map(jax.numpy.ones_like, params)
        with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
            optimizer = gradwire.jax.share(optax.adam(0.1), node=node, min_peers=0, **options)
            state = optimizer.init(params)
            for step in range(8):
                if errs and step in (0, 3, 6):
                    wrong = {**gradients, "bias": jax.numpy.full(2, np.nan)}
                    with pytest.raises(gw.NonFiniteUpdate, match="2 elements of the update"):
                        optimizer.update(wrong, state, params)
                updates, state = optimizer.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
            optimizer.close()
        return params, optimizer.shared()

    jax.tree.map(np.testing.assert_array_equal, train(errs=False), train(errs=True))


def test_a_close_that_is_interrupted_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    close, ended = Training.close, []

    def note(training: Training, *, has_failed: bool = False) -> None:
        ended.append(True)
        close(training, has_failed=has_failed)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with gw.Node("127.0.0.1:0", secret=bytes(range(32))) as node:
        optimizer = gradwire.jax.share(optax.sgd(0.1), node=node, min_peers=0)
        optimizer.init(jax.numpy.ones(3))
        optimizer.join()
        monkeypatch.setattr(Training, "close", note)
        monkeypatch.setattr(gw.Exchange, "shared", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
        assert ended == [True]
