"""How ranks are started."""

from typing import Literal

from megaspec.core.frozen import Auto, Degree, Frozen, NonNegativeCount, PositiveFloat


class LocalLauncher(Frozen):
    """Ranks as processes of this machine."""

    kind: Literal["local"] = "local"
    ranks: Auto[Degree] = "auto"
    """World size. auto: one per GPU, as many as divide the global batch; without a GPU, one per core up to 2."""
    max_restarts: NonNegativeCount = 0
    """How often a run whose ranks died is started again from its newest good checkpoint."""
    grace_seconds: PositiveFloat = 30.0
    """Time that ranks have to finish their step and save after SIGTERM, SIGUSR1 or Ctrl-C before they are killed."""
    timeout_seconds: PositiveFloat = 600.0
    """Time after which a collective that has not finished counts as hung."""


LauncherSpec = LocalLauncher
