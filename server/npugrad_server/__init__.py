"""The service: a gRPC front process, and one worker process per device that it feeds.

Imports go down only: `cli > acceptance > app > rpc > dispatch > pool > worker > backends > acl`. A worker
process imports nothing above `worker`.
"""

from __future__ import annotations

__version__ = "0.1.0"
