"""A model of the Hugging Face hub by its name, as a folder in the hub's cache. Torch-free.

The download is huggingface_hub's: it resumes, checks sizes, reads HF_HOME, HF_TOKEN and HF_ENDPOINT, and keeps each
file once. Only what the commands read is fetched: no code, no pickles, no second copy of the weights.
"""

import re
from pathlib import Path

from megaspec.core.errors import CheckpointError
from megaspec.hf.companions import NAMES
from megaspec.hf.folder import CONFIG, INDEX

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_WEIGHTS = (INDEX, "model.safetensors", "model-*-of-*.safetensors")
_MOST_OF_A_CAUSE = 200


def local_folder(given: str, *, revision: str | None, with_weights: bool) -> Path:
    """The folder `given`, or, where there is none and it reads ORG/NAME, what the hub has under that name.

    revision: a branch, tag or commit there; None takes its main branch. with_weights: else config.json alone.
    CheckpointError: there is neither, huggingface_hub is missing, or the hub refuses.
    """
    path = Path(given)
    if path.exists() or _NAME.fullmatch(given) is None:
        if revision is not None:
            text = f"--revision {revision} chooses among what the hub has, and {given} is a folder or no hub name"
            raise CheckpointError(f"{text}; leave it out, or name a model as ORG/NAME")
        return path
    return _download(given, revision, [CONFIG, *NAMES, *_WEIGHTS] if with_weights else [CONFIG])


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        text = f"{name}: no such folder; for a name on the hub install the extra megaspec[hf]"
        raise CheckpointError(f"{text}, or name a folder with a config.json and safetensors files") from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        text = f"{name}: no such folder, and the hub gave none ({cause[:_MOST_OF_A_CAUSE]})"
        raise CheckpointError(f"{text}; name a folder with a config.json and safetensors files") from None


def described(given: str, folder: Path) -> str:
    """What a run tells of where its weights are from: the folder, or the hub's name and commit."""
    if Path(given) == folder:
        return given
    return f"{given} at {folder.name}"
