"""Checkpoints of a shared model and optimiser, in every way in which torch's users save them."""

from __future__ import annotations

import copy
import importlib
import io
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import gradwire.torch  # noqa: E402
from gradwire import arrays  # noqa: E402
from gradwire.exchange import redistribute  # noqa: E402
from gradwire.torch import checkpoint  # noqa: E402

from .test_optimizer import OPTIMIZERS, flat, loss_of, model, same_bits, train  # noqa: E402

pytestmark = pytest.mark.torch

# Not imported as ``torch.distributed.checkpoint``, which takes seconds and does without a process group.
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
whole: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")


def share(net: Any, name: str = "AdamW", **options: Any) -> Any:
    options = {"density": 0.1, **options}
    return gradwire.torch.share(net, OPTIMIZERS[name](net.parameters()), **options)


def trained(
    name: str = "AdamW", steps: int = 6, dtype: Any = torch.float32, **options: Any
) -> tuple[Any, Any]:
    net = model(dtype)
    optimizer = share(net, name, **options)
    train(net, optimizer, 0, range(steps), dtype)
    return net, optimizer


def go_on(net: Any, optimizer: Any) -> Any:
    train(net, optimizer, 0, range(6, 12), next(net.parameters()).dtype)
    return flat(net)


def uninterrupted(name: str = "AdamW", **options: Any) -> Any:
    return go_on(*trained(name, **options))


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def through_memory(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
def test_a_model_with_a_parameter_without_elements_is_resumed(shape: tuple[int, ...]) -> None:
    # As ranks have that FSDP2 has left no row of a short tensor. NumPy's empty arrays have strides of zero.
    def begin() -> tuple[Any, Any]:
        net = model()
        net.empty = torch.nn.Parameter(torch.empty(shape))
        return net, share(net)

    net, optimizer = begin()
    optimizer.state_dict()
    train(net, optimizer, 0, range(6))
    saved = through_memory((net.state_dict(), optimizer.state_dict()))
    straight = go_on(net, optimizer)
    net, optimizer = begin()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert same_bits(go_on(net, optimizer), straight)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"topology": "sharded"}, {"every": 4}], ids=str)
def test_get_and_set_state_dict_keep_the_residual_and_take_no_step(
    name: str, options: dict[str, Any]
) -> None:
    net, optimizer = trained(name, **options)
    step = optimizer.exchange.next_step
    optimizer.zero_grad()  # or torch would not try to make a state
    saved = through_memory(whole.get_state_dict(net, optimizer))
    assert optimizer.exchange.next_step == step
    again = share(net_again := model(), name, **options)
    whole.set_state_dict(net_again, again, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert again.result is None, "set_state_dict takes no step"
    assert same_bits(go_on(net_again, again), uninterrupted(name, **options))


def test_the_optimiser_s_state_alone_goes_through_torch_s_functions() -> None:
    net, optimizer = trained()
    weights = whole.get_model_state_dict(net)
    state = whole.get_optimizer_state_dict(net, optimizer)
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert not torch.equal(weights["0.weight"], net[0].weight)
    again = share(net_again := model())
    whole.set_optimizer_state_dict(net_again, again, state)
    whole.set_model_state_dict(net_again, weights)
    assert same_bits(go_on(net_again, again), uninterrupted())


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"cpu_offload": True}], ids=str)
def test_options_of_torch_s_functions_lose_nothing(options: dict[str, Any]) -> None:
    net, optimizer = trained()
    chosen = whole.StateDictOptions(**options)
    saved = whole.get_state_dict(net, optimizer, options=chosen)
    again = share(net_again := model())
    whole.set_state_dict(
        net_again, again, model_state_dict=saved[0], optim_state_dict=saved[1], options=chosen
    )
    assert same_bits(go_on(net_again, again), uninterrupted())


def test_a_flattened_state_has_no_place_for_the_residual_and_is_refused() -> None:
    net, optimizer = trained()
    chosen = whole.StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match="no place for the residual"):
        whole.get_state_dict(net, optimizer, options=chosen)
    plain = OPTIMIZERS["AdamW"](net.parameters())
    assert whole.get_optimizer_state_dict(net, plain, options=chosen)


def test_a_plain_optimiser_s_state_goes_through_torch_s_functions() -> None:
    plain_net = model()
    plain = OPTIMIZERS["AdamW"](plain_net.parameters())
    train(plain_net, plain, 0, range(3))
    saved = whole.get_state_dict(plain_net, plain)
    optimizer = share(net := model())
    whole.set_state_dict(net, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert same_bits(flat(net), flat(plain_net))
    assert optimizer.state[net[0].weight]["step"] == 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("way", ["functions", "states", "objects"])
@pytest.mark.parametrize("options", [{}, {"topology": "sharded", "outer_momentum": 0.5}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_are_resumed_bit_for_bit(
    tmp_path: Path, way: str, options: dict[str, Any], is_async: bool
) -> None:
    def state_of(net: Any, optimizer: Any) -> dict[str, Any]:
        if way == "functions":
            weights, state = whole.get_state_dict(net, optimizer)
            return {"model": weights, "optimizer": state}
        if way == "states":
            return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        return {"model": net, "optimizer": optimizer}

    net, optimizer = trained(**options)
    state = state_of(net, optimizer)
    if is_async:
        saving = dcp.async_save(state, checkpoint_id=tmp_path)
        go_on(net, optimizer)  # while the checkpoint is written
        saving.result()
    else:
        dcp.save(state, checkpoint_id=tmp_path)
    again = share(net_again := model(), **options)
    whole._init_optim_state(again)  # as the functions do
    state = state_of(net_again, again)
    dcp.load(state, checkpoint_id=tmp_path)
    if way == "functions":
        whole.set_state_dict(
            net_again,
            again,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    elif way == "states":
        net_again.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
    assert again.result is None
    assert same_bits(go_on(net_again, again), uninterrupted(**options))


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("place", ["machines", "team"])
def test_local_steps_before_a_checkpoint_count_in_the_agreement(
    everywhere: Any, place: str
) -> None:
    """The factor of AdamW's next updates is that of the whole exchange, not of the steps after the save."""
    files: dict[int, Any] = {}

    def begin(share: Any) -> tuple[Any, Any]:
        net = model()
        return net, share(net, OPTIMIZERS["AdamW"](net.parameters()), every=4, density=0.1)

    def work(rank: int, share: Any) -> Any:
        net, optimizer = begin(share)
        train(net, optimizer, rank, range(6))
        files[rank] = through_memory((net.state_dict(), optimizer.state_dict()))
        train(net, optimizer, rank, range(6, 14))
        return optimizer.update_scale, optimizer.shared_tensors()

    def resume(rank: int, share: Any) -> Any:
        net, optimizer = begin(share)
        weights, state = files[rank]
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(net, optimizer, rank, range(6, 14))
        return optimizer.update_scale, optimizer.shared_tensors()

    for (scale, params), (other_scale, others) in zip(
        everywhere(place, work), everywhere(place, resume), strict=True
    ):
        assert scale == other_scale != 1.0
        assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bits_that_differ_are_restored(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_BLOCK_NUMEL", 64)
    torch.manual_seed(0)
    base = torch.randn(1001).to(dtype)
    near = torch.nextafter(base, torch.full_like(base, torch.inf))
    far = torch.where(torch.rand(1001) < 0.1, -base, near)
    far[:4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    base[:4] = torch.tensor([-0.0, 0.0, torch.inf, torch.nan])
    some = near
    for _ in range(200):  # so that the number of steps needs more than eight bits
        some = torch.nextafter(some, torch.full_like(base, torch.inf))
        mixed = torch.where(torch.rand(1001) < 0.05, some, near)
        restored = checkpoint._unpack(checkpoint._pack(mixed, base), base.clone())
        assert torch.equal(restored.view(torch.uint8), mixed.view(torch.uint8))
    for values in (base, near, far, torch.randn(1001).to(dtype)):
        packed = checkpoint._pack(values, base)
        restored = checkpoint._unpack(packed, base.clone())
        assert torch.equal(restored.view(torch.uint8), values.view(torch.uint8))
    assert checkpoint._pack(base, base) is None
    codes, steps, others = checkpoint._pack(far, base)
    assert codes.nbytes == 251
    assert steps.nbytes < 150
    assert others.numel() < 150
    for damaged in (
        (codes[1:], steps, others),
        (codes, steps[1:], others),
        (codes, steps, others[1:]),
    ):
        with pytest.raises(IndexError, match="1001 elements"):
            checkpoint._unpack(damaged, base.clone())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_has_every_value_once() -> None:
    """Shared parameters in the model's state; the two moments, and the residual, in the optimiser's."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    numel = sum(param.numel() for param in net.parameters())
    optimizer = share(net)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()

    def bytes_of(state: Any) -> float:
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell() / numel

    assert bytes_of(optimizer.state_dict()) < 12.5
    assert bytes_of([net.state_dict(), optimizer.state_dict()]) < 16.5


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_an_optimiser_s_state_without_its_model_is_refused_before_anything_is_sent(
    dtype: Any,
) -> None:
    net, optimizer = trained(dtype=dtype)
    state = optimizer.state_dict()
    again = share(net_again := model(dtype))
    again.load_state_dict(state)
    assert torch.equal(
        again.state_dict()["gradwire"]["encoders"][0]["residual"],
        state["gradwire"]["encoders"][0]["residual"],
    )
    loss_of(net_again, 0, 6, dtype).backward()
    with pytest.raises(ValueError, match="of other parameters than the model has"):
        again.step()
    net_again.load_state_dict(net.state_dict())
    assert same_bits(go_on(net_again, again), uninterrupted(dtype=dtype))


@DTYPES
def test_other_weights_between_load_and_step_are_not_undone(dtype: Any) -> None:
    net, optimizer = trained(dtype=dtype)
    again = share(net_again := model(dtype))
    again.load_state_dict(optimizer.state_dict())
    net_again.load_state_dict(net.state_dict())
    other = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    net_again.load_state_dict(other)
    assert torch.equal(net_again[0].weight, other["0.weight"])
    with pytest.raises(ValueError, match="of other parameters than the model has"):
        again.step()


@DTYPES
def test_weights_written_between_load_and_step_are_not_undone(dtype: Any) -> None:
    net, optimizer = trained(dtype=dtype)
    again = share(net_again := model(dtype))
    net_again.load_state_dict(net.state_dict())
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        net_again[0].bias.fill_(7.0)
    with pytest.raises(ValueError, match=r"write other weights after optimizer\.join"):
        again.join()
    net_again.load_state_dict(net.state_dict())
    assert same_bits(go_on(net_again, again), uninterrupted(dtype=dtype))


def test_a_state_that_was_loaded_is_saved_before_the_first_step() -> None:
    net, optimizer = trained()
    weights, state = net.state_dict(), optimizer.state_dict()
    again = share(net_again := model())
    net_again.load_state_dict(weights)
    again.load_state_dict(state)
    assert same_bits(flat(net_again), flat(net)), "the model has this node's own parameters"
    saved = net_again.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    third = share(net_third := model())
    third.load_state_dict(again.state_dict())
    net_third.load_state_dict(saved)
    assert same_bits(go_on(net_third, third), uninterrupted())


def test_a_state_of_another_way_to_hold_the_residual_is_refused() -> None:
    _, optimizer = trained()
    again = share(model(), apply_residual=False)
    with pytest.raises(ValueError, match="apply_residual=True, this one has False"):
        again.load_state_dict(optimizer.state_dict())
    assert not again.state


@pytest.mark.parametrize(
    "damage",
    [{"local": (None,)}, {"local": "x"}, {"rounded": None}, "shared", "owner"],
    ids=str,
)
def test_nothing_is_loaded_of_a_state_whose_parameters_cannot_be_read(damage: Any) -> None:
    net, optimizer = trained()
    weights = copy.deepcopy(net.state_dict())
    state = optimizer.state_dict()
    if isinstance(damage, str):
        del state["gradwire"][damage]
    else:
        state["gradwire"] |= damage
    resumed = share(net_again := model())
    net_again.load_state_dict(weights)
    with pytest.raises(ValueError, match="nothing was loaded"):
        resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert not again["state"]
    assert again["gradwire"]["step"] == 0
    assert not any(saved["residual"].any() for saved in again["gradwire"]["encoders"])


@pytest.mark.parametrize("stored", [None, {}, [], -1, "x"], ids=repr)
def test_a_state_whose_exchange_is_lost_is_not_taken_for_a_plain_optimiser_s(stored: Any) -> None:
    _, optimizer = trained()
    state = {**optimizer.state_dict(), "gradwire": stored}
    resumed = share(model())
    with pytest.raises(ValueError, match='under "gradwire"'):
        resumed.load_state_dict(state)
    assert not resumed.state_dict()["state"]


def test_an_optimiser_that_refuses_its_state_is_as_it_was() -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][2]["step"] = [1.0]
    resumed = share(model())
    with pytest.raises(TypeError, match="float"):
        resumed.load_state_dict(state)
    assert not resumed.state_dict()["state"]


@pytest.mark.parametrize("name", ["shared", "rounded", "local", "residual"])
def test_parameters_of_other_shapes_or_dtypes_are_refused_and_nothing_is_loaded(name: str) -> None:
    net = model().to(torch.bfloat16)
    optimizer = share(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 20, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    weights = copy.deepcopy(net.state_dict())
    stored = optimizer.state_dict()
    exchange = stored["gradwire"]
    if name == "residual":
        exchange["encoders"][0][name] = exchange["encoders"][0][name].bfloat16()
    elif name == "rounded":
        exchange[name] = ()
    else:
        exchange[name] = (*exchange[name][:-1], exchange["shared"][-1][None])
    resumed = share(net_again := model().to(torch.bfloat16))
    net_again.load_state_dict(weights)
    before = [param.clone() for param in net_again.parameters()]
    with pytest.raises(ValueError, match="nothing was loaded"):
        resumed.load_state_dict(stored)
    again = resumed.state_dict()
    assert not again["state"]
    assert again["gradwire"]["step"] == 0
    assert all(map(torch.equal, net_again.parameters(), before))


def test_states_are_merged_for_another_number_of_nodes() -> None:
    net, optimizer = trained()
    state = optimizer.state_dict()
    [merged] = redistribute([state["gradwire"]], 1)
    again = share(net_again := model())
    net_again.load_state_dict(net.state_dict())
    again.load_state_dict({**state, "gradwire": merged})
    torch.testing.assert_close(flat(net_again), flat(net))
    go_on(net_again, again)


# ---- the model's state -----------------------------------------------------------------------------------------------


class Nested(torch.nn.Module):
    """Tied parameters, a frozen one, a convolution whose weights are stored with the channels last, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.body.to(memory_format=torch.channels_last)

    def forward(self, images: Any) -> Any:
        return self.tied(torch.tanh(self.head(self.body(images).mean((2, 3)))))


def trained_nested() -> tuple[Nested, Any]:
    net = Nested()
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = gradwire.torch.share(net, torch.optim.AdamW(params, lr=0.02), density=0.1)
    for seed in range(4):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        net(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def test_kept_variables_are_the_model_s_parameters() -> None:
    net, _ = trained_nested()
    kept = net.state_dict(keep_vars=True)
    named = dict(net.named_parameters(remove_duplicate=False))
    assert all(kept[name] is param for name, param in named.items())
    images = torch.randn(2, 3, 8, 8)
    net.zero_grad()
    torch.func.functional_call(net, kept, images).square().sum().backward()
    assert all(param.grad is not None for param in net.parameters() if param.requires_grad)
    # After it, and after a call that raised in the middle, the next one saves the shared parameters again.
    assert not torch.equal(net.state_dict()["head.weight"], net.head.weight)


def test_a_functional_call_with_the_saved_state_has_gradients_where_asked_for() -> None:
    net, _ = trained_nested()
    state = net.state_dict()
    leaves = {name: state[name].requires_grad_() for name, _ in net.named_parameters()}
    torch.func.functional_call(net, state, torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(leaf.grad is not None for name, leaf in leaves.items() if name != "frozen")


def test_saved_tensors_have_the_strides_dtypes_and_ties_of_the_parameters() -> None:
    net, _ = trained_nested()
    state = net.state_dict()
    plain = Nested().state_dict()
    assert list(state) == list(plain)
    for name, saved in state.items():
        assert (type(saved), saved.dtype, saved.stride()) == (
            type(plain[name]),
            plain[name].dtype,
            plain[name].stride(),
        )
        assert not saved.requires_grad
    assert state["body.0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert state["tied.weight"] is state["head.weight"]
    assert not torch.equal(state["head.weight"], net.head.weight)
    assert state["frozen"].data_ptr() == net.frozen.data_ptr(), "not shared: as torch returns it"


def test_a_part_of_the_model_and_a_larger_module_save_the_shared_parameters() -> None:
    net, _ = trained_nested()
    state = net.state_dict()
    for part in ("body", "body.0", "tied"):
        for name, saved in net.get_submodule(part).state_dict().items():
            assert torch.equal(saved, state[f"{part}.{name}"])
    outer = torch.nn.ModuleDict({"inner": net, "other": torch.nn.Linear(2, 2)})
    held: dict[str, Any] = {}
    assert outer.state_dict(destination=held, prefix="ema.") is held
    assert all(torch.equal(held[f"ema.inner.{name}"], value) for name, value in state.items())
    assert held["ema.inner.tied.weight"] is held["ema.inner.head.weight"]


def test_a_call_that_raised_in_the_middle_leaves_nothing_behind() -> None:
    net, optimizer = trained_nested()

    def fail(*_: Any) -> None:
        raise OSError("no space")

    handle = net.head.register_state_dict_post_hook(fail)
    with pytest.raises(OSError, match="no space"):
        net.state_dict(keep_vars=True)
    handle.remove()
    before = net.state_dict()
    torch.manual_seed(9)
    net(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    after = net.head.state_dict()["weight"]
    assert not torch.equal(after, before["head.weight"])
    assert torch.equal(after, net.state_dict()["head.weight"])


def test_hooks_of_the_user_see_what_is_saved_whenever_they_were_registered() -> None:
    net = model()
    order: list[str] = []
    seen: dict[str, Any] = {}

    def look(what: str) -> Any:
        def hook(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
            order.append(what)
            seen[what] = state[f"{prefix}weight" if what == "part" else f"{prefix}0.weight"].clone()

        return hook

    def rename(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}first"] = state.pop(f"{prefix}0.weight")

    net.register_state_dict_pre_hook(lambda *_: order.append("pre"))
    net[0].register_state_dict_post_hook(look("part"))
    net.register_state_dict_post_hook(look("before"))
    optimizer = share(net)
    net.register_state_dict_post_hook(look("after"))
    net.register_state_dict_post_hook(rename)
    train(net, optimizer, 0, range(4))
    state = net.state_dict()
    assert order == ["pre", "part", "before", "after"]
    [shared, *_] = optimizer.shared_tensors()
    assert all(torch.equal(weight, shared) for weight in (*seen.values(), state["first"]))
    assert not torch.equal(shared, net[0].weight)


def test_assigning_other_parameters_is_refused_and_a_saved_state_can_be_assigned_elsewhere() -> (
    None
):
    net, optimizer = trained()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match=r"assign=True\) would replace the parameters"):
        net.load_state_dict(model().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="assign"):
        net[0].load_state_dict(model()[0].state_dict(), assign=True)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    other = model()
    other.load_state_dict(net.state_dict(), assign=True)
    assert isinstance(other[0].weight, torch.nn.Parameter)
    go_on(net, optimizer)
    assert torch.equal(other[0].weight, before["0.weight"]), "not the memory of the training"


def test_parameters_that_are_swapped_by_a_load_stay_the_optimiser_s() -> None:
    net, optimizer = trained()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.load_state_dict(model().state_dict(), assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same_bits(flat(net), flat(model()))
    go_on(net, optimizer)


def test_safetensors_hold_the_shared_parameters(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    net, _ = trained()
    safetensors.save_model(net, tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
    again = model()
    safetensors.load_model(again, tmp_path / "model.safetensors")
    assert not same_bits(flat(again), flat(net))


@pytest.mark.parametrize("place", ["alone", "machines", "team"])
def test_a_state_that_was_loaded_into_its_own_optimiser_can_be_saved(
    everywhere: Any, place: str
) -> None:
    """As Accelerate does when it prepares an optimiser, and a user who saves before the first step."""

    def work(rank: int, share: Any) -> None:
        net = model()
        optimizer = share(net, torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer.load_state_dict(optimizer.state_dict())
        before = flat(net)
        saved = net.state_dict()
        assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), before)
        train(net, optimizer, rank, range(3))

    everywhere(place, work)


def test_a_state_can_be_loaded_twice() -> None:
    net, optimizer = trained()
    weights, state = net.state_dict(), optimizer.state_dict()
    again = share(net_again := model())
    net_again.load_state_dict(weights)
    for _ in range(2):
        again.load_state_dict(state)
    assert same_bits(go_on(net_again, again), uninterrupted())


def test_what_was_written_into_a_returned_state_is_older_than_what_is_loaded() -> None:
    net, optimizer = trained("SGD")
    before = copy.deepcopy(net.state_dict())
    for tensor in net.state_dict().values():
        tensor.fill_(5.0)
    net.load_state_dict(before)
    train(net, optimizer, 0, range(6, 7))
    assert flat(net).abs().max() < 2.0


def test_what_was_written_into_a_returned_state_outlives_an_evaluation() -> None:
    net, optimizer = trained("SGD")
    for tensor in net.state_dict().values():
        tensor.fill_(5.0)
    with optimizer.shared_parameters():
        net.state_dict()
    assert flat(net).eq(5.0).all()
    train(net, optimizer, 0, range(6, 7))
    assert flat(net).min() > 2.0
