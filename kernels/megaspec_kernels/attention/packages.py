"""Packages that an implementation of attention is made of. None is imported before it is asked for."""

from functools import cache
from importlib import import_module
from types import ModuleType

from megaspec_kernels.cudnn_library import cudnn_of_torch

# By module: the package that holds it, and the way to install it.
_WAYS = {
    "cudnn": ("nvidia-cudnn-frontend", "pip install 'megaspec[cudnn]'"),
    "flash_attn.cute.interface": ("flash-attn-4", "pip install 'megaspec[fa]'"),
    "flash_attn_interface": ("flash-attn-3, of flash-attention's folder hopper", "build it there, it is on no index"),
    "flash_attn.flash_attn_interface": ("flash-attn", "pip install flash-attn --no-build-isolation"),
}

# By implementation of the catalog.
MODULES = {
    "cudnn": "cudnn",
    "flash_attn": "flash_attn.cute.interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_2": "flash_attn.flash_attn_interface",
}


@cache
def require(module: str) -> ModuleType:
    """A module of an optional package. ImportError: it is not installed, or does not load."""
    try:
        if module != "cudnn":
            return import_module(module)
        # read by its Python alone: the dynamic linker has read its own when the process began
        with cudnn_of_torch("LD_LIBRARY_PATH"):
            return import_module(module)
    except (ImportError, OSError) as error:
        package, way = _WAYS[module]
        raise ImportError(f"{module} can't be imported ({error}): it is of the package {package}; {way}") from error
