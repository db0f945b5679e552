"""Float64 reference of aclnnGroupNormBackward.

The flat data are viewed as (N, G, D, L): N samples, G groups, D = C / G channels in a group, L = HxW pixels.
Each group of a sample has M = D * L elements, and

    xh          = (input - mean) * rstd
    grad_beta   = sum over n, l of grad_out
    grad_gamma  = sum over n, l of grad_out * xh
    a           = grad_out * gamma
    c1, c2      = means over the sample's group of a and of a * xh
    grad_input  = rstd * (a - c1 - xh * c2)

`mean` and `rstd` are taken as given; no epsilon enters.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from npugrad.references._blocks import SCRATCH_BYTES, flat_float64, spans, store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Float64Array: TypeAlias = npt.NDArray[np.float64]

# Peak scratch memory of one element, channel, and group of a block, in bytes.
_ELEMENT_BYTES = 32  # grad_out and xh in float64, then the previous block or a strided run before its cast
_CHANNEL_BYTES = 56  # both sums, both accumulators over the samples, gamma twice, one product with it
_GROUP_BYTES = 48  # mean, rstd, c1, c2

_BLOCK_BYTES = 16 * 2**20  # a larger block, unless one group needs it, only falls out of the cache


def reference(
    inputs: Mapping[str, npt.NDArray[Any] | None],
    attrs: Mapping[str, Any],
    outputs: Mapping[str, npt.NDArray[Any]],
    *,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute the gradients of group normalisation with respect to its input, scale and offset.

    Args:
        inputs: `grad_out` and `input`, any shapes of n*c*hxw elements; `mean` and `rstd`, any shapes of
            n*group elements; `gamma`, any shape of c elements, or None for ones. Any float dtypes and any
            strides.
        attrs: `n`, `c`, `hxw` and `group`; others are not read.
        outputs: C-contiguous arrays of any float dtype to fill, each of which may be absent: `grad_input` of
            n*c*hxw elements, `grad_gamma` and `grad_beta` of c elements. With n*c*hxw = 0 they become zeros.
        scratch_bytes: Maximum scratch memory, in bytes, apart from a few numbers per sample.
    """
    call = _Call(inputs, attrs, outputs)
    if 0 in (call.samples, call.channels, call.pixels):
        for output in outputs.values():
            output.fill(0)
        return
    group_bytes = call.group_channels * call.channel_bytes + _GROUP_BYTES
    with np.errstate(all="ignore"):  # NaN and infinite data are computed without warnings
        if group_bytes <= scratch_bytes:
            _whole_groups(call, group_bytes, min(scratch_bytes, _BLOCK_BYTES))
        else:
            _split_groups(call, min(scratch_bytes, _BLOCK_BYTES))


class _Call:
    """Operands, sizes, and the outputs as flat views."""

    def __init__(
        self,
        inputs: Mapping[str, npt.NDArray[Any] | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        self.inputs = inputs
        self.samples = int(attrs["n"])
        self.channels = int(attrs["c"])
        self.pixels = int(attrs["hxw"])
        self.groups = int(attrs["group"])
        self.group_channels = self.channels // self.groups
        self.group_elements = self.group_channels * self.pixels
        self.channel_bytes = self.pixels * _ELEMENT_BYTES + _CHANNEL_BYTES
        self.outputs = {name: output.reshape(-1) for name, output in outputs.items()}
        self.needs_grad_input = "grad_input" in outputs
        self.needs_products = self.needs_grad_input or "grad_gamma" in outputs

    def read(self, name: str, start: int, shape: tuple[int, ...]) -> Float64Array:
        """Copy the run of an operand's elements that begins at `start`; an absent gamma is ones."""
        operand = self.inputs[name]
        if operand is None:
            return np.ones(shape)
        return flat_float64(operand, start, start + math.prod(shape)).reshape(shape)

    def write(self, name: str, start: int, values: Float64Array) -> None:
        """Round values into an output from element `start` on, if that output is wanted."""
        if name in self.outputs:
            store(self.outputs[name][start : start + values.size], values.reshape(-1))


class _Block:
    """A contiguous run of the data, axes (samples, groups, channels of a group, pixels), in float64."""

    def __init__(self, call: _Call, samples: slice, groups: slice, channels: slice, pixels: slice) -> None:
        self._call = call
        self._shape = (_length(samples), _length(groups), _length(channels), _length(pixels))
        row = samples.start * call.groups + groups.start
        self._start = (row * call.group_channels + channels.start) * call.pixels + pixels.start
        self._mean = call.read("mean", row, (*self._shape[:2], 1, 1))
        self._rstd = call.read("rstd", row, (*self._shape[:2], 1, 1))
        self._grad = call.read("grad_out", self._start, self._shape)
        first_channel = groups.start * call.group_channels + channels.start
        self._gamma = call.read("gamma", first_channel, (*self._shape[1:3], 1))

    @cached_property
    def _normalized(self) -> Float64Array:
        normalized = self._call.read("input", self._start, self._shape)
        normalized -= self._mean
        normalized *= self._rstd
        return normalized

    def channel_sums(self) -> tuple[Float64Array, Float64Array]:
        """Sum grad_out and, where needed, grad_out * xh over the pixels: (samples, groups, channels) each."""
        sums = self._grad.sum(axis=-1)
        if not self._call.needs_products:
            return sums, np.zeros_like(sums)
        return sums, np.einsum("ngdl,ngdl->ngd", self._grad, self._normalized)

    def group_mean(self, channel_sums: Float64Array) -> Float64Array:
        """Add up channel sums weighted by gamma, divided by the group's size: (samples, groups, 1, 1)."""
        sums: Float64Array = np.einsum("ngd,gd->ng", channel_sums, self._gamma[:, :, 0])
        sums /= self._call.group_elements
        return sums[:, :, np.newaxis, np.newaxis]

    def write_grad_input(self, c1: Float64Array, c2: Float64Array) -> None:
        """Write rstd * (grad_out * gamma - c1 - xh * c2), overwriting the block's arrays."""
        self._grad *= self._gamma
        self._grad -= c1
        self._normalized[...] *= c2
        self._grad -= self._normalized
        self._grad *= self._rstd
        self._call.write("grad_input", self._start, self._grad)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _whole_groups(call: _Call, group_bytes: int, block_bytes: int) -> None:
    """Compute in blocks of whole groups, each read once."""
    channels, pixels = slice(0, call.group_channels), slice(0, call.pixels)
    for groups in spans(call.groups, group_bytes, block_bytes):
        grad_beta = np.zeros((_length(groups), call.group_channels))
        grad_gamma = np.zeros_like(grad_beta)
        # Either all groups of several samples, or some of one sample: a contiguous run in both cases.
        for samples in spans(call.samples, call.groups * group_bytes, block_bytes):
            block = _Block(call, samples, groups, channels, pixels)
            grad_sums, product_sums = block.channel_sums()
            grad_beta += grad_sums.sum(axis=0)
            grad_gamma += product_sums.sum(axis=0)
            if call.needs_grad_input:
                block.write_grad_input(block.group_mean(grad_sums), block.group_mean(product_sums))
        call.write("grad_beta", groups.start * call.group_channels, grad_beta)
        call.write("grad_gamma", groups.start * call.group_channels, grad_gamma)


def _split_groups(call: _Call, block_bytes: int) -> None:
    """Compute group by group in parts of a group, each read once for the sums and once for grad_input."""
    for group in range(call.groups):
        groups = slice(group, group + 1)
        c1, c2 = _sum_group(call, groups, block_bytes)
        if call.needs_grad_input:
            _write_group(call, groups, c1, c2, block_bytes)


def _sum_group(call: _Call, groups: slice, block_bytes: int) -> tuple[Float64Array, Float64Array]:
    """Write grad_gamma and grad_beta of one group; return c1 and c2 of its samples, (samples, 1, 1, 1)."""
    c1 = np.zeros((call.samples, 1, 1, 1))
    c2 = np.zeros_like(c1)
    for channels in _channel_parts(call, block_bytes):
        grad_beta = np.zeros((1, 1, _length(channels)))
        grad_gamma = np.zeros_like(grad_beta)
        for pixels in _pixel_parts(call, channels, block_bytes):
            for sample in range(call.samples):
                block = _Block(call, slice(sample, sample + 1), groups, channels, pixels)
                grad_sums, product_sums = block.channel_sums()
                grad_beta += grad_sums
                grad_gamma += product_sums
                c1[sample] += block.group_mean(grad_sums)[0]
                c2[sample] += block.group_mean(product_sums)[0]
        first_channel = groups.start * call.group_channels + channels.start
        call.write("grad_beta", first_channel, grad_beta)
        call.write("grad_gamma", first_channel, grad_gamma)
    return c1, c2


def _write_group(call: _Call, groups: slice, c1: Float64Array, c2: Float64Array, block_bytes: int) -> None:
    """Write grad_input of one group, c1 and c2 of its samples given."""
    for channels in _channel_parts(call, block_bytes):
        for pixels in _pixel_parts(call, channels, block_bytes):
            for sample in range(call.samples):
                block = _Block(call, slice(sample, sample + 1), groups, channels, pixels)
                block.write_grad_input(c1[sample], c2[sample])


def _channel_parts(call: _Call, block_bytes: int) -> Iterator[slice]:
    return spans(call.group_channels, call.channel_bytes, block_bytes)


def _pixel_parts(call: _Call, channels: slice, block_bytes: int) -> Iterator[slice]:
    """Cut the pixels, except in parts of several channels: those keep all, so that a part is contiguous."""
    return spans(call.pixels, _length(channels) * _ELEMENT_BYTES, block_bytes)
