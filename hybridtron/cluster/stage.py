"""Copy a run's data to this node's own disk, before ranks start.

    python -m hybridtron.cluster.stage --reports FOLDER key=value ...

The job script starts one process on each node, if `cluster.stage` is set. The process prints verified bytes, their
rate and the time left, and at its end writes the node's report, which `attempt.py` compares: a node that fails is a bad
node, and the job continues without it or is requeued. If all nodes fail, the data or the configuration is to blame, and
the attempt has failed. This module must keep its name, because scripts of queued jobs call it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from pathlib import Path

from hybridtron.cluster.preflight import NodeReport
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.data.staging import stage
from hybridtron.progress import byte_progress_bar


def main(arguments: list[str]) -> int:
    """Copy the data, and write the node's report. Always returns 0."""
    parser = argparse.ArgumentParser(description="Copy a run's data to this node's own disk.")
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`")
    options = parser.parse_intermixed_args(arguments)
    report = NodeReport(os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    try:
        plan = RunPlan.of(load(options.settings))
        with byte_progress_bar(f"{report.node}: data on this node") as report_progress:
            report.measured.append(stage(plan, report_progress))
    except Exception as error:
        traceback.print_exc()  # in the log of this check
        report.faults.append(f"can't copy the data: {' '.join(str(error).split()) or type(error).__name__}")
    report.write(options.reports)
    print(f"{report.node}: {'; '.join([*report.faults, *report.measured])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
