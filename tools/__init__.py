"""Commands for people: each file is run as `python tools/NAME.py`, and tells what it does with `--help`."""
