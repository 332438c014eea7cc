"""Compare every gradient of a layout with one process: see `python tools/audit_parallel.py --help`."""

import door

if __name__ == "__main__":
    door.enter("audit")
