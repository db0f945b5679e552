"""The service: a gRPC front process, and one worker process per device.

Imports only point downward: `cli > acceptance > app > rpc > dispatch > pool > worker > backends > acl`. A
worker process imports nothing above `worker`.
"""

from __future__ import annotations

__version__ = "0.1.0"
