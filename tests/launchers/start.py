"""A launcher process for tests that signal or kill it: `python start.py RUN_DIR ENTRY RANKS JSON`."""

import json
import signal
import sys

from megaspec_launchers.local import launch
from megaspec_launchers.rank_factory import RankFactory

if __name__ == "__main__":
    run_dir, entry, ranks, text = sys.argv[1:]
    options = json.loads(text)
    # said, not inherited: the tests themselves may run under nohup
    hangup = signal.SIG_DFL
    if options.pop("under_nohup", False):
        hangup = signal.SIG_IGN
    signal.signal(signal.SIGHUP, hangup)
    with RankFactory(("tests.launchers.toys",)) as factory:
        sys.exit(launch(run_dir, ranks=int(ranks), entry=entry, factory=factory, **options))
