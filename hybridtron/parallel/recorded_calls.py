"""Recent collectives of this rank, by name, from the flight recorder of torch's process groups.

torch keeps the last 2,000 operations of NCCL's groups, and of gloo's, in a ring (TORCH_FR_BUFFER_SIZE; 0 for none).
Messages between two ranks are left out: torch does not record them over gloo. `train/collectives.py` compares the
records of all ranks.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL's groups, and of gloo's
KEPT = 50  # calls of each group that are kept


def recorded_calls() -> dict[str, Any]:
    """Return the recent calls of each group as plain values. Any thread may call this, also while a rank hangs.

    groups    name -> the global ranks of each group that this rank knows
    calls     the last calls of each group, in the order of their numbers
    lost      True if the ring has lost earlier calls
    """
    ranks = distributed_c10d._world.pg_group_ranks
    groups = {name: sorted(ranks.get(group, {})) for group, name in dict(distributed_c10d._world.pg_names).items()}
    calls: dict[str, deque[dict[str, Any]]] = {}
    lost = False
    for name in RECORDERS:
        dump = getattr(c10d, name, None)
        entries = [] if dump is None else json.loads(dump(True, False)).get("entries") or []
        lost = lost or any(entry["record_id"] for entry in entries[:1])
        for entry in entries:
            if entry["is_p2p"]:
                continue  # other ranks of the group have no such call
            call = _call_of(entry)
            of_group = calls.setdefault(call["group"], deque(maxlen=KEPT))
            if of_group and call["number"] < of_group[-1]["number"]:
                of_group.clear()  # these calls were made in a group of this name that was destroyed
            of_group.append(call)
    return {"groups": groups, "calls": [call for of_group in calls.values() for call in of_group], "lost": lost}


def _call_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what ranks compare of an entry: the operation, its number in the group, and its tensors."""
    return {
        "group": str(entry["process_group"][0]),
        "name": entry["profiling_name"],
        "number": entry["collective_seq_id"],
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "ended": bool(entry["retired"]) or entry["state"] == "completed",
        "time": entry["time_created_ns"] / 1e9,
    }
