"""Jobs of Kubernetes: the manifests, held to the APIs' own classes and schemas, and to what a pod may do."""

import base64
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspec.cli import main
from megaspec_launchers import kubernetes
from megaspec_launchers.recipe_file import NAME, recipe_of_job
from tests.launchers.jobs import ON_CPU, PODS, spec_of, with_fields, write_program

EVERYTHING = (
    "launcher.job=hello-1",
    "launcher.namespace=team",
    "launcher.cpus_per_node='96'",
    "launcher.memory=1500Gi",
    "launcher.resources={rdma/hca: '8'}",
    "launcher.node_selector={cloud/gpu: H100}",
    "launcher.tolerations=[{key: nvidia.com/gpu, effect: NoSchedule}, {key: team, value: a}]",
    "launcher.topology=cloud/block",
    "launcher.queue=research",
    "launcher.priority=high",
    "launcher.pull_secrets=[registry]",
    "launcher.env={NCCL_SOCKET_IFNAME: eth0}",
)
JOBS = {
    "kubernetes-trainjob": PODS,
    "kubernetes-pytorchjob": (*PODS, "launcher.api=pytorchjob"),
    "kubernetes-jobset": (*PODS, "launcher.api=jobset"),
    "kubernetes-everything": (*PODS, *EVERYTHING),
}
VERSION = "1.34"


@cache
def texts() -> dict[str, str]:
    return {name: kubernetes.render(spec_of(*overrides)) for name, overrides in JOBS.items()}


def documents(text: str) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_templates(made: dict[str, dict]) -> list[dict]:
    """Every pod template of a job."""
    if "PyTorchJob" in made:
        return [replica["template"] for replica in made["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()]
    job_set = made["JobSet"]["spec"] if "JobSet" in made else made["TrainingRuntime"]["spec"]["template"]["spec"]
    return [job["template"]["spec"]["template"] for job in job_set["replicatedJobs"]]


@pytest.mark.parametrize("name", JOBS)
def test_text(name):
    """What is reviewed: `python -m tests.write_golden` writes it."""
    golden = Path(__file__).parents[1] / "golden" / "jobs" / f"{name}.yaml"
    assert texts()[name] == golden.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_kubeflows_own_classes_take_it(name, monkeypatch):
    """Nothing is lost on the way through them: a key that they don't know would be."""
    # two seconds of imports, which no other test needs
    from kubeflow.training import models as v1_models
    from kubeflow_trainer_api import models as trainer_models
    from kubernetes.client import ApiClient
    from kubernetes.client import models as kubernetes_models

    classes = {
        "TrainJob": trainer_models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": trainer_models.TrainerV1alpha1TrainingRuntime,
        "JobSet": trainer_models.JobsetV1alpha2JobSet,
    }
    held = 0
    for kind, document in documents(texts()[name]).items():
        if kind in classes:
            assert json.loads(classes[kind].from_dict(document).to_json()) == document
            held += 1
        elif kind == "PyTorchJob":
            for model in dir(v1_models):
                # its client looks all classes up there
                if model.startswith("KubeflowOrg"):
                    monkeypatch.setattr(kubernetes_models, model, getattr(v1_models, model), raising=False)
            client = ApiClient()
            read = client._ApiClient__deserialize_model(document, v1_models.KubeflowOrgV1PyTorchJob)
            back = client.sanitize_for_serialization(read)
            # the pods are Kubernetes' own, held to their schema
            assert _without_pods(back) == _without_pods(document)
            held += 1
    assert held


def _without_pods(job: dict) -> dict:
    copy = json.loads(json.dumps(job))
    for replica in copy["spec"]["pytorchReplicaSpecs"].values():
        del replica["template"]
    return copy


def test_a_key_that_no_class_knows_is_found():
    from kubeflow_trainer_api import models as trainer_models

    document = documents(texts()["kubernetes-trainjob"])["TrainJob"]
    document["spec"]["trainer"]["numProcs"] = 8
    read = trainer_models.TrainerV1alpha1TrainJob.from_dict(document)
    assert json.loads(read.to_json()) != document


@pytest.mark.parametrize("name", JOBS)
def test_kubernetes_schemas_take_it(name):
    made = documents(texts()[name])
    kubernetes_validate.validate(made["ConfigMap"], VERSION, strict=True)
    kubernetes_validate.validate(yaml.safe_load(kubernetes.secret(spec_of(*JOBS[name]))), VERSION, strict=True)
    for template in pod_templates(made):
        spec = {"restartPolicy": "Never", **template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **template["metadata"]}, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)
    if "PyTorchJob" not in made:
        job_set = made.get("JobSet") or made["TrainingRuntime"]["spec"]["template"]
        (job,) = job_set["spec"]["replicatedJobs"]
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(whole, VERSION, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_pods_may_do_little(name):
    for template in pod_templates(documents(texts()[name])):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert not any("hostPath" in volume for volume in pod["volumes"])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm"
        assert set(mounts.values()) == set(volumes)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_nodes_find_each_other():
    """Each API numbers its pods and names the first in its own way; what is written agrees with it."""
    trainjob = documents(texts()["kubernetes-trainjob"])
    (template,) = pod_templates(trainjob)
    command = template["spec"]["containers"][0]["command"]
    # <set>-<job>-<replica>-<pod>.<set>, and what an indexed job tells its pods
    assert "--host=hello-node-0-0.hello" in command
    assert "--rank-from=JOB_COMPLETION_INDEX" in command
    runtime = trainjob["TrainingRuntime"]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == trainjob["TrainJob"]["spec"]["trainer"]["numNodes"] == 2
    assert trainjob["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (job["template"]["spec"]["completions"], job["template"]["spec"]["parallelism"]) == (2, 2)
    replicas = documents(texts()["kubernetes-pytorchjob"])["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert "--host=hello-master-0" in container["command"]
    assert "--rank-from=RANK" in container["command"]
    assert {port["name"] for port in container["ports"]} == {"pytorchjob-port"}


def test_each_start_has_a_name_of_its_own():
    """Ranks of an earlier start, and what was signed in it, have nothing to say in the next."""
    for name in ("kubernetes-trainjob", "kubernetes-jobset"):
        (template,) = pod_templates(documents(texts()[name]))
        (container,) = template["spec"]["containers"]
        (start,) = [one["valueFrom"] for one in container["env"] if one["name"] == "MEGASPEC_START"]
        assert start == {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
        words = [expanded(word, {"MEGASPEC_START": "3"}) for word in container["command"]]
        assert "--job=hello-3" in words


def test_what_starts_pods_again():
    """74 and 75, and no code that says that another start would end so, too."""
    job_set = documents(texts()["kubernetes-jobset"])["JobSet"]["spec"]
    (job,) = job_set["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    final = rule["onExitCodes"]["values"]
    # and what a command ends with that could not even begin
    assert {64, 65, 66, 70, 73, 76, 77, 78} | {1, 2, 126, 127, 128} == set(final)
    # Kubernetes takes no others
    assert final == sorted(set(final))
    assert job_set["failurePolicy"]["maxRestarts"] == 100
    assert job_set["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    replicas = documents(texts()["kubernetes-pytorchjob"])["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert all(replica["restartPolicy"] == "ExitCode" for replica in replicas.values())
    assert "--retryable" in replicas["Master"]["template"]["spec"]["containers"][0]["command"]


def test_ranks_of_several_pods_share_a_secret():
    (template,) = pod_templates(documents(texts()["kubernetes-jobset"]))
    (container,) = template["spec"]["containers"]
    (file,) = [one["value"] for one in container["env"] if one["name"] == "MEGASPEC_RUN_SECRET_FILE"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "secret"]
    assert file == f"{mounts['secret']}/secret"
    # not to everybody in the pod: its group may read it
    assert volume["secret"] == {"secretName": "hello-ranks", "defaultMode": 0o440}
    alone = kubernetes.render(spec_of(*PODS[:2], "launcher.nodes=1", *PODS[4:]))
    assert "secret" not in alone


def test_kueue_and_topology():
    made = documents(texts()["kubernetes-everything"])
    labels = made["TrainJob"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    (template,) = pod_templates(made)
    assert template["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-required-topology": "cloud/block"}
    (template,) = pod_templates(documents(kubernetes.render(spec_of(*PODS, "launcher.topology=cloud/block"))))
    (term,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "cloud/block"
    assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_quantities_may_be_whole_numbers():
    words = ("launcher.cpus_per_node=96", "launcher.resources={rdma/hca: 8}", "launcher.memory=1500Gi")
    (template,) = pod_templates(documents(kubernetes.render(spec_of(*PODS, *words))))
    asked = template["spec"]["containers"][0]["resources"]["limits"]
    assert asked == {"rdma/hca": "8", "nvidia.com/gpu": "8", "cpu": "96", "memory": "1500Gi"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("launcher.memory=64Gi", "launcher.shm=64Gi must be less than launcher.memory=64Gi, of which it is a part"),
        ("launcher.cpus_per_node=true", "launcher.cpus_per_node=true must be text"),
        ("launcher.volumes=[{claim: runs, path: '/a:b'}]", "launcher.volumes.0.path=/a:b must be text that matches"),
        (
            "launcher.volumes=[{claim: runs, path: /workspace}, {claim: x, path: /etc/megaspec-secret}]",
            "launcher.volumes.1.path=/etc/megaspec-secret is taken by another volume",
        ),
        ("run_dir=/elsewhere/x", "set run_dir=/workspace/runs/hello, or mount a volume there"),
        ("run_dir=../x", "set run_dir=/workspace/runs/hello, or mount a volume there"),
    ],
)
def test_what_pods_could_not_be_is_refused(word, told, capsys):
    words = [one for one in PODS if one.partition("=")[0] != word.partition("=")[0]]
    assert main(["train", "recipe=hello", *words, word, "--print"]) == 64
    assert told in capsys.readouterr().err


# ---- quoting

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
FIRST = {}


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word of a command: $(NAME) where there is one, and $$ for a dollar."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


@settings(max_examples=15, deadline=None)
@given(run_dir=TEXTS, variable=TEXTS, prompt=TEXTS)
def test_texts_arrive_unchanged(run_dir, variable, prompt):
    if not FIRST:
        FIRST["spec"] = spec_of(*PODS, *ON_CPU)
    spec = with_fields(
        FIRST["spec"],
        run_dir=run_dir,
        launcher__env={"NCCL_DEBUG": variable},
        train__sample={"prompt": prompt or "a", "tokens": 4},
    )
    text = kubernetes.render(spec)
    assert text.isascii()
    made = documents(text)
    assert made["ConfigMap"]["data"] == {f"{NAME}.yaml": recipe_of_job(spec)}
    (template,) = pod_templates(made)
    (container,) = template["spec"]["containers"]
    (env,) = [one["value"] for one in container["env"] if one["name"] == "NCCL_DEBUG"]
    assert expanded(env, {"HOME": "changed"}) == variable
    assert [expanded(word, {"HOME": "changed"}) for word in container["command"]].count(f"--run-dir={run_dir}") == 1


def test_dollars_are_no_variables():
    spec = with_fields(spec_of(*PODS, *ON_CPU), run_dir="a$(HOME)$$b$")
    (template,) = pod_templates(documents(kubernetes.render(spec)))
    command = template["spec"]["containers"][0]["command"]
    assert "--run-dir=a$(HOME)$$b$" in [expanded(word, {"HOME": "changed"}) for word in command]


# ---- the command


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def test_print_and_submit(here, capsys, monkeypatch):
    assert main(["train", "recipe=hello", *PODS, "--print"]) == 0
    printed = capsys.readouterr()
    # the data are in a volume that is not seen from here
    assert "not seen from here, the pods look again: data/hello" in printed.err.replace("data.blend.0.prefix=", "")
    assert not list(here.iterdir())
    monkeypatch.setenv("PATH", str(here))
    assert main(["train", "recipe=hello", *PODS]) == 64
    assert "needs kubectl, which can't be found" in capsys.readouterr().err
    assert not list(here.iterdir())
    kubectl = f"""#!{sys.executable}
import sys
open("{here}/applied", "w").write(sys.stdin.read())
print(" ".join(sys.argv[1:]))
"""
    write_program(here / "kubectl", kubectl)
    assert main(["train", "recipe=hello", *PODS]) == 0
    # never `apply`: it would change what a running job of that name reads at its next start, or do nothing
    assert "kubernetes: submitted create --filename -" in capsys.readouterr().out
    secret, _, applied = (here / "applied").read_text().partition("---\n")
    assert applied == printed.out
    # made anew for each submission, and printed nowhere
    assert re.fullmatch("[0-9a-f]{64}", yaml.safe_load(secret)["stringData"]["secret"])
    assert "kubectl create secret generic hello-ranks --from-literal=secret=" in printed.out
    write_program(here / "kubectl", "#!/bin/sh\necho 'error: no matches for kind TrainJob' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert main(["train", "recipe=hello", *PODS]) == 64
    said = capsys.readouterr().err
    assert "the cluster refuses the job: error: no matches for kind TrainJob" in said
    kinds = "trainjob,trainingruntime,configmap,secret"
    assert f"kubectl delete {kinds} --ignore-not-found --selector app.kubernetes.io/instance=hello" in said


_VALIDATE = "; if you choose to ignore these errors, turn validation off with --validate=false"
_OPENAPI = 'error validating "STDIN": error validating data: failed to download openapi: Get "https://10.0.0.1:6443/"'
UNREACHABLE = (
    "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
    "Unable to connect to the server: dial tcp: lookup api.example on 10.0.0.2:53: no such host",
    "Unable to connect to the server: net/http: TLS handshake timeout",
    f"error: {_OPENAPI}: dial tcp 10.0.0.1:6443: connect: connection refused{_VALIDATE}",
    f"error: {_OPENAPI}: tls: failed to verify certificate: x509: certificate signed by unknown authority{_VALIDATE}",
    "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
)
_WEBHOOK = 'failed calling webhook "a": Post "https://b/": dial tcp 10.0.0.9:443: connect: connection refused'
REFUSED = (
    'Error from server (AlreadyExists): error when creating "STDIN": configmaps "hello" already exists',
    "error: You must be logged in to the server (Unauthorized)",
    f"Error from server (InternalError): Internal error occurred: {_WEBHOOK}",
    f'error: error validating "STDIN": error validating data: unknown field "spec.x"{_VALIDATE}',
)


@pytest.mark.parametrize("said", [*UNREACHABLE, *REFUSED])
def test_no_cluster_is_told_from_one_that_refuses(said, here, capsys, monkeypatch):
    logged = 'E1127 20:15:25.123456    4711 memcache.go:265] "Unhandled Error" err="couldn\'t get list"'
    (here / "said").write_text(f"{logged}\n{logged}\n{said}\n")
    part = here / "part"
    kubectl = f"#!/bin/sh\n[ -e '{part}' ] && echo secret/x created\ncat '{here}/said' >&2\nexit 1\n"
    write_program(here / "kubectl", kubectl)
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}/bin{os.pathsep}/usr/bin")
    code = main(["train", "recipe=hello", *PODS])
    told = capsys.readouterr().err
    assert said.removesuffix(_VALIDATE) in told
    assert "--validate" not in told
    assert "memcache" not in told
    if said in REFUSED:
        assert code == 64
        assert "the cluster refuses the job: " in told
        return
    assert code == 74
    assert "kubectl reaches no cluster: " in told
    assert "launcher.*" not in told
    assert "kubectl delete" not in told
    # where it was lost half-way
    part.touch()
    assert main(["train", "recipe=hello", *PODS]) == 74
    assert "is deleted by: kubectl delete trainjob," in capsys.readouterr().err


def test_points_of_a_sweep_are_jobs_of_their_own(here, capsys):
    words = ["train", "-m", "recipe=hello", *PODS, "optim.lr=1e-3,2e-3", "--print"]
    assert main([*words, "sweep.name=rates"]) == 0
    made = [one["metadata"]["name"] for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "TrainJob"]
    assert made == ["rates-01", "rates-02"]
    assert main([*words, "sweep.name=rates", "launcher.job=one"]) == 64
    assert "launcher.job=one would name the job of every point; drop it, and set sweep.name" in capsys.readouterr().err
    assert main([*words, "sweep.name=Rates"]) == 64
    assert "set launcher.job=rates-01" in capsys.readouterr().err


@pytest.mark.parametrize("api", ["trainjob", "pytorchjob", "jobset"])
def test_what_has_to_be_deleted_is_all_that_is_made(api):
    spec = spec_of(*PODS, f"launcher.api={api}", "launcher.namespace=team")
    made = [document["kind"].lower() for document in yaml.safe_load_all(kubernetes.render(spec))]
    made.append(yaml.safe_load(kubernetes.secret(spec))["kind"].lower())
    command = kubernetes.deletion([spec])
    assert sorted(command.split()[2].split(",")) == sorted(made)
    assert "--namespace team" in command
    for document in yaml.safe_load_all(kubernetes.render(spec)):
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "hello"
    several = kubernetes.deletion([spec, with_fields(spec, name="other")])
    assert several.endswith("--selector 'app.kubernetes.io/instance in (hello,other)'")


def test_what_kubectl_says_of_a_refused_secret_does_not_hold_it(here, capsys, monkeypatch):
    """It may show all that it was given."""
    kubectl = f"""#!{sys.executable}
import base64, re, sys
value = re.search("[0-9a-f]{{64}}", sys.stdin.read())[0]
open("{here}/value", "w").write(value)
sys.exit(f"Error: {{value}} {{base64.b64encode(value.encode()).decode()}} is forbidden")
"""
    write_program(here / "kubectl", kubectl)
    monkeypatch.setenv("PATH", str(here))
    assert main(["train", "recipe=hello", *PODS]) == 64
    said = capsys.readouterr().err
    value = (here / "value").read_text()
    assert "Error: *** *** is forbidden" in said
    assert value not in said
    assert base64.b64encode(value.encode()).decode() not in said


def test_a_pod_starts_what_its_manifest_says(here):
    """The command of a pod, parsed by what it starts."""
    (template,) = pod_templates(documents(kubernetes.render(spec_of(*PODS, *ON_CPU))))
    command = template["spec"]["containers"][0]["command"]
    environment = os.environ | {"JOB_COMPLETION_INDEX": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, text=True)
    assert done.returncode == 64
    assert "JOB_COMPLETION_INDEX=7 must be the number of this node, from 0 to 1" in done.stderr
