"""The NPU backend: torch_npu brings the device up and owns memory and streams; our launcher does the rest.

    bringup   the only user of torch and torch_npu: device, streams, device memory, pinned memory
    staging   pinned memory between the arenas and the device, reused from call to call
    lane      one stream and one thread: copy in, plan, launch, copy out, wait
    mode      how a release treats the deterministic option, and which calls rely on it
    clock     when a stream passed the stages of a call
    failures  what a failed call means to its caller and to the worker
    backend   the device as the worker sees it: opening, probes, deterministic mode, lanes

Everything queued on a stream (copies, zeroing, both phases of an operator, waits) goes through
`npugrad_server.acl`: only there do errors carry their number, and only there do torch_npu's caching
allocators record nothing that could break once the device fails. torch never computes with, copies or casts
a tensor on the device.
"""

from __future__ import annotations

from npugrad_server.backends.npu.backend import NpuBackend

__all__ = ["NpuBackend"]
