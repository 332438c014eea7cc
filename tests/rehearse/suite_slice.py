"""Rehearses a slice of the suite that the code's digest chooses, in one process: a list of records out.

`python -m tests.rehearse.suite_slice FILE SLICES SECONDS` keeps the records in the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybridtron.planning.rates import GPUS
from hybridtron.rehearse import suite
from hybridtron.rehearse.rehearsal import RehearsalProcess

if __name__ == "__main__":
    path = Path(sys.argv[1])
    slices = int(sys.argv[2])
    seconds = float(sys.argv[3])
    records = suite.SuiteRecords(path)
    quick = [case for case in suite.all_cases() if case.recipe not in suite.FAMILIES]
    cases = suite.slice_of(quick, 0, slices, suite.code_digest())
    todo = suite.missing(cases, records)
    process = RehearsalProcess(GPUS["h200"])
    suite.rehearse_all(process, todo, records, seconds, lambda line: print(line, file=sys.stderr), compiles=False)
    print(json.dumps(list(records.read().values())))
