"""Measure this package against its peers: see `python tools/bench.py --help`."""

import door

if __name__ == "__main__":
    door.enter("bench")
