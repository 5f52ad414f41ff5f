"""`hsgd status`: the current call of each rank of a running or hanging job, read from outside.

A process with communicators has a small page of memory (hsgd/csrc/core/status/status_record.hpp) in
which each communicator writes its current call. The job needs no thread or socket for it, so a
stopped or hanging rank can be read like any other.
"""

__all__: list[str] = []
