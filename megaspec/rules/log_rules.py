"""Rules about where a run is reported to."""

from megaspec.core.errors import Problem
from megaspec.rules.case import Case

SERVICE_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
"""By kind of an entry of log.sinks: what has to be installed. A sink of a plug-in brings its own."""


def tensorboard_is_installed(case: Case) -> Problem | None:
    """TensorBoard files are written with the package tensorboard."""
    if not case.recipe.log.tensorboard or "tensorboard" in case.target.versions:
        return None
    text = "log.tensorboard=true needs the package tensorboard; install megaspec[tensorboard] or set it to false"
    return Problem("log.tensorboard", text)


def sinks_are_installed(case: Case) -> Problem | None:
    """A service that a run is reported to needs its package."""
    for number, sink in enumerate(case.recipe.log.sinks):
        package = SERVICE_PACKAGES.get(sink.kind)
        if package is not None and package not in case.target.versions:
            key = f"log.sinks.{number}.kind"
            text = (
                f"{key}={sink.kind} needs the package {package}; pip install 'megaspec[{sink.kind}]', or log.sinks=[]"
            )
            return Problem(key, text)
    return None


def no_password_in_an_address(case: Case) -> Problem | None:
    """An address holds no user and no password: recipes and run folders are read by others."""
    for number, sink in enumerate(case.recipe.log.sinks):
        if sink.kind != "mlflow" or sink.tracking_uri is None:
            continue
        scheme, _, place = sink.tracking_uri.partition("://")
        host, _, _ = place.partition("/")
        if "@" in host:
            key = f"log.sinks.{number}.tracking_uri"
            shown = f"{key}={scheme}://***@{host.rpartition('@')[2]}"
            text = f"{shown} must hold no user or password; leave them out of it"
            return Problem(key, f"{text}, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
    return None


def each_service_once(case: Case) -> Problem | None:
    """A kind of service stands once in log.sinks: a run has one id there."""
    seen: dict[str, int] = {}
    for number, sink in enumerate(case.recipe.log.sinks):
        if sink.kind in SERVICE_PACKAGES and sink.kind in seen:
            key = f"log.sinks.{number}.kind"
            return Problem(key, f"{key}={sink.kind} is that of log.sinks.{seen[sink.kind]} as well; drop one of them")
        seen[sink.kind] = number
    return None
