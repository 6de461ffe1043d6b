"""A worker that never comes to the end of its part."""

import sys

from megaspec.data.lifeline import end_with_parent

if __name__ == "__main__":
    end_with_parent(sys.argv)
    print("up", flush=True)
    while True:
        pass
