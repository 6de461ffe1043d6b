"""How ranks are started, and started again."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from megaspec.core.frozen import (
    Auto,
    ByName,
    Degree,
    Frozen,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    PositiveInt,
)

LayoutWord = Annotated[str, Field(min_length=1, max_length=256)]
SEARCH: Literal["search"] = "search"


class RestartsSpec(Frozen):
    """How `--supervise` starts a run again after a failure. A restart that devices cause is not counted, and
    waits only where the one before it was for devices, too, and nothing was saved since."""

    most: NonNegativeCount = 100
    """Restarts within `window_hours`; the run is given up where one more is needed."""
    window_hours: PositiveFloat = 24.0
    """Hours over which restarts are counted."""
    without_progress: PositiveCount = 3
    """Attempts in a row that save no new step, after which the run is given up."""
    first_wait_seconds: NonNegativeFloat = 1.0
    """Wait before a restart. It doubles with each attempt in a row that saved no new step, and is varied by a half, so
    that runs that fail together don't start again together."""
    longest_wait_seconds: NonNegativeFloat = 300.0
    """Bound of that wait."""
    look_seconds: PositiveFloat = 30.0
    """Between two looks at which devices may be used: one that is taken away or comes back may change the layout."""


class LocalLauncher(Frozen):
    """Ranks as processes of this machine."""

    kind: Literal["local"] = "local"
    ranks: Auto[Degree] = "auto"
    """World size. auto: one per GPU, as many as divide the global batch; without a GPU, one per core up to 2."""
    max_restarts: NonNegativeCount = 0
    """How often a run whose ranks died is started again from its newest good checkpoint, without `--supervise`."""
    restarts: RestartsSpec = RestartsSpec()
    """How `--supervise` starts it again."""
    layouts: tuple[tuple[LayoutWord, ...], ...] | Literal["search"] = ()
    """What `--supervise` takes where the layout of the recipe does not fit the devices that are left: the first of this
    list that does, each a list of words such as `parallelism.tp=1`; or `search`, the fastest of all that fit. Without
    `launcher.ranks` among its words a layout has the ranks that its degrees make, or one for each device that is left.
    The global batch and the order of the data stay."""
    grace_seconds: PositiveFloat = 30.0
    """Time that ranks have to finish their step and save after SIGTERM, SIGUSR1 or Ctrl-C before they are killed."""
    timeout_seconds: PositiveFloat = 600.0
    """Time after which a collective that has not finished counts as hung."""


def parse_quantity(value: Any) -> Any:
    """The text of a whole number, as which Kubernetes reads it too; anything else as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


# What stands in a batch script or manifest as it is. Others are refused, never escaped: no scheduler's own grammar of
# options says how.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:@|&*+\[\]()/-]{0,255}$")]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+/-]{0,127}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,127}$")]
# Without a null byte, which no argument and no variable can hold.
Line = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
# An image, or a file that holds one: no option of the program that it is given to.
Image = Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9/.][^\x00-\x20\x7f,]*$")]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")]
# Commas and colons stand between the parts of a list of mounts.
MountPath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00-\x1f\x7f,:]*$")]
# Kubernetes takes no colon there.
PodPath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00:]*$")]
# Kubernetes: a name of RFC 1123, a name that may have a prefix, a quantity.
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
Quantity = Annotated[str, BeforeValidator(parse_quantity), Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?$")]
Variables = Annotated[dict[VariableName, Line], AfterValidator(ByName)]
Quantities = Annotated[dict[LabelKey, Quantity], AfterValidator(ByName)]
Labels = Annotated[dict[LabelKey, LabelValue], AfterValidator(ByName)]


class ClusterLauncher(Frozen):
    """What every scheduler is told: a job of several nodes, on each of which a process starts the node's ranks."""

    ranks: Auto[Degree] = "auto"
    """World size: nodes · ranks_per_node, which auto fills in."""
    nodes: Degree = 1
    """Nodes of the job."""
    ranks_per_node: Degree = 8
    """Ranks of a node, each with a GPU of its own; with hardware=cpu processes without one."""
    hardware: str
    """The GPUs of a node: a name that `hardware=` knows, such as H100; or cpu."""
    max_restarts: NonNegativeCount = 100
    """How often the job is started again after a lost rank or node, a preemption, a hang or the end of its time."""
    restarts: RestartsSpec = RestartsSpec()
    """How the only node of a job starts its ranks again, before the job goes back to its scheduler."""
    layouts: tuple[tuple[LayoutWord, ...], ...] | Literal["search"] = ()
    """On the only node of a job: what is taken where devices are gone, as of launcher=local. With launcher.min_nodes
    what is taken on fewer nodes. A job holds all that was decided for its own layout, so these name every degree that
    changes."""
    grace_seconds: PositiveFloat = 120.0
    """Time that ranks have to finish their step and save when the job is asked to stop before they are killed."""
    timeout_seconds: PositiveFloat = 600.0
    """Time after which a collective that has not finished counts as hung."""
    env: Variables = Field(default_factory=dict)
    """Variables of every rank, such as NCCL_SOCKET_IFNAME. None that holds a secret or names code: see the rules."""

    def on_nodes(self, ranks: int) -> LocalLauncher:
        """What the ranks themselves are started with: the scheduler's part is done when a node starts them."""
        return LocalLauncher(
            ranks=ranks,
            restarts=self.restarts,
            layouts=self.layouts,
            grace_seconds=self.grace_seconds,
            timeout_seconds=self.timeout_seconds,
        )


class Mount(Frozen):
    """A folder of the host that a container sees."""

    source: MountPath
    """Folder of the host."""
    target: MountPath | None = None
    """Where the container sees it; null: at the same path."""
    read_only: bool = False
    """Whether the container may not write there."""


class SlurmContainer(Frozen):
    """The container that a node's ranks run in. The folder that the job is submitted from is mounted into it."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: the plug-in of NVIDIA's enroot for srun; apptainer: the program."""
    image: Image
    """`nvcr.io#nvidia/pytorch:26.06-py3` or a .sqsh file for pyxis, a .sif file or docker://... for apptainer."""
    mounts: tuple[Mount, ...] = ()
    """More folders of the host."""


class SlurmLauncher(ClusterLauncher):
    """A batch job of SLURM. Rank and task counts, the signal before the limit and requeueing are written for you."""

    kind: Literal["slurm"]
    # and a minute more has to be a number that sbatch takes: 65535 at most
    grace_seconds: Annotated[PositiveFloat, Field(le=65475)] = 120.0
    """Time that ranks have to finish their step and save when the job is asked to stop before they are killed."""
    min_nodes: Degree | None = None
    """Nodes with which the job may start, and go on, where SLURM has no more for it: each start takes as many as it is
    given, and as a layout fits. The layouts are those of `layouts`; without any, the recipe's own with what it leaves
    open decided anew. The global batch and the order of the data stay. null: all `nodes` are needed."""
    time: Annotated[str, Field(pattern=r"^(\d{1,3}-)?\d{1,2}:[0-5]\d:[0-5]\d$")] = "24:00:00"
    """Limit of one start: hours:minutes:seconds or days-hours:minutes:seconds. The run goes on in the next start."""
    account: Word | None = None
    """Account that is charged; null: the user's own."""
    partition: Word | None = None
    """Partition; null: the cluster's default."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have."""
    reservation: Word | None = None
    """Reservation to run in."""
    gres: Word = "gpu"
    """What SLURM calls a GPU: gpu, or gpu:h100 where a cluster has several kinds. How many a node gives is
    ranks_per_node. Not asked for with hardware=cpu."""
    cpus_per_node: PositiveInt | None = None
    """Cores of a node; null: all of it where exclusive, else the partition's default."""
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = "0"
    """Memory of a node in MiB, or with K, M, G, T; 0: all of it; null: the partition's default."""
    exclusive: bool = True
    """No other job runs on its nodes."""
    modules: tuple[ModuleName, ...] = ()
    """Environment modules to load, in this order."""
    container: SlurmContainer | None = None
    """null: ranks run on the node itself, with the environment that the job is submitted from."""

    @property
    def least_nodes(self) -> int:
        """Nodes that the job needs at least."""
        if self.min_nodes is None:
            return self.nodes
        return self.min_nodes

    @property
    def is_elastic(self) -> bool:
        """Whether fewer nodes than it asks for may do."""
        return self.least_nodes < self.nodes


class ClaimVolume(Frozen):
    """A persistent volume claim that is there already."""

    claim: ObjectName
    """Its name."""
    path: PodPath
    """Where the pods see it."""
    read_only: bool = False
    """Whether they may not write there."""


class Toleration(Frozen):
    """A taint that the pods put up with."""

    key: LabelKey
    value: LabelValue | None = None
    """null: any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """null: any."""


class KubernetesLauncher(ClusterLauncher):
    """A job of Kubernetes: a pod for each node. No pod runs as root, holds a capability or sees a service account."""

    kind: Literal["kubernetes"]
    api: Literal["trainjob", "pytorchjob", "jobset"] = "trainjob"
    """trainjob: Kubeflow Trainer v2; pytorchjob: Kubeflow's training operator v1; jobset: JobSet alone."""
    job: ObjectName | None = None
    """Name of the job; null: that of the run, which must be one that Kubernetes takes then."""
    namespace: ObjectName | None = None
    """null: kubectl's own."""
    image: Image
    """Image with megaspec: launchers/docker/ makes one."""
    work_dir: AbsolutePath = "/workspace"
    """Folder in which relative paths of the recipe begin. It lies in a volume, where the run is kept."""
    volumes: tuple[ClaimVolume, ...] = Field(min_length=1)
    """Where the run and its data are: every pod sees them."""
    user: Annotated[int, Field(gt=0, lt=2**31)] = 1000
    """User and group of the pods, and the group of their volumes."""
    cpus_per_node: Quantity | None = None
    """Cores of a pod, requested and limited; null: not said."""
    memory: Quantity | None = None
    """Memory of a pod, requested and limited, /dev/shm included; null: not said."""
    shm: Quantity = "64Gi"
    """/dev/shm, which NCCL and data loaders' workers share memory through; kept in memory."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """What the cluster calls a GPU. Not asked for with hardware=cpu."""
    resources: Quantities = Field(default_factory=dict)
    """More of a pod's resources, such as network cards: {rdma/hca: 8}."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that the nodes must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods put up with."""
    topology: LabelKey | None = None
    """Label of nodes, such as one for a rack or a block: all pods lie where it is the same. By kueue where there is a
    queue, by affinity else."""
    queue: ObjectName | None = None
    """Local queue of kueue."""
    priority: ObjectName | None = None
    """Workload priority class of kueue; it needs a queue."""
    pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets with which the image is pulled."""


def _kind_of(said: Any) -> Any:
    """Which class a section is read as. Without a kind it is of ranks of this machine."""
    if isinstance(said, Mapping):
        return said.get("kind", "local")
    return getattr(said, "kind", None)


LauncherSpec = Annotated[
    Annotated[LocalLauncher, Tag("local")]
    | Annotated[SlurmLauncher, Tag("slurm")]
    | Annotated[KubernetesLauncher, Tag("kubernetes")],
    Discriminator(
        _kind_of,
        # what pydantic says of a discriminator that is a field
        custom_error_type="union_tag_invalid",
        custom_error_context={"discriminator": "'kind'", "tag": "", "expected_tags": "'local', 'slurm', 'kubernetes'"},
    ),
]
