"""Rules about jobs of a cluster: what a batch script or manifest can't say, or should not."""

import re
from pathlib import PurePosixPath

from megaspec.core.errors import Problem, RecipeError
from megaspec.data.spec import DOWNLOADS
from megaspec.data.urls import all_url_places
from megaspec.estimate.hardware import hardware_named
from megaspec.launcher.spec import ClusterLauncher, KubernetesLauncher, RestartsSpec, SlurmLauncher
from megaspec.rules.case import Case

CPU = "cpu"
# Pods, services and hostnames add to a job's name: `-node-0-0` and five letters of a pod's own.
MOST_OF_A_NAME = 46
# Variables that the texts set themselves, and those of megaspec's own.
OURS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|HOME|USER|PATH"
    r"|TORCHELASTIC_.*|PET_.*|SLURM_.*|MEGASPEC_.*)"
)
# By variables such as these a process loads code: libraries, programs, options of a compiler or an interpreter, and
# folders from which compiled code is taken as it lies there. HF_HOME holds data.
CODE = re.compile(
    r"(LD_.*|PYTHON.*|PIP_.*|UV_.*|GIT_.*|BASH_.*|ENV|PROMPT_COMMAND|PS[0-4]|IFS|SHELL|SHELLOPTS|EDITOR|PAGER"
    r"|CC|CXX|CPP|CUDACXX|.*HOSTCXX|.*CFLAGS|.*CXXFLAGS|.*LDFLAGS|.*NVCC.*|.*CMAKE.*"
    r"|.*PLUGIN.*|.*_PATH|.*PRELOAD.*|.*INJECTION.*|.*_LIB|.*_LIBRARY|.*_COMMAND|.*_OPTIONS|NCCL_CONF_FILE"
    r"|.*_CACHE_DIR|.*_EXTENSIONS_DIR|XDG_.*|(?!HF_).*_HOME)"
)
SECRETS = re.compile(
    r"(.*_)?((API|ACCESS|SECRET|PRIVATE|AUTH)?KEY|TOKEN|SECRET|JWT|PAT|AUTH|COOKIE|PWD|.*PASS|.*PASSWORD|.*PASSWD"
    r"|PASSPHRASE|CREDENTIALS?)(_.*)?"
)
# A user, or a user and a password, in an address.
ADDRESS_WITH_USER = re.compile(r"://[^/?#\s]*@")
# That a node may have. A larger number in launcher.gres names a kind, such as gpu:3090.
MOST_GPUS = 64
# Of quantities of Kubernetes.
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def ranks_fill_the_nodes(case: Case) -> Problem | None:
    """launcher.ranks is launcher.nodes times launcher.ranks_per_node."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, ClusterLauncher):
        return None
    world = launcher.nodes * launcher.ranks_per_node
    if launcher.ranks == world:
        return None
    text = f"launcher.ranks={launcher.ranks} must be launcher.nodes={launcher.nodes} · "
    text += f"launcher.ranks_per_node={launcher.ranks_per_node} = {world}; drop launcher.ranks"
    nodes, rest = divmod(launcher.ranks, launcher.ranks_per_node)
    if nodes and not rest:
        text += f", or set launcher.nodes={nodes}"
    return Problem("launcher.ranks", text)


def only_one_node_is_supervised(case: Case) -> Problem | None:
    """launcher.restarts is read by the only node of a job; launcher.layouts by that, or with launcher.min_nodes."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, ClusterLauncher) or launcher.nodes == 1:
        return None
    is_elastic = isinstance(launcher, SlurmLauncher) and launcher.is_elastic
    said = {
        "launcher.layouts": bool(launcher.layouts) and not is_elastic,
        "launcher.restarts": launcher.restarts != RestartsSpec(),
    }
    for key, is_set in said.items():
        if not is_set:
            continue
        text = f"{key} is read where a job has one node, whose ranks are supervised, and launcher.nodes="
        text += f"{launcher.nodes}: a scheduler starts all nodes again or none, launcher.max_restarts times; drop {key}"
        if key == "launcher.layouts" and isinstance(launcher, SlurmLauncher):
            text += ", or set launcher.min_nodes below launcher.nodes"
        return Problem(key, text)
    return None


def fewer_nodes_are_some_of_all(case: Case) -> Problem | None:
    """launcher.min_nodes is at most launcher.nodes."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, SlurmLauncher) or launcher.min_nodes is None:
        return None
    if launcher.min_nodes <= launcher.nodes:
        return None
    text = f"launcher.min_nodes={launcher.min_nodes} must be at most launcher.nodes={launcher.nodes}, which the job "
    text += "asks for; lower it, or raise launcher.nodes"
    return Problem("launcher.min_nodes", text)


def nodes_have_such_gpus(case: Case) -> Problem | None:
    """launcher.hardware is cpu or a GPU that is known, of which a node has as many as launcher.ranks_per_node."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, ClusterLauncher) or launcher.hardware == CPU:
        return None
    try:
        hardware = hardware_named(launcher.hardware)
    except RecipeError as error:
        return Problem("launcher.hardware", f"launcher.{error.problems[0].message}, or cpu")
    if launcher.ranks_per_node <= hardware.node_size:
        return None
    text = f"launcher.ranks_per_node={launcher.ranks_per_node} must be at most the {hardware.node_size} GPUs that a "
    text += (
        f"node of launcher.hardware={launcher.hardware} has; set it to {hardware.node_size} and raise launcher.nodes"
    )
    return Problem("launcher.ranks_per_node", text)


def variables_hold_no_secret(case: Case) -> Problem | None:
    """launcher.env holds no secret: recipes, run folders and batch scripts are read by others."""
    for name in _variables(case):
        if SECRETS.fullmatch(name):
            key = f"launcher.env.{name}"
            text = f"{key} names a secret, and recipe, run folder and job are read by others; drop it and"
            return Problem(key, f"{text} {_way_of_secrets(case)}")
    for name, value in _values(case).items():
        if ADDRESS_WITH_USER.search(value):
            key = f"launcher.env.{name}"
            text = f"{key} holds an address with a user or password, and recipe, run folder and job are read by others;"
            return Problem(key, f"{text} drop it and {_way_of_secrets(case)}")
    return None


def _way_of_secrets(case: Case) -> str:
    if isinstance(case.recipe.launcher, KubernetesLauncher):
        return "keep it in a file of the run's volume that only its user can read"
    return "export it in the shell that submits the job"


def variables_load_no_code(case: Case) -> Problem | None:
    """launcher.env sets nothing by which a process loads code: a recipe is data."""
    for name in _variables(case):
        if CODE.fullmatch(name):
            key = f"launcher.env.{name}"
            text = f"{key} can make a process load code, and a recipe is data; drop it, and set it in the image, "
            text += "in a module, or in the shell that submits the job"
            return Problem(key, text)
    return None


def variables_are_not_ours(case: Case) -> Problem | None:
    """launcher.env sets nothing that the job sets itself."""
    for name in _variables(case):
        if OURS.fullmatch(name):
            key = f"launcher.env.{name}"
            return Problem(key, f"{key} is set by the job itself; drop it")
    return None


def job_outlives_its_grace(case: Case) -> Problem | None:
    """launcher.time is longer than launcher.grace_seconds, which is kept for the last checkpoint."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, SlurmLauncher):
        return None
    if seconds_of(launcher.time) > 2 * launcher.grace_seconds:
        return None
    text = f"launcher.time={launcher.time} must be more than twice launcher.grace_seconds={launcher.grace_seconds:g}, "
    text += "which are kept for the last checkpoint; raise launcher.time, or lower launcher.grace_seconds"
    return Problem("launcher.time", text)


def gpus_are_counted_once(case: Case) -> Problem | None:
    """launcher.gres names one kind of GPU, without a count: that is launcher.ranks_per_node."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, SlurmLauncher):
        return None
    first, _, kind = launcher.gres.partition(":")
    is_counted = kind.isdigit() and int(kind) <= MOST_GPUS
    if not is_counted and not re.search("[:,]", kind) and "," not in first:
        return None
    name = first.partition(",")[0]
    text = f"launcher.gres={launcher.gres} must name one kind of GPU and no count, which is launcher.ranks_per_node="
    text += f"{launcher.ranks_per_node}; set launcher.gres={name}"
    return Problem("launcher.gres", f"{text}, or {name}:KIND where a cluster has several kinds")


def seconds_of(time: str) -> int:
    """Of SLURM's `days-hours:minutes:seconds`."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = clock.split(":")
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)


def job_has_a_name(case: Case) -> Problem | None:
    """The name of a Kubernetes job is one of Kubernetes': lower-case letters, digits and dashes, and short."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher):
        return None
    if launcher.job is not None:
        key = "launcher.job"
        name = launcher.job
    else:
        key = "name"
        name = case.recipe.name
    if re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= MOST_OF_A_NAME:
        return None
    nearest = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:MOST_OF_A_NAME].strip("-") or "run"
    text = f"{key}={name} must be one that Kubernetes takes: at most {MOST_OF_A_NAME} lower-case letters, digits and "
    text += f"dashes, the first a letter; set launcher.job={nearest}"
    return Problem(key, text)


def run_lies_in_a_volume(case: Case) -> Problem | None:
    """The folder of a run that pods train lies in a volume that they may write: all else is gone with them."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher):
        return None
    # run_dir may be left open: it then lies in the folder runs
    run_dir = str(case.recipe.run_dir)
    if _pods_may_write(launcher, run_dir):
        return None
    place = PurePosixPath(launcher.work_dir, run_dir)
    writable = [volume.path for volume in launcher.volumes if not volume.read_only]
    if writable and (PurePosixPath(run_dir).is_absolute() or ".." in place.parts):
        way = f"set run_dir={writable[0].rstrip('/')}/runs/{case.recipe.name}, or mount a volume there"
    elif writable:
        way = f"set launcher.work_dir={writable[0]}, or mount a volume at {launcher.work_dir}"
    else:
        way = "give it a volume without read_only"
    text = f"run_dir={run_dir} in launcher.work_dir={launcher.work_dir} must lie in a volume that pods may write, or "
    return Problem("launcher.work_dir", f"{text}it is gone with them; {way}")


def downloads_lie_in_a_volume(case: Case) -> Problem | None:
    """Pods fetch data into a volume that they may write, or into /tmp: all else is read-only."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher):
        return None
    for place in all_url_places(case.recipe.data):
        if _pods_may_write(launcher, place.download_dir) or PurePosixPath(place.download_dir).is_relative_to("/tmp"):
            continue
        key = f"{place.section}.download_dir"
        text = (
            f"{key}={place.download_dir} in launcher.work_dir={launcher.work_dir} must lie in a volume that pods may "
        )
        return Problem(
            key, f"{text}write, since {place.url} is fetched there; set {key}={DOWNLOADS}, or mount one there"
        )
    return None


def _pods_may_write(launcher: KubernetesLauncher, path: str) -> bool:
    """Whether a path of pods lies in a volume that they may write."""
    place = PurePosixPath(launcher.work_dir, path)
    nearest = None
    for volume in launcher.volumes:
        if place.is_relative_to(volume.path) and (nearest is None or len(volume.path) > len(nearest.path)):
            nearest = volume
    return nearest is not None and not nearest.read_only and ".." not in place.parts


def volumes_have_places(case: Case) -> Problem | None:
    """No two volumes of pods are mounted at one place, or over what every pod has."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher):
        return None
    seen = ["/dev/shm", "/tmp", "/etc/megaspec", "/etc/megaspec/recipes", "/etc/megaspec-secret", "/"]
    for number, volume in enumerate(launcher.volumes):
        place = str(PurePosixPath(volume.path))
        if place in seen:
            key = f"launcher.volumes.{number}.path"
            return Problem(key, f"{key}={volume.path} is taken by another volume of the pods; set another folder")
        seen.append(place)
    return None


def shm_fits_into_the_memory(case: Case) -> Problem | None:
    """launcher.shm is less than launcher.memory: what lies in /dev/shm counts as memory of the pod."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher) or launcher.memory is None:
        return None
    if bytes_of(launcher.shm) < bytes_of(launcher.memory):
        return None
    text = f"launcher.shm={launcher.shm} must be less than launcher.memory={launcher.memory}, of which it is a part: "
    return Problem("launcher.shm", f"{text}a pod that fills it is killed; lower launcher.shm, or raise launcher.memory")


def bytes_of(quantity: str) -> float:
    """Of a quantity of Kubernetes'."""
    number = quantity.rstrip("mkKMGTPi")
    return float(number) * _UNITS[quantity[len(number) :]]


def priority_has_a_queue(case: Case) -> Problem | None:
    """A priority of kueue needs a queue of kueue."""
    launcher = case.recipe.launcher
    if not isinstance(launcher, KubernetesLauncher) or launcher.priority is None or launcher.queue is not None:
        return None
    text = (
        f"launcher.priority={launcher.priority} is read by kueue alone, and launcher.queue is null; set launcher.queue"
    )
    return Problem("launcher.priority", f"{text}, or drop it")


def _variables(case: Case) -> list[str]:
    return list(_values(case))


def _values(case: Case) -> dict[str, str]:
    launcher = case.recipe.launcher
    if not isinstance(launcher, ClusterLauncher):
        return {}
    return dict(launcher.env)
