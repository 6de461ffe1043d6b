"""`megaspec`, and `python -m megaspec`."""

import sys

from megaspec.launcher.stop import leave_on_request


def main() -> int:
    """A command line; or one that is not finished, which a shell asks about at each press of a key."""
    leave_on_request(sys.argv[1:])
    if sys.argv[1:2] == ["_complete"]:
        # without the rest of the command line, which takes longer to import than a key may take
        from megaspec.commands.completion import complete

        print("\n".join(complete(" ".join(sys.argv[2:]))))
        return 0
    from megaspec import cli
    from megaspec.core.standard_error import survive_full_disk

    survive_full_disk()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
