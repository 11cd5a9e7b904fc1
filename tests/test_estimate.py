"""``gradwire estimate``: the table, one sentence of advice, and one line for everything that cannot be."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire import calibration, cost
from gradwire.cli import main
from gradwire.cli.doctor import link
from gradwire.cli.estimate import model_shapes, rate, seconds
from gradwire.cost import Rates

SIZE = ["--params", "25M", "--step", "0.2", "--nodes", "8", "--optimizer", "sgd"]


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "rates", Rates)


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_compares_every_way_with_a_dense_ring(capsys: pytest.CaptureFixture[str]) -> None:
    out = estimate(capsys, *SIZE, "--link", "1Gbit", "--latency", "0.5ms")
    rows = re.findall(r"^(\S.*?)  +([\d.]+ m?s)? +([\d.]+ \wB) +([\d.]+ \wB)", out, re.M)
    assert [name for name, *_ in rows] == [
        "dense ring, float32",
        "dense ring, float16",
        "PowerSGD, rank 4",
        "mesh",
        "sharded",
        "4 local steps, sharded",
        "15 local steps, sharded",
        "30 local steps, sharded",
    ]
    assert [name for name, step, *_ in rows if not step] == ["PowerSGD, rank 4"]
    assert re.search(r"^dense ring, float32 .* 1\.00x  link$", out, re.M)
    assert re.search(
        r"^gradwire pays, [\d.]+ times as fast: the dense ring, float16 takes [\d.]+ ms, and sharded [\d.]+ ms, .*; "
        r"write gradwire\.torch\.share\(model, optimizer\)\.$",
        out,
        re.M,
    )
    assert re.search(r"^The float32 ring is as fast .* from [\d.]+ Gbit/s on\.$", out, re.M)


@pytest.mark.parametrize("step", ["0", "1ms", "0.2"])
@pytest.mark.parametrize("link", ["1kbit", "10Mbit", "1Gbit", "25Gbit", "1Tbit"])
@pytest.mark.parametrize("size", ["1 --nodes 2", "1e4 --nodes 1e6", "1e8 --nodes 64", "1e14"])
@pytest.mark.parametrize("density", ["1e-9", "0.01", "1"])
def test_the_advice_agrees_with_the_table(
    step: str, link: str, size: str, density: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--params {size} --step {step} --link {link} --density {density} --json"
    found = json.loads(estimate(capsys, *arguments.split()), parse_constant=pytest.fail)
    times = {row["name"]: row["step_s"] for row in found["rows"] if "step_s" in row}
    assert all(math.isfinite(one) for one in times.values())
    rings = [one for name, one in times.items() if name.startswith("dense ring")]
    others = [one for name, one in times.items() if not name.startswith("dense ring")]
    rival = rings[1] if rings[0] >= 1.1 * rings[1] else rings[0]
    assert found["advice"][0].startswith("gradwire pays") is (rival >= 1.1 * min(others))
    is_faster = min(others[:2]) < rings[0]
    if is_faster:
        assert "at any link rate" not in "".join(found["advice"])
    crossing = found["crossover_bytes_per_s"]
    if crossing and abs(found["job"]["link_bytes_per_s"] / crossing - 1.0) > 0.01:
        assert is_faster is (found["job"]["link_bytes_per_s"] < crossing)


def test_slow_links_get_local_steps_and_fast_ones_no_gradwire(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "every=30" in estimate(capsys, *SIZE, "--link", "1Mbit").splitlines()[-2]
    two = [
        "--params",
        "1e6",
        "--step",
        "1ms",
        "--link",
        "1Gbit",
        "--latency",
        "5ms",
        "--density",
        "0.5",
    ]
    assert "every=30" in estimate(capsys, *two)
    out = estimate(capsys, *SIZE, "--link", "1Gbit", "--workers", "4")
    assert "write gradwire.torch.share(model, optimizer)" in out, "ranks find their team"
    out = estimate(capsys, *SIZE, "--link", "100Gbit")
    assert "gradwire does not pay here" in out
    assert "keep DistributedDataParallel(model)" in out


def question(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    found = json.loads(estimate(capsys, "--step", "1ms", "--link", "1Gbit", "--json", *arguments))
    job: dict[str, float] = found["job"]
    return job


@pytest.mark.parametrize(
    ("text", "elements"),
    [("25M", 25_000_000), ("1.3B", 1_300_000_000), ("350k", 350_000), ("7e9", 7_000_000_000)],
)
def test_sizes_are_written_as_people_write_them(
    text: str, elements: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert question(capsys, "--params", text)["elements"] == elements


@pytest.mark.torch
@pytest.mark.parametrize("numel", [1_000, 100_000, 1_000_000, 4_000_000])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "RMSprop", "Adagrad"])
def test_the_density_is_the_one_that_share_chooses(
    name: str, numel: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import gradwire.torch

    for variable in ("RANK", "WORLD_SIZE", "GRADWIRE_PEERS", "GRADWIRE_MIN_PEERS"):
        monkeypatch.delenv(variable, raising=False)
    net = torch.nn.Linear(numel, 1, bias=False)
    inner = getattr(torch.optim, name)(net.parameters(), lr=0.1)
    with gradwire.torch.share(net, inner) as optimizer:
        [encoder] = optimizer.exchange._groups.encoders
    job = question(capsys, "--params", str(numel), "--optimizer", name)
    assert job["density"] == encoder.policy.density


def test_the_advice_is_a_call_of_share(capsys: pytest.CaptureFixture[str]) -> None:
    out = estimate(capsys, *SIZE, "--link", "1Mbit")
    assert "write gradwire.torch.share(model, optimizer, every=30)." in out
    assert "Local steps raise the loss" in out
    assert "Local steps raise" not in estimate(capsys, *SIZE, "--link", "10Gbit")
    small = ["--params", "25M", "--step", "0.2", "--nodes", "3", "--link", "10Mbit"]
    assert 'share(model, optimizer, topology="sharded", every=15)' in estimate(capsys, *small)


def test_spark_starts_first_and_is_not_worth_it_for_short_trainings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = estimate(capsys, *SIZE, "--link", "1Gbit", "--spark")
    assert re.search(r"write TorchEstimator\(\.\.\., training=SharedTraining\(.*\)\)\.", out)
    assert "Spark's engine needs 10 to 20 s before the first step: 8 machines train up to" in out
    assert re.search(r"not worth it for trainings that take one machine less than 2\d s\.", out)
    slow = ["--params", "1B", "--step", "1ms", "--link", "1Mbit", "--spark"]
    assert "2 machines train no faster than one" in estimate(capsys, *slow)
    assert "Spark" not in estimate(capsys, *SIZE, "--link", "1Gbit")


def test_json_has_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(estimate(capsys, *SIZE, "--link", "1Gbit", "--json"))
    assert found["job"]["elements"] == 25_000_000
    assert found["rows"][0]["speedup"] == 1.0
    assert "step_s" not in found["rows"][2]
    assert found["rows"][3]["link_s"] > 0.0
    job = cost.Job(**{**found["job"], "rates": Rates(**found["job"]["rates"])})
    assert found["crossover_bytes_per_s"] == cost.crossover(job)


def test_a_plot_is_drawn_in_the_format_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "speed-up.svg"
    estimate(capsys, *SIZE, "--link", "1Gbit", "--plot", str(path))
    assert "<svg" in path.read_text()
    assert main(["estimate", *SIZE, "--link", "1Gbit", "--plot", str(tmp_path / "a.nope")]) == 2
    assert "'nope' is not supported" in capsys.readouterr().err


def test_a_plot_has_the_densities_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes", reason="matplotlib is not installed").Axes
    drawn: dict[str, float] = {}
    draw = axes.plot

    def plot(self: Any, rates: list[float], speedups: list[float], label: str) -> Any:
        drawn[label] = speedups[rates.index(1e9)]
        return draw(self, rates, speedups, label=label)

    monkeypatch.setattr(axes, "plot", plot)
    path = str(tmp_path / "speed-up.svg")
    # SGD's messages are denser with many local steps.
    arguments = (*SIZE, "--link", "1Gbit", "--plot", path, "--json")
    rows = json.loads(estimate(capsys, *arguments))["rows"]
    table = {row["name"].partition(",")[0]: row["speedup"] for row in rows if "speedup" in row}
    assert len(drawn) == 5
    assert drawn == pytest.approx({name: table[name] for name in drawn})


def test_a_model_s_parameters_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import numpy as np\ndef make(): return {'w': np.zeros((30, 20)), 'more': [np.zeros(7)]}\n"
    )
    (tmp_path / "my_model_here.py").write_text(code + "def none(): return 3\n")
    monkeypatch.chdir(tmp_path)
    assert model_shapes("my_model_here:make") == [(30, 20), (7,)]
    model = ["--model", "my_model_here:make", "--step", "1ms", "--link", "1Gbit"]
    assert estimate(capsys, *model).startswith("607 parameters")
    with pytest.raises(ValueError, match="int has no parameters"):
        model_shapes("my_model_here:none")


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("ends", "SystemExit: 3"),
        ("fails", "RuntimeError: one two"),
        ("circle", "RecursionError"),
        ("empty", "ndarray has no parameters"),
    ],
)
def test_a_factory_that_fails_is_named_in_one_line(
    factory: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import numpy as np\n"
        "def ends(): raise SystemExit(3)\n"
        "def fails(): raise RuntimeError('one\\ntwo')\n"
        "def circle(): circle = []; circle.append(circle); return circle\n"
        "def empty(): return np.zeros((0, 3))\n"
    )
    (tmp_path / "failing_model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    model = ["--model", f"failing_model:{factory}", "--step", "1ms", "--link", "1Gbit"]
    assert main(["estimate", *model]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gradwire estimate: --model failing_model:{factory}: ")
    assert says in line


def test_rate_and_latency_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = link.Flow(bytes_per_s=11.9e6, resent_share=0.0)
    found = link.Link(
        peer="there:1",
        round_trip_p50_s=0.004,
        round_trip_p99_s=0.01,
        out=flow,
        back=replace(flow, bytes_per_s=20e6),
        clock_ahead_s=0.0,
        has_gso=True,
    )
    monkeypatch.setattr(link, "measure", lambda *_: found)
    out = estimate(capsys, *SIZE, "--measure", "there:1")
    assert "102 Mbit/s, 2 ms one way" in out
    assert "may be faster than measured" not in out
    assert "102 Mbit/s, 2 ms one way" in estimate(capsys, *SIZE, "--measure", "")
    # A quarter of what the processor sends: the link is not what was measured.
    fast = replace(found, out=replace(flow, bytes_per_s=9e8), back=replace(flow, bytes_per_s=3e8))
    monkeypatch.setattr(link, "measure", lambda *_: fast)
    out = estimate(capsys, *SIZE, "--measure", "there:1", "--latency", "7ms")
    assert "2.57 Gbit/s, 7 ms one way" in out
    assert out.endswith("The link may be faster than measured: give --link if you know its rate.\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--step 1 --link 1Gbit", "either --params or --model"),
        ("--params 1e6 --model a:b --step 1 --link 1Gbit", "either --params or --model"),
        ("--params 1e6 --link 1Gbit", "give --step"),
        ("--params 1e6 --step 1", "either --link or --measure"),
        ("--params many --step 1 --link 1Gbit", "--params many: not a number"),
        ("--params 1.5 --step 1 --link 1Gbit", "--params 1.5: not a whole number"),
        ("--params 1e6 --step 1h --link 1Gbit", "--step 1h: not a time such as"),
        ("--params 1e6 --step 1 --link fast", "--link fast: not a rate such as"),
        ("--params 1e6 --step 1 --link 1e999bit", "not a number"),
        ("--params 1e6 --step 1 --link 1Gbit --latency 1e6s", "--latency, in seconds, is 1e+06"),
        ("--params 1e6 --step 1 --link 1Gbit --nodes 1", "--nodes is 1, must be 2 or more"),
        ("--params 1e6 --step 1 --link 1Gbit --density nan", "--density nan: not a number"),
        ("--params 0 --step 1 --link 1Gbit", "--params is 0, must be 1 or more"),
        ("--params -5 --step 1 --link 1Gbit", "--params is -5, must be 1 or more"),
        ("--params 1e400M --step 1 --link 1Gbit", "--params 1e400: not a number"),
        ("--params 1e290B --step 1 --link 1Gbit", "from 1 to 281,474,976,710,656"),
        ("--params 25X --step 1 --link 1Gbit", "--params 25X: not a number such as"),
        ("--params 1e6 --step 1 --link 1Gbit --workers 0", "--workers is 0, must be 1 or more"),
        ("--params 1e6 --step 1 --link 1Gbit --optimizer adamq", "adamq: not one of adamw, adam"),
        ("--params 1e6 --step 1 --link=-1Gbit", "--link, in bytes per second, is -1.25e+08"),
        ("--params 1e6 --step 1 --link 1bit", "--link, in bytes per second, is 0.125, must be"),
        ("--params 1e6 --step=-1 --link 1Gbit", "--step, in seconds, is -1, must be at least 0"),
        ("--params 1e30 --step 1 --link 1Gbit", "--params is 1e+30, must be from 1 to"),
        ("--params 1e6 --step 1 --link 1Gbit --plot .", "--plot . is a folder: name a file"),
        ("--params 1e6 --step 1 --link=", "--link : not a rate such as"),
        ("--params 1e6 --step 1 --link 1mB --latency=-1ms", "--latency, in seconds, is -0.001"),
        ("--model my_model --step 1 --link 1Gbit", "--model my_model: write module:factory"),
        ("--model nowhere:make --step 1 --link 1Gbit", "No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwire estimate: ")
    assert says in line


def test_a_peer_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.01)
    monkeypatch.setenv("GRADWIRE_SECRET", bytes(range(32)).hex())
    assert main(["estimate", *SIZE, "--measure", "127.0.0.1:9"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--measure 127.0.0.1:9: run `gradwire doctor --serve` there" in line


def test_units_are_read_as_people_write_them() -> None:
    for text in ("10Mbit", "10 Mbit/s", "10Mbps", "10mbit", "10Mb/s", "10 Mbits/sec", "1e4kbit"):
        assert rate("", text) == 1.25e6, text
    assert rate("", "125MB") == rate("", "125 MB/s") == rate("", "1Gbit") == 125e6
    assert seconds("", "0.2") == seconds("", "200ms") == seconds("", "0.2 s") == 0.2
    assert seconds("", "50us") == seconds("", "50µs") == pytest.approx(5e-5)
