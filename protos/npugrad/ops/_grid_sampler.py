"""Parts that the records of the backward operators of grid sampling share, in two and three dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import rules
from npugrad.binding import TorchBinding
from npugrad.dtypes import DType
from npugrad.generators import Draw
from npugrad.meta import TensorMeta
from npugrad.operator import Sample
from npugrad.page import Page
from npugrad.products import Product
from npugrad.ties import half_pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from npugrad.meta import CallMeta
    from npugrad.operator import Arrays
    from npugrad.releases import CannRelease

    DTypes = Mapping[Product, tuple[DType, ...]]

# fmt: off
INTERPOLATION_MODES = {"bilinear": 0, "nearest": 1}
PADDING_MODES = {"zeros": 0, "border": 1, "reflection": 2}
BICUBIC = 2
VARIANTS: Mapping[str, Sequence[Any]] = {"interpolation_mode": (0, 1), "padding_mode": (0, 1, 2),
    "align_corners": (False, True), "output_mask": ((True, True), (True, False), (False, True))}
MASK_PICK = (
    "The document describes two entries and gives no code for another number; the vendor's source returns "
    "161002, older source read past the end. npugrad: 161002."
)
MAX_DETERMINISTIC_CHANNELS = 2048
"""With more channels, or with DOUBLE, the operator does not run on the AI Core and so has no deterministic
mode, on every release with its own page, 8.5.0 to 9.2.0-beta.2."""


def accepts_unchecked(call: CallMeta) -> bool:
    """Whether output_mask is null: the operator then succeeds before it checks anything else."""
    return call.mask() is None


def page(
    document: str,
    products: Mapping[Product, str],
    dtypes: DTypes,
    docs: Mapping[str, str],
    sides: str,
    *,
    release: str = "",
    order: Callable[[TensorMeta], tuple[int, ...]] | None = None,
    arranged: Callable[[CallMeta], tuple[CallMeta, str]] = lambda call: (call, ""),
) -> Page:
    """A page with the parameters, which are the same for both operators, and no rules.

    Args:
        document: Official name of the operator.
        products: Products that have it.
        dtypes: Types by product.
        docs: Shape and meaning of each tensor.
        sides: Names of the spatial axes of the images.
        release: Release of CANN whose page it is.
        order: Order of the axes of the images and their gradients, where formats change it.
        arranged: As in `Page`.
    """
    p = Page(document, "ops-cv", products, accepts_unchecked=accepts_unchecked, arranged=arranged,
        keeps_format=order is not None, release=release)
    rules.only_on(p, Product.ATLAS_A2, Product.ATLAS_A3, since="8.5.0", until="9.0.0")
    out = " ".join(f"out_{side}" for side in sides.split())
    p.short = {"batch": "n", "channels": "c", **{each: each[0] for each in sides.split()}}
    p.short |= {f"out_{each}": f"o{each[0]}" for each in sides.split()}
    points = Draw("uniform", (-1.1, 1.1))
    p.input("grad_output", dtypes, docs["grad_output"], axes=f"batch channels {out}", order=order)
    p.input("input", dtypes, docs["input"], axes=f"batch channels {sides}", order=order)
    p.input("grid", dtypes, docs["grid"], axes=f"batch {out} {len(sides.split())}", draw=points)
    smallest = {"n": 2, "c": 3, "d": 3, "h": 4, "w": 5, "od": 2, "oh": 3, "ow": 2}
    p.smallest = {name: smallest[name] for name in p.short.values()}
    p.sizes(f"batch channels {sides}", of="input")
    p.sizes(out, of="grad_output")
    p.attr("interpolation_mode", "int64", "0 bilinear, 1 nearest.", choices=INTERPOLATION_MODES)
    p.attr("padding_mode", "int64", "Values outside the image: 0 zeros, 1 border, 2 reflection.",
        choices=PADDING_MODES)
    p.attr("align_corners", "bool",
        "Whether -1 and 1 are the centres of the corner pixels (True) or their outer edges (False).")
    p.attr("output_mask", "bool_array",
        "Two bools: compute input_grad, grid_grad. None: nothing is checked and nothing computed.")
    # A null output is refused regardless of the mask.
    kept: dict[str, Any] = {"when_masked": "allocate"}
    p.output("input_grad", "input", docs["input_grad"], zero_init=True, order=order, **kept)
    p.output("grid_grad", "grid", docs["grid_grad"], **kept)
    return p


def not_expressible(p: Page, empty: int) -> None:
    """What no call can break; `empty` is the number of the check of empty operands."""
    p.not_expressible("workspaceSize and executor are created by the service, never null", check=1)
    p.not_expressible("a null outputMask is no error: status 0, nothing checked, nothing returned", check=2)
    p.not_expressible("empty operands and all-false masks are no error; wanted outputs are zeros",
        check=empty)
    p.not_expressible("both values of a bool are legal", name="align_corners")


def reads(call: CallMeta) -> Mapping[str, tuple[str, ...]]:
    """Returns the operands that each output reads; with nearest interpolation grid_grad is always 0."""
    is_nearest = call.attrs["interpolation_mode"] == INTERPOLATION_MODES["nearest"]
    return {"input_grad": ("grad_output", "grid"),
        "grid_grad": () if is_nearest else ("grad_output", "input", "grid")}


def determinism_check(call: CallMeta, release: CannRelease | None) -> str | None:
    """Refuses DOUBLE and too many channels."""
    if accepts_unchecked(call):
        return None
    image = call.tensor("input")
    if image.dtype is DType.FLOAT64:
        return "input: found float64; expected another type where deterministic is True on an NPU"
    channels = image.shape[1]
    if channels <= MAX_DETERMINISTIC_CHANNELS:
        return None
    return (
        f"input: found {channels} channels; expected at most {MAX_DETERMINISTIC_CHANNELS} where "
        "deterministic is True on an NPU"
    )


def samples(p: Page, product: Product) -> Iterator[Sample]:
    """Yields what is derived, a null mask, many channels, declared outputs and other strides."""
    yield from p.calls.samples(product)
    call, many = p.calls.build(product=product), MAX_DETERMINISTIC_CHANNELS + 1
    yield Sample("mask_null", call.with_attrs(output_mask=None))
    one: dict[str, Any] = {**dict.fromkeys(p.calls.sizes, 1), "c": many, "w": 2}
    yield Sample("many_channels", p.calls.build(product=product, **one))
    image, grid, grad = call.tensor("input"), call.tensor("grid"), call.tensor("grad_output")
    yield Sample("declared", call.with_outputs(input_grad=image, grid_grad=grid))
    expanded = TensorMeta(DType.FLOAT32, grad.shape, strides=(0,) * grad.rank)
    last = TensorMeta(DType.FLOAT32, (image.shape[0], *image.shape[2:], image.shape[1]))
    channels_last = last.permuted((0, image.rank - 1, *range(1, image.rank - 1)))
    yield Sample("channels_last", call.with_inputs(grad_output=expanded, input=channels_last))


def make_inputs(call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
    """Normal images and gradients; points mostly inside, some outside, some exactly on the border."""

    def values(name: str, meta: TensorMeta) -> npt.NDArray[np.float32]:
        return (
            _points(meta.shape, rng) if name == "grid" else rng.standard_normal(meta.shape, dtype=np.float32)
        )

    return {
        name: None if meta is None else values(name, meta).astype(meta.dtype.numpy)
        for name, meta in call.inputs.items()
    }


def _points(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    points = rng.uniform(-1, 1, shape).astype(np.float32)
    kind = rng.random(shape, dtype=np.float32)
    points[kind < 0.1] *= 1.75
    points[kind > 0.95] = np.sign(points[kind > 0.95])
    return points


def ties(call: CallMeta, operands: Arrays) -> None:
    """Moves points onto pixels, edges and the middles between them, inside and outside."""
    image, grid = call.tensor("input"), operands["grid"]
    if grid is None:
        return
    for axis, size in enumerate(reversed(image.shape[2:])):
        divisor = max(size - 1, 1) if call.attrs["align_corners"] else size
        grid[..., axis] = 2 * half_pixels(grid[..., axis], size) / divisor - 1


def example_attrs() -> dict[str, Any]:
    """Attributes of the pages' examples."""
    modes = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
    return {**modes, "output_mask": (True, True)}


def binding(name: str) -> TorchBinding:
    """PyTorch's operator of that name, which takes the operands and attributes in the order of the record."""
    modes = ("interpolation_mode", "padding_mode", "align_corners", "output_mask")
    return TorchBinding(f"aten.{name}", ("grad_output", "input", "grid", *modes))
