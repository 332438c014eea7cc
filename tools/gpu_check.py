"""Check a GPU: correctness of every kernel, and speed: see `python tools/gpu_check.py --help`."""

import door

if __name__ == "__main__":
    door.enter("gpu-check")
