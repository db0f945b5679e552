"""torch-ms-deform-attn: the compiled CPU kernel of multi-scale deformable attention that PyPI has; float32.

A source distribution: `pip install --no-build-isolation torch-ms-deform-attn` where torch is installed,
here or in an environment of its own that `--peer-python` names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tests.benchmarks.torch_peer import TorchCall, as_array, as_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from tests.benchmarks.operands import Call, Operands

    from npugrad.meta import CallMeta

_OPERANDS = ("value", "spatial_shape", "level_start_index", "location", "attn_weight", "grad_output")
_GRADS = ("grad_value", "grad_location", "grad_attn_weight")
_IMAGES_AT_ONCE = 64  # of its CUDA kernel; the one for a CPU only checks that there is a number


class NativeCall(TorchCall):
    """Its operator in the caller's process, with one thread or torch's default as `TorchCall`."""

    def on(self, case: Mapping[str, Any], call: CallMeta, operands: Operands) -> Call:
        arrays = [operands[name] for name in _OPERANDS]
        tensors = [as_tensor(array) for array in arrays if array is not None]
        native = importlib.import_module("torch_ms_deform_attn._ops").backward

        def backward() -> Mapping[str, torch.Tensor]:
            return dict(zip(_GRADS, native(*tensors, _IMAGES_AT_ONCE), strict=True))

        self.take_threads(backward)
        return lambda: {name: as_array(grad) for name, grad in backward().items()}
