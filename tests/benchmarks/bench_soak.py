"""An hour of a supervised run with a fault every 30 s, held to the undisturbed run to the bit.

    python tests/benchmarks/bench_soak.py [--minutes 60] [--every 30] [--seed 0]

What happens: tests/faults/soak.py. Ends with an error where anything is lost, left behind or not equal; prints a JSON
line and appends it to the results.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megaspec_launchers.local import PRELOADED
from megaspec_launchers.rank_factory import RankFactory
from tests.faults.soak import soak

RESULTS = Path(__file__).parent / "results" / "soak.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    # stays where something is wrong
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with RankFactory((*PRELOADED, "tests.faults.entry")) as factory:
        found = soak(folder, factory, minutes=args.minutes, every=args.every, seed=args.seed)
    shutil.rmtree(folder)
    where = {"date": date.today().isoformat(), "machine": platform.machine(), "every": args.every, "seed": args.seed}
    line = json.dumps(where | asdict(found))
    print(line)
    with open(args.out, "a") as file:
        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
