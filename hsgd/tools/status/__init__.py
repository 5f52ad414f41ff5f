"""`hsgd status`: what each rank of a running or hanging job is doing, read from outside of it.

A process with communicators keeps a small page of memory (hsgd/csrc/core/status/status_record.hpp)
in which each of them says which call it is in. Nothing runs in the job for that, no thread and no
socket, so that a rank which is stopped, or hangs, can be asked as well as any other.
"""

__all__: list[str] = []
