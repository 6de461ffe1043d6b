"""Rules about where a run is reported to."""

from megaspec.core.errors import Problem
from megaspec.core.problems import did_you_mean
from megaspec.data.spec import evaluation_sets
from megaspec.log.alerts import OF_EVALUATIONS, known_metrics
from megaspec.log.scalars import SPLIT
from megaspec.precision.spec import Fp8Precision, Fp16Precision
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
    """An address holds no user, no password and no query: recipes and run folders are read by others."""
    for number, sink in enumerate(case.recipe.log.sinks):
        if sink.kind != "mlflow" or sink.tracking_uri is None:
            continue
        scheme, _, place = sink.tracking_uri.partition("://")
        host, _, _ = place.partition("/")
        key = f"log.sinks.{number}.tracking_uri"
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        if "@" in host:
            shown = f"{key}={scheme}://***@{host.rpartition('@')[2]}"
            return Problem(key, f"{shown} must hold no user or password; leave them out of it, and {remedy}")
        if "?" in place:
            shown = f"{key}={scheme}://{host.partition('?')[0]}?***"
            return Problem(key, f"{shown} must hold no query, which may be a key; leave it out, and {remedy}")
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


def alerts_look_at_what_there_is(case: Case) -> Problem | None:
    """An alert looks at a number that runs have."""
    for number, alert in enumerate(case.recipe.log.alerts):
        known = [*known_metrics(), *_losses_of_sets(case)]
        if alert.metric not in known:
            key = f"log.alerts.{number}.metric"
            hint = did_you_mean(alert.metric, known) or f"there are {', '.join(known[:6])} and more"
            return Problem(key, f"{key}={alert.metric} is no number of a run; {hint}")
    return None


def alerts_look_at_what_this_run_has(case: Case) -> Problem | None:
    """An alert looks at a number that this run has: one that is never known would never be raised."""
    recipe = case.recipe
    for number, alert in enumerate(recipe.log.alerts):
        why = ""
        if alert.metric in (*OF_EVALUATIONS, *_losses_of_sets(case)) and recipe.train.eval_every == 0:
            why = "is known where train.eval_every=0 evaluates; set train.eval_every=100"
        elif alert.metric.startswith("mfu_") and case.target.gpu is None:
            why = "needs a GPU whose peak is known, and this run is on CPUs; watch tokens_per_second"
        elif alert.metric == "loss_scale" and not isinstance(recipe.precision, Fp16Precision):
            why = f"is known with precision=fp16 alone, this is precision.kind={recipe.precision.kind}; watch grad_norm"
        elif alert.metric == "fp8_saturated" and not _has_delayed_scales(case):
            why = "is known with precision.recipe=delayed of fp8 alone; watch grad_norm"
        elif alert.metric == "fp8_saturated" and recipe.kernels.linear == "te":
            why = "is not counted with kernels.linear=te; watch grad_norm, or set kernels.linear=torch"
        if why:
            key = f"log.alerts.{number}.metric"
            return Problem(key, f"{key}={alert.metric} {why}")
    return None


def alerts_can_be_raised(case: Case) -> Problem | None:
    """An alert's number is known as often as its condition has to hold in a row."""
    train = case.recipe.train
    done = case.facts.start.step
    for number, alert in enumerate(case.recipe.log.alerts):
        if alert.metric in (*OF_EVALUATIONS, *_losses_of_sets(case)):
            most = _evaluations(case)
            what = f"evaluations that train.steps={train.steps} and train.eval_every={train.eval_every} make"
        else:
            most = train.steps - done
            for steps in train.skip_steps:
                most -= steps.last - steps.first + 1
            what = f"steps that train.steps={train.steps} makes"
        # another rule says that there are none
        if most > 0 and alert.for_steps > most:
            key = f"log.alerts.{number}.for_steps"
            text = f"{key}={alert.for_steps} must be at most {most}, the {what}, or it is never raised"
            return Problem(key, f"{text}; lower it, or drop the alert")
    return None


def alerts_can_be_told(case: Case) -> Problem | None:
    """An alert that tells the webhook needs one."""
    for number, alert in enumerate(case.recipe.log.alerts):
        if alert.action == "webhook" and case.recipe.log.webhook is None:
            key = f"log.alerts.{number}.action"
            text = f"{key}=webhook needs log.webhook, which is null; set log.webhook={{}}"
            return Problem(key, f"{text}, or log.alerts.{number}.action=log")
    return None


def _evaluations(case: Case) -> int:
    """How many the run makes: after every train.eval_every-th step, and after the last one."""
    train = case.recipe.train
    if train.eval_every == 0:
        return 0
    count = train.steps // train.eval_every - case.facts.start.step // train.eval_every
    if train.steps % train.eval_every > 0:
        count += 1
    return count


def _losses_of_sets(case: Case) -> list[str]:
    """Of evaluation sets that have names."""
    return [f"eval/{name}/loss" for name in evaluation_sets(case.recipe.data) if name != SPLIT]


def _has_delayed_scales(case: Case) -> bool:
    precision = case.recipe.precision
    return isinstance(precision, Fp8Precision) and precision.recipe == "delayed"
