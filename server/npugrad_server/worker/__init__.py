"""The worker process: one device, driven over a socket, operands and results in shared memory.

Started as ``python -m npugrad_server.worker DEVICE CONTROL_FD``; it ends when the other end of the socket is
closed. It imports no gRPC, protobuf, command-line or settings library.
"""

from __future__ import annotations
