"""The worker process: one device, driven over a socket, operands and results in shared memory.

Started as ``python -m npugrad_server.worker DEVICE CONTROL_FD``; it ends when the other end of the socket is
closed. It imports no gRPC, command line or settings library and no protobuf.
"""

from __future__ import annotations
