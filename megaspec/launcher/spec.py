"""How ranks are started, and started again."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Auto, Degree, Frozen, NonNegativeCount, NonNegativeFloat, PositiveCount, PositiveFloat

LayoutWord = Annotated[str, Field(min_length=1, max_length=256)]
SEARCH: Literal["search"] = "search"


class RestartsSpec(Frozen):
    """How `--supervise` starts a run again after a failure. A restart that devices cause is not counted."""

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


LauncherSpec = LocalLauncher
