"""All kernels in CUDA C++, and how to compile them ahead of their first use: `make kernels`."""

import sys

from megaspec.core.errors import MegaspecError, printable
from megaspec_kernels.fp8_cast import cuda as fp8_cast
from megaspec_kernels.nvcc import Source, built


def sources() -> dict[str, Source]:
    """By the setting that asks for one."""
    return {fp8_cast.KEY: fp8_cast.source()}


def main() -> int:
    """Compile what is not in the cache. -> exit code."""
    for key, source in sources().items():
        try:
            library = built(source, key=key, way_out="go on without it")
        except MegaspecError as error:
            print(printable(f"megaspec: {error}"), file=sys.stderr)
            return error.exit_code
        print(printable(f"{key}: {library}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
