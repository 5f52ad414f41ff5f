"""Files of torch's Flight Recorder for `torchfrtrace`, from the rows of a communicator.

Each rank has a pickle of its last call. Ranks are numbered as in the communicator. Calls have
gloo's names, since torch's reader refuses other backends; sizes are in bytes.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from hsgd.tools.status.looking import Row
from hsgd.tools.status.waits import Group

__all__ = ["flight_files"]

_VERSION = "2.10"  # version that torch 2.13 writes and reads
_PREFIX = "trace_rank_"
# Names of torch for which its reader needs only sizes that are known here.
_TORCH_NAMES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "reduce_scatter": "_reduce_scatter_base",
    "allgather": "_all_gather_base",
    "alltoall": "all_to_all",
}


def flight_files(group: Group) -> dict[str, bytes]:
    """Return a file for each seen rank, by name; on one node empty files for unseen ranks."""
    own = {"name": group.comm, "desc": "hsgd", "ranks": str(list(range(group.rows[0].size)))}
    common = {"version": _VERSION, "pg_config": {group.comm: own}, "pg_status": {}}
    entries = {row.rank: [_entry(row)] if row.call else [] for row in group.rows}
    if group.rows[0].nodes == 1:
        entries.update({rank: [] for rank in group.unseen})
    return {
        f"{_PREFIX}{rank}": pickle.dumps({**common, "entries": found}, protocol=2)
        for rank, found in entries.items()
    }


def _entry(row: Row) -> dict[str, Any]:
    """Return the last call of a rank; of a broken communicator the one that failed."""
    is_under_way = row.in_call or row.state == "broken"
    then_ns = time.time_ns() - int(row.since_s * 1e9)
    given, result = [row.bytes], [row.bytes]
    if row.kind == "reduce_scatter":
        result = [row.bytes // row.size]
        given = [result[0] * row.size]
    return {
        "record_id": row.call,
        "pg_id": 0,
        "process_group": (row.comm, "hsgd"),
        "collective_seq_id": row.call,
        "p2p_seq_id": 0,
        "op_id": row.call,
        "profiling_name": f"gloo:{_TORCH_NAMES.get(row.kind, 'barrier')}",
        "time_created_ns": then_ns,
        "input_sizes": [given],
        "input_dtypes": ["Byte"],
        "output_sizes": [result],
        "output_dtypes": ["Byte"],
        "state": "started" if is_under_way else "completed",
        "time_discovered_started_ns": then_ns,
        "time_discovered_completed_ns": None if is_under_way else then_ns,
        "retired": not is_under_way,
        "timeout_ms": 0,
        "is_p2p": False,
        # The stack is unknown; torch's reader shows this line, with the name of the call.
        "frames": [{"name": row.name or row.kind, "filename": row.host, "line": row.pid}],
    }
