"""A picture of a run's losses: see `python tools/plot_metrics.py --help`."""

import door

if __name__ == "__main__":
    door.enter("plot")
