"""Layers, parameters, FLOPs, memory and layout of a configuration: see `python tools/inspect_config.py --help`."""

import door

if __name__ == "__main__":
    door.enter("inspect")
