"""examples/launch/pytorchjob.yaml: what Kubeflow's training operator v1 asks of it, and its command in two "pods".

The environment of a pod is that of the operator's release 1.9 (pkg/controller.v1/pytorch/envvar.go, master.go).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from launched import LAUNCH, TRAIN, Trained, environment, finish
from namespaces import network, why_not

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read_job() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())


def replicas(job: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Name and spec of every pod, in the order of their numbers."""
    specs = job["spec"]["pytorchReplicaSpecs"]
    name = job["metadata"]["name"]
    return [
        (f"{name}-{kind.lower()}-{number}", specs[kind]["template"]["spec"])
        for kind in ("Master", "Worker")
        for number in range(specs[kind]["replicas"])
    ]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def operator_environment(job: dict[str, Any], node_rank: int) -> dict[str, str]:
    pods = replicas(job)
    per_node = job["spec"]["nprocPerNode"]
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "MASTER_ADDR": pods[0][0],
        "WORLD_SIZE": str(len(pods) * int(per_node)),
        "RANK": str(node_rank),
        "PET_NODE_RANK": str(node_rank),
        "PET_NPROC_PER_NODE": per_node,
        "PET_NNODES": str(len(pods)),
    }


def own_environment(pod: dict[str, Any], node: str) -> dict[str, str]:
    """The container's `env`, with what the downward API puts in for a pod on `node`."""
    fields = {"spec.nodeName": node}
    return {each["name"]: fields[each["valueFrom"]["fieldRef"]["fieldPath"]] for each in container_of(pod)["env"]}


def expand(command: list[str], variables: dict[str, str]) -> list[str]:
    """$(NAME) in a container's command, as Kubernetes fills it in."""
    return [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in command]


def test_the_operator_takes_it() -> None:
    """What its webhook and CRD ask for, as far as a manifest can get it wrong."""
    job = read_job()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert set(job["spec"]) == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert isinstance(job["spec"]["nprocPerNode"], str)  # the CRD has a string
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert set(specs) == {"Master", "Worker"}
    assert specs["Master"]["replicas"] == 1
    assert specs["Worker"]["replicas"] >= 1
    for spec in specs.values():
        assert set(spec) == {"replicas", "restartPolicy", "template"}
        assert spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        container = container_of(spec["template"]["spec"])
        assert container["name"] == "pytorch"
        assert container["image"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}


def test_every_pod_says_its_node_and_has_the_gpus_that_it_starts_ranks_for() -> None:
    job = read_job()
    for _, pod in replicas(job):
        assert own_environment(pod, "node7") == {"HSDP_HOST": "node7"}
        gpus = container_of(pod)["resources"]["limits"]["nvidia.com/gpu"]
        assert str(gpus) == job["spec"]["nprocPerNode"]


def test_the_sdk_takes_it() -> None:
    """Kubeflow's own models, which refuse what the API has no field for."""
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")

    def check(kind: str, value: Any) -> None:
        if inner := re.fullmatch(r"list\[(.*)\]", kind):
            assert isinstance(value, list), (kind, value)
            for each in value:
                check(inner[1], each)
        elif inner := re.fullmatch(r"dict\((\w+), (.*)\)", kind):
            for each in value.values():
                check(inner[2], each)
        elif hasattr(models, kind):
            model = getattr(models, kind)
            names = {json_name: name for name, json_name in model.attribute_map.items()}
            assert set(value) <= set(names), f"{kind} has no {sorted(set(value) - set(names))}"
            for json_name, each in value.items():
                check(model.openapi_types[names[json_name]], each)
            model(**{names[json_name]: each for json_name, each in value.items()})  # required ones are there
        else:
            expected = {"str": str, "int": int, "bool": bool}.get(kind)
            assert expected is None or isinstance(value, expected) or kind == "str", (kind, value)

    check("KubeflowOrgV1PyTorchJob", read_job())


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_pods_on_one_node_are_one_host() -> None:
    """The manifest's command, in pods with hostnames of their own; HSDP_HOST joins them, so one copy spans both."""
    job = read_job()
    job["spec"]["nprocPerNode"] = "2"
    with network(names=[name for name, _ in replicas(job)]) as net:
        processes = []
        for number, (host, (_, pod)) in enumerate(zip(net.hosts, replicas(job), strict=True)):
            operator = operator_environment(job, number)
            own = own_environment(pod, node="node7")
            *command, script = container_of(pod)["command"]
            assert script == "examples/train.py"
            processes.append(net.start(host, [*expand(command, operator), *TRAIN], environment(**operator, **own)))
        trained = Trained.of(finish(processes))
    trained.check(
        {"hsdp-master-0": [0, 1], "hsdp-worker-0": [2, 3]},
        sizes="1 x shard 4, on 1 host", sharing="ranks 0-3", twins="rank 0",
    )  # fmt: skip
