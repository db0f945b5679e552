"""Who takes part beside the peers: our kernels, and the limits of the machine."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from tests.benchmarks.operands import Array, Call, Operands, empty_outputs, made, results_of

from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.ops import get_operator
from npugrad_server.backends.cpu.backend import thread_count
from npugrad_server.backends.cpu.calls import Block
from npugrad_server.backends.cpu.kernels import Kernels
from npugrad_server.pool.arena import OutputArena
from npugrad_server.pool.regions import RegionAllocator, aligned

_TRIAD_STREAMS, _TRIAD_ITEMSIZE = 3, 4


class _WithKernels:
    def __init__(self) -> None:
        self._kernels = Kernels(thread_count())


class _InProcess(_WithKernels):
    def prepare(self, case: Mapping[str, Any]) -> Call:
        return self.on(case, *made(case))

    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        raise NotImplementedError


class FreshKernelCall(_InProcess):
    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        record, spare = get_operator(case["operator"]), list[Block]()

        def in_process() -> Mapping[str, Array]:
            outputs = empty_outputs(case, call)
            self._kernels.run(record, operands, call.attrs, outputs, spare=spare)
            return outputs

        return in_process


class KernelCall(_InProcess):
    """Our kernel; results lie in an output arena, as those of the service do.

    A call takes a region, computes into it and gives it back, for the next call to find its memory there.
    """

    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        record, spare = get_operator(case["operator"]), list[Block]()  # as the service keeps them
        metas = results_of(case, call)
        offsets, nbytes = {}, 0
        for name, meta in metas.items():
            offsets[name] = nbytes
            nbytes += aligned(meta.nbytes)
        arena = OutputArena(nbytes)
        regions = RegionAllocator(arena.nbytes)
        memory = mmap.mmap(arena.fd, arena.nbytes, flags=mmap.MAP_SHARED)  # as a worker maps it
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        arena.close()  # the mapping keeps the memory
        buffer = memoryview(memory)

        def in_process() -> Mapping[str, Array]:
            region = regions.allocate(nbytes)
            assert region is not None
            outputs = {
                name: view(meta, buffer, region.offset + offsets[name]) for name, meta in metas.items()
            }
            self._kernels.run(record, operands, call.attrs, outputs, spare=spare)
            regions.free(region)
            return outputs

        return in_process


class DramRoofline(_WithKernels):
    """As many bytes as a case has operands and results, by a non-temporal triad on all threads."""

    def prepare(self, case: Mapping[str, Any]) -> Call:
        call, _ = made(case)
        metas = [*call.inputs.values(), *get_operator(case["operator"]).infer(call).values()]
        nbytes = sum(meta.nbytes for meta in metas if meta is not None)
        arrays = [
            np.ones(max(1, nbytes // (_TRIAD_STREAMS * _TRIAD_ITEMSIZE)), np.float32)
            for _ in range(_TRIAD_STREAMS)
        ]
        addresses = [array.ctypes.data for array in arrays]

        def move() -> Mapping[str, Array]:
            self._kernels.functions.npugrad_probe_triad(self._kernels.context, *addresses, arrays[0].size, 1)
            return {}

        return move


class FmaRoofline(_WithKernels):
    """As many floating-point operations as a case needs, as multiply-adds on registers on all threads."""

    def prepare(self, case: Mapping[str, Any]) -> Call:
        once = float(self._kernels.functions.npugrad_probe_fma(self._kernels.context, 1))
        repeats = max(1, round(case["flops"] / once))

        def compute() -> Mapping[str, Array]:
            self._kernels.functions.npugrad_probe_fma(self._kernels.context, repeats)
            return {}

        return compute
