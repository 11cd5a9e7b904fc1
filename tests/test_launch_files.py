"""The files that start trainings on clusters: what they tell gradwire is what it reads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradwire.rendezvous import placement

FOLDER = Path(__file__).parents[1] / "examples" / "launch"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_every_pod_of_the_jobset_finds_its_place_and_its_port() -> None:
    job, policy = documents("jobset.yaml")
    [workers] = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "x") for each in container["env"]}
    places = [
        placement({**variables, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]
    name = job["metadata"]["name"]
    first = f"{name}-{workers['name']}-0-0.{name}"
    [port] = container["ports"]
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert {place.size for place in places} == {4}
    assert {place.seed for place in places} == {f"{first}:{port['containerPort']}"}
    bind = f"0.0.0.0:{port['containerPort']}"
    assert [place.node_options() for place in places] == [
        {"bind": bind, "peers": (places[0].seed,) if rank else (), "node_id": rank}
        for rank in range(4)
    ]
    assert policy["spec"]["ingress"][0]["ports"] == [
        {"protocol": "UDP", "port": port["containerPort"]}
    ]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_the_network_policy_is_that_of_the_job_s_pods(name: str) -> None:
    job, policy = documents(name)
    labels = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": labels}}]


def test_the_sky_task_binds_the_port_that_it_opens() -> None:
    [task] = documents("skypilot.yaml")
    assert f"GRADWIRE_BIND=0.0.0.0:{task['resources']['ports']}" in task["run"]
    assert placement({**task["envs"], "GRADWIRE_PEERS": "203.0.113.7:40123"}).min_peers == 1


def test_the_sky_commands_of_both_nodes_take_the_secret_from_one_variable() -> None:
    text = (FOLDER / "skypilot.yaml").read_text()
    assert '#   export GRADWIRE_SECRET="$(gradwire secret)"' in text
    assert text.count("sky launch") == text.count("--secret GRADWIRE_SECRET") == 2
    assert "--secret GRADWIRE_SECRET=" not in text


def test_the_slurm_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
