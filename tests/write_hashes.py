"""Writes the hashes of what requirements.txt and requirements-dev.txt pin: `make hashes`, after a pin was changed.

A pin that was added by hand needs no hash before. All files of a version are hashed, of every platform. torch and
Triton stand in files of their own without hashes: which index is read decides whether they are for CPUs or for CUDA.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("requirements.txt", "requirements-dev.txt")
COMPILE = (
    *("pip", "compile", "--no-config", "--no-deps", "--generate-hashes", "--universal", "--python-version", "3.11"),
    *("--no-annotate", "--no-header", "--system-certs", "--quiet", "-"),
)


def main() -> None:
    """Rewrites both files in place."""
    for name in FILES:
        path = ROOT / name
        header = []
        pins = []
        for line in path.read_text().splitlines():
            if line.startswith(("#", "-r ")):
                header.append(line)
            elif not line.strip().startswith("--hash"):
                pins.append(line.rstrip("\\ "))
        given = "\n".join(pins) + "\n"
        done = subprocess.run([sys.executable, "-m", "uv", *COMPILE], input=given, text=True, capture_output=True)
        if done.returncode:
            sys.exit(done.stderr)
        path.write_text("\n".join(header) + "\n" + done.stdout)


if __name__ == "__main__":
    main()
