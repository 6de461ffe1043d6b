"""Kubernetes: a Spec as manifests, and the job. Never imports torch.

A pod is a node: it holds all its GPUs and starts their ranks by megaspec_launchers/node.py, which ends with the run's
exit code. What a code means is told to each API in its own way: JobSet, and Trainer through it, fail for good where a
pod's failure policy says so and start all pods again otherwise; the training operator of v1 takes codes from 128 on for
such that another start may mend.

Texts stand in quotes wherever YAML could read them as anything else. `$` stands doubled in what a
pod is given, where Kubernetes would read `$(NAME)` as a variable.
"""

import base64
import math
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import yaml

from megaspec.core.errors import Problem, RecipeError, UnreachableError
from megaspec.launcher.exit_file import MEANINGS
from megaspec.launcher.spec import KubernetesLauncher, Toleration
from megaspec.spec import Spec
from megaspec_launchers.node import RESTARTED
from megaspec_launchers.recipe_file import NAME, SECRET_FILE, recipe_of_job, words_of_job

SUBMIT = "kubectl"
# Of kubectl where the API server does not answer, or is not the one that it should be; in small letters.
_UNREACHED = (
    "unable to connect to the server",
    "the connection to the server",
    "dial tcp",
    "i/o timeout",
    "tls handshake timeout",
    "x509: ",
    "unexpected eof",
    "connection reset by peer",
    "client.timeout exceeded",
    "context deadline exceeded",
)
_ADVICE = "; if you choose to ignore these errors, turn validation off with --validate=false"
# A line of klog: E1127 20:15:25.123456   4711 memcache.go:265] ...
_LOGGED = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\] ")
PORT = 29500
# Of a pod beyond the grace of its ranks: what ends with them.
MARGIN_SECONDS = 30
RECIPES = "/etc/megaspec"
# Of the Secret that the ranks of several pods share, and of its only entry.
SECRETS = "/etc/megaspec-secret"
_ENTRY = "secret"
# A Python or a package that is not in the image, an option that its megaspec does not know, a command that can't start.
NOT_BEGUN = (1, 2, 126, 127, 128)
# What ends a job for good: another start would end so, too. Kubernetes wants them in order.
FINAL = tuple(sorted({code for code in MEANINGS if code != 0 and code not in RESTARTED} | set(NOT_BEGUN)))
# Names that Kubeflow's controllers look for.
_NODE = "node"
_V1_CONTAINER = "pytorch"
_V1_PORT = "pytorchjob-port"
_V1_NODE_RANK = "RANK"
_INDEX = "JOB_COMPLETION_INDEX"
# JobSet numbers its starts, in a label of every pod; the training operator of v1 does not.
_START = "MEGASPEC_START"
_START_LABEL = "jobset.sigs.k8s.io/restart-attempt"


def render(spec: Spec, *, memory: str = "check") -> str:
    """The manifests of a run: its recipe, and the job. Pure. `memory`: ignore starts it where it is predicted not to
    fit."""
    documents = []
    for manifest in manifests(spec, memory=memory):
        documents.append(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=False))
    return _remarks(spec) + "---\n".join(documents)


def secret_name(spec: Spec) -> str | None:
    """The Secret that a run's pods read; None where one pod has all ranks, which meet inside of it."""
    if _launcher(spec).nodes == 1:
        return None
    return f"{job_name(spec)}-ranks"


def _remarks(spec: Spec) -> str:
    """What stands before the manifests: with what `submit` makes the Secret, which no text holds."""
    name = secret_name(spec)
    if name is None:
        return ""
    namespace = _launcher(spec).namespace
    where = "" if namespace is None else f" --namespace {namespace}"
    text = (
        "# The ranks of several pods know each other by a secret, which `megaspec train` makes when it submits. Applied"
    )
    text += (
        f" by hand:\n# kubectl create secret generic {name}{where} --from-literal={_ENTRY}=$(openssl rand -hex 32)\n"
    )
    return text


def secret(spec: Spec) -> str | None:
    """The manifest of the Secret, with a new value; not pure."""
    name = secret_name(spec)
    if name is None:
        return None
    metadata = _metadata(spec) | {"name": name}
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    made["stringData"] = {_ENTRY: secrets.token_hex(32)}
    return yaml.dump(made, Dumper=_Dumper, sort_keys=False)


def manifests(spec: Spec, *, memory: str = "check") -> list[dict[str, Any]]:
    """The same as plain data."""
    launcher = _launcher(spec)
    made = [_config_map(spec)]
    if launcher.api == "pytorchjob":
        made.append(_pytorch_job(spec, launcher, memory))
    elif launcher.api == "jobset":
        body = {"metadata": _metadata(spec, _queue(launcher)), "spec": _job_set(spec, launcher, memory)}
        made.append({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", **body})
    else:
        made += _train_job(spec, launcher, memory)
    return made


def submit(text: str, specs: Sequence[Spec]) -> str:
    """Hands manifests of runs to kubectl, and the secrets that they name. -> what it says of each.

    They are created, never applied: of a job that is there already `apply` would change the recipe and the secret
    under its pods, which read them when they start again, and leave the job itself as it is.
    RecipeError: there is no kubectl, or the cluster refuses them. UnreachableError: no cluster answers.
    """
    refuse_missing()
    values = []
    for spec in specs:
        made = secret(spec)
        if made is not None:
            values += yaml.safe_load(made)["stringData"].values()
            text = f"{made}---\n{text}"
    command = [SUBMIT, "create", "--filename", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = _reason(done.stderr) or f"exit code {done.returncode}"
        for value in values:
            # kubectl may show what it was given
            said = said.replace(value, "***").replace(base64.b64encode(value.encode()).decode(), "***")
        if _is_unreachable(said):
            text = f"kubectl reaches no cluster: {said}; look at `kubectl cluster-info`, its context and KUBECONFIG, "
            text += "and give the same command again"
            if done.stdout.strip():
                text += f". What was made of the job before that is deleted by: {deletion(specs)}"
            raise UnreachableError([Problem("launcher", text)])
        text = f"the cluster refuses the job: {said}; mend launcher.*, or set launcher.job to another name. What is "
        text += f"there of an earlier job, or was made of this one, is deleted by: {deletion(specs)}"
        raise RecipeError([Problem("launcher", text)])
    return done.stdout.strip()


def _reason(stderr: str) -> str:
    """What kubectl says of a failure, on one line: without what its client library logs of each try before, and without
    its advice to switch validation off, which mends nothing."""
    lines = [line for line in stderr.splitlines() if not _LOGGED.match(line)]
    said = " ".join(" ".join(lines or stderr.splitlines()).split())
    return said.replace(_ADVICE, "")


def _is_unreachable(said: str) -> bool:
    """Whether the API server gave no answer, by what kubectl says."""
    said = said.lower()
    if "error from server" in said:
        # it answered, be it of a webhook that it can't reach itself
        return "(serviceunavailable)" in said
    return any(one in said for one in _UNREACHED)


def deletion(specs: Sequence[Spec]) -> str:
    """The command that deletes all objects of runs' jobs, which are alike; not their volumes."""
    first = specs[0]
    kinds = [manifest["kind"].lower() for manifest in manifests(first)]
    # the job first: what it reads is needed until it has ended
    kinds.reverse()
    if secret_name(first) is not None:
        kinds.append("secret")
    namespace = _launcher(first).namespace
    where = "" if namespace is None else f" --namespace {namespace}"
    selector = f"app.kubernetes.io/instance={job_name(first)}"
    if len(specs) > 1:
        selector = f"'app.kubernetes.io/instance in ({','.join(job_name(spec) for spec in specs)})'"
    return f"{SUBMIT} delete {','.join(kinds)} --ignore-not-found{where} --selector {selector}"


def refuse_missing() -> None:
    """RecipeError: kubectl can't be found."""
    if shutil.which(SUBMIT) is None:
        text = (
            "launcher.kind=kubernetes needs kubectl, which can't be found; start it where the cluster is reached from, "
        )
        text += "or write the manifests with --print and apply them there"
        raise RecipeError([Problem("launcher.kind", text)])


def job_name(spec: Spec) -> str:
    """Of every object of a run."""
    return _launcher(spec).job or spec.name


class _Dumper(yaml.SafeDumper):
    """Writes what YAML 1.1 and 1.2 read differently in quotes, and every text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if "\n" in text and text.isascii() and text.replace("\n", "").isprintable():
        style = "|"
    elif not re.fullmatch(r"[A-Za-z/$._-][A-Za-z0-9/$()._=@-]*( [A-Za-z0-9/$()._=@-]+)*", text):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _launcher(spec: Spec) -> KubernetesLauncher:
    launcher = spec.launcher
    assert isinstance(launcher, KubernetesLauncher), f"launcher.kind={launcher.kind} is no job of Kubernetes"
    return launcher


def _metadata(spec: Spec, labels: dict[str, str] | None = None) -> dict[str, Any]:
    launcher = _launcher(spec)
    made: dict[str, Any] = {"name": job_name(spec)}
    if launcher.namespace is not None:
        made["namespace"] = launcher.namespace
    made["labels"] = {**_labels(spec), **(labels or {})}
    made["annotations"] = {"megaspec/run": spec.name}
    return made


def _labels(spec: Spec) -> dict[str, str]:
    """Of all that belongs to a run."""
    return {"app.kubernetes.io/name": "megaspec", "app.kubernetes.io/instance": job_name(spec)}


def _queue(launcher: KubernetesLauncher) -> dict[str, str]:
    """The labels by which kueue knows a job."""
    labels = {}
    if launcher.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = launcher.queue
    if launcher.priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = launcher.priority
    return labels


def _config_map(spec: Spec) -> dict[str, Any]:
    content = {"metadata": _metadata(spec), "data": {f"{NAME}.yaml": recipe_of_job(spec)}}
    return {"apiVersion": "v1", "kind": "ConfigMap", **content}


def _train_job(spec: Spec, launcher: KubernetesLauncher, memory: str) -> list[dict[str, Any]]:
    """Trainer v2: a runtime of the job's own, which says how pods are, and the job that takes it."""
    job_set = _job_set(spec, launcher, memory)
    job = job_set["replicatedJobs"][0]["template"]
    job["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    policy = {"numNodes": launcher.nodes, "torch": {}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(spec, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {"mlPolicy": policy, "template": {"spec": job_set}},
    }
    trainer = {"numNodes": launcher.nodes, "numProcPerNode": launcher.ranks_per_node}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job_name(spec)}
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(spec, _queue(launcher)),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [runtime, train_job]


def _job_set(spec: Spec, launcher: KubernetesLauncher, memory: str) -> dict[str, Any]:
    """A set of one indexed job, a pod for each node. Whatever ends a pod ends all; the set then starts them again."""
    host = f"{_node_0(spec)}.{job_name(spec)}"
    # another name in each start: what was signed or left in an earlier one counts no more
    start = f"{job_name(spec)}-$({_START})"
    container = _container(spec, launcher, name=_NODE, rank_from=_INDEX, host=host, start=start, memory=memory)
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{_START_LABEL}']"}}
    container["env"].append({"name": _START, "valueFrom": label})
    on_codes = {"containerName": _NODE, "operator": "In", "values": list(FINAL)}
    job = {
        "completionMode": "Indexed",
        "completions": launcher.nodes,
        "parallelism": launcher.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]},
        "template": _pod_template(spec, launcher, container, restarts={"restartPolicy": "Never"}),
    }
    for_good = {"name": "ended_for_good", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": launcher.max_restarts, "rules": [for_good]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
    }


def _node_0(spec: Spec) -> str:
    """Hostname of the pod with index 0 in JobSet's only replica."""
    return f"{job_name(spec)}-{_NODE}-0-0"


def _pytorch_job(spec: Spec, launcher: KubernetesLauncher, memory: str) -> dict[str, Any]:
    """v1: a master, which is node 0, and workers."""
    host = f"{job_name(spec)}-master-0"
    words = {"name": _V1_CONTAINER, "rank_from": _V1_NODE_RANK, "host": host, "start": job_name(spec), "memory": memory}
    container = _container(spec, launcher, **words, more=("--retryable",))
    container["ports"] = [{"name": _V1_PORT, "containerPort": PORT}]
    replicas = {"Master": _replica(spec, launcher, container, 1)}
    if launcher.nodes > 1:
        replicas["Worker"] = _replica(spec, launcher, container, launcher.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(spec, _queue(launcher)),
        "spec": {
            "runPolicy": {"backoffLimit": launcher.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _replica(spec: Spec, launcher: KubernetesLauncher, container: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        "replicas": count,
        # codes from 128 on start a pod again, others end the job
        "restartPolicy": "ExitCode",
        "template": _pod_template(spec, launcher, container, restarts={}),
    }


def _pod_template(
    spec: Spec, launcher: KubernetesLauncher, container: dict[str, Any], *, restarts: dict[str, str]
) -> dict[str, Any]:
    labels = _labels(spec)
    metadata: dict[str, Any] = {"labels": labels}
    pod: dict[str, Any] = {
        **restarts,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(launcher.grace_seconds) + MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": launcher.user,
            "runAsGroup": launcher.user,
            "fsGroup": launcher.user,
            # the files of a large volume change hands once, not at every start
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes(spec, launcher),
    }
    if launcher.node_selector:
        pod["nodeSelector"] = dict(launcher.node_selector)
    if launcher.tolerations:
        pod["tolerations"] = [_toleration(one) for one in launcher.tolerations]
    if launcher.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in launcher.pull_secrets]
    if launcher.topology is not None and launcher.queue is not None:
        metadata["annotations"] = {"kueue.x-k8s.io/podset-required-topology": launcher.topology}
    elif launcher.topology is not None:
        same = {"labelSelector": {"matchLabels": labels}, "topologyKey": launcher.topology}
        pod["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same]}}
    return {"metadata": metadata, "spec": pod}


def _toleration(said: Toleration) -> dict[str, str]:
    made = {"key": said.key, "operator": "Exists"}
    if said.value is not None:
        made |= {"operator": "Equal", "value": said.value}
    if said.effect is not None:
        made["effect"] = said.effect
    return made


def _container(
    spec: Spec,
    launcher: KubernetesLauncher,
    *,
    name: str,
    rank_from: str,
    host: str,
    start: str,
    memory: str,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    words = ["python3", "-P", "-m", "megaspec_launchers.node", f"--nodes={launcher.nodes}"]
    words += [f"--ranks={launcher.ranks_per_node}", f"--rank-from={rank_from}", f"--host={host}", f"--port={PORT}"]
    options = [f"--grace={launcher.grace_seconds:g}", f"--run-dir={spec.run_dir}", *more]
    options += ["--", *words_of_job(RECIPES, spec, memory=memory)]
    # what a program writes into its home, and what compilers keep, goes with the pod
    # and a user that the image does not know has no name, which torch's compiler asks for
    variables = {"HOME": "/tmp", "USER": "megaspec", **launcher.env}
    if secret_name(spec) is not None:
        variables[SECRET_FILE] = f"{SECRETS}/{_ENTRY}"
    resources: dict[str, str] = dict(launcher.resources)
    if launcher.hardware != "cpu":
        resources[launcher.gpu_resource] = str(launcher.ranks_per_node)
    if launcher.cpus_per_node is not None:
        resources["cpu"] = launcher.cpus_per_node
    if launcher.memory is not None:
        resources["memory"] = launcher.memory
    made: dict[str, Any] = {
        "name": name,
        "image": launcher.image,
        # in `start` Kubernetes puts a variable's value
        "command": [*words, f"--job={start}", *(_escaped(word) for word in options)],
        "workingDir": launcher.work_dir,
        "env": [{"name": name, "value": _escaped(value)} for name, value in variables.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(spec, launcher),
    }
    if resources:
        made["resources"] = {"requests": resources, "limits": dict(resources)}
    return made


def _escaped(text: str) -> str:
    """What Kubernetes, which reads `$(NAME)` and `$$`, passes on as it is here."""
    return text.replace("$", "$$")


def _volumes(spec: Spec, launcher: KubernetesLauncher) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": job_name(spec)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": launcher.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if secret_name(spec) is not None:
        # to the pods' own group alone
        made.append({"name": "secret", "secret": {"secretName": secret_name(spec), "defaultMode": 0o440}})
    for number, volume in enumerate(launcher.volumes):
        claim: dict[str, Any] = {"claimName": volume.claim}
        if volume.read_only:
            claim["readOnly"] = True
        made.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
    return made


def _mounts(spec: Spec, launcher: KubernetesLauncher) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": f"{RECIPES}/recipes", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if secret_name(spec) is not None:
        made.append({"name": "secret", "mountPath": SECRETS, "readOnly": True})
    for number, volume in enumerate(launcher.volumes):
        mount: dict[str, Any] = {"name": f"volume-{number}", "mountPath": volume.path}
        if volume.read_only:
            mount["readOnly"] = True
        made.append(mount)
    return made
