"""A whole recipe as the text of a file, and the part of a Spec that the nodes of a job are given. Pure, torch-free."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaspec.core.yaml_text import yaml_lines
from megaspec.launcher.spec import ClusterLauncher
from megaspec.recipe import SECTIONS, Recipe
from megaspec.spec import Spec

# Under which a job's recipe lies in a folder of its own: no recipe of the user's is called so.
NAME = "of-this-job"
# Names the file with the secret that the ranks of several nodes share.
SECRET_FILE = "MEGASPEC_RUN_SECRET_FILE"


def whole_recipe(content: Mapping[str, Any], remark: Callable[[str], str] | None = None) -> Iterator[str]:
    """The lines of a recipe that is complete in itself. `remark`: see `yaml_lines`."""
    yield "defaults:  # no choice of a group adds to what stands here"
    for group in SECTIONS:
        yield f"  - override /{group}: null"
    yield from yaml_lines(content, remark)


def recipe_of_job(spec: Spec) -> str:
    """The recipe that the nodes of a job train, as text."""
    return "".join(f"{line}\n" for line in whole_recipe(content_of_job(spec)))


def content_of_job(spec: Spec) -> dict[str, Any]:
    """The same as plain data: all that the Spec says, with ranks that the nodes start themselves."""
    assert isinstance(spec.launcher, ClusterLauncher), f"launcher.kind={spec.launcher.kind} is no job"
    content = spec.model_dump(mode="json", include=set(Recipe.model_fields))
    content["launcher"] = spec.launcher.on_nodes(spec.world_size).model_dump(mode="json")
    return content


def words_of_job(config_dir: str, spec: Spec, *, memory: str) -> list[str]:
    """What `megaspec` is given on the nodes: the run is begun, or goes on where an earlier start ended. `memory`: as
    the command line said it, check or ignore."""
    words = ["train", "--config-dir", config_dir, f"recipe={NAME}", "resume=auto"]
    if spec.launcher.nodes == 1:
        # the only node of a job starts its ranks again by itself; where there are several the scheduler does
        words.append("--supervise")
    if memory != "check":
        words.append(f"memory={memory}")
    for plugin in spec.plugins:
        words += ["--plugin", plugin]
    return words
