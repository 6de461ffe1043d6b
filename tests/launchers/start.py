"""A launcher process for tests that signal or kill it: `python start.py RUN_DIR ENTRY RANKS JSON`."""

import json
import sys

from megaspec_launchers.local import launch
from megaspec_launchers.rank_factory import RankFactory

if __name__ == "__main__":
    run_dir, entry, ranks, options = sys.argv[1:]
    with RankFactory(("tests.launchers.toys",)) as factory:
        sys.exit(launch(run_dir, ranks=int(ranks), entry=entry, factory=factory, **json.loads(options)))
