"""What a record derives from its page: calls of any size, samples, workloads and operands."""

from __future__ import annotations

import inspect
import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.changes import MASK
from npugrad.dtypes import DType
from npugrad.generators import Draw, fill
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Sample
from npugrad.products import Product
from npugrad.workloads import BENCH_SIZES, Workload, Workloads, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from npugrad.operator import Arrays
    from npugrad.page import Page

    Sizes = dict[str, Any]

ANY = range(2**62)
_UNEVEN = (3, 37, 5, 7, 2, 11, 4, 13)
_LONG = (2, 1, 3, 1, 2, 1, 1, 2)
_ELEMENTS = {"tiny": 2**7, **dict(zip(BENCH_SIZES, (2**12, 2**18, 2**23), strict=True))}
_MOST_HALVED = 16


@dataclass(frozen=True)
class Calls:
    """Calls that follow from the axes and types of a page's inputs and the values of its attributes.

    Attributes:
        page: The page; if it says nothing else, sizes count up from 2, and ``*name`` is two axes.
    """

    page: Page

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the smallest call by name; a tuple where the name is of any number of axes."""
        return {**self._sizes(itertools.count(2)), **self.page.smallest}

    @cached_property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Values of the keywords that are no sizes, those of the smallest call first."""
        masks = filter(any, itertools.product((True, False), repeat=len(self._outputs)))
        values = {f"with_{p.name}": (True, False) for p in self.page.inputs if p.optional} | self.page.values
        return {name: own or tuple(masks) for name, own in values.items() if own or name == MASK}

    @cached_property
    def _outputs(self) -> tuple[str, ...]:
        return tuple(filter(self.page.is_output, self.page.params))

    def _sizes(self, numbers: Iterator[int]) -> Sizes:
        axes = dict.fromkeys(chain.from_iterable(self.page.axes[p.name] for p in self.page.inputs))
        sizes: Sizes = {}
        for axis in (each for each in axes if not each.isdigit()):
            name, number = self.page.size(axis), next(numbers)
            allowed = self.page.limits.get(name, ANY)
            one = allowed[min(bisect_left(allowed, number), len(allowed) - 1)]
            few = len(self.page.smallest.get(name, (1, 1))) if axis[0] == "*" else 0
            sizes[name] = (number, *itertools.islice(numbers, few - 1)) if few else one
        return sizes

    def build(
        self, *, dtype: DType | str = DType.FLOAT32, product: Product = Product.ATLAS_A2, **given: Any
    ) -> CallMeta:
        """A legal call; keywords are sizes, attributes, and ``with_NAME`` for each optional input.

        Args:
            dtype: Type of the first input and of others that may have one of its types.
            product: Product that it is for.
            given: What differs from the smallest call.

        Raises:
            TypeError: Another keyword.
        """
        known = self._keywords
        if unknown := given.keys() - known.keys():
            raise TypeError(f"found the keywords {sorted(unknown)}; expected some of {', '.join(known)}")
        chosen, inputs = {**known, **given}, {}
        floats = {*chain.from_iterable(self.page.inputs[0].dtypes.values())}
        for param in self.page.inputs:
            own = param.dtypes.get(product) or next(iter(param.dtypes.values()))
            shape = self.page.shape_of(param.name, chosen)
            meta = TensorMeta(dtype if own[0] in floats else own[0], shape)
            inputs[param.name] = meta if chosen.get(f"with_{param.name}", True) else None
        attrs = {name: chosen[name] for name in self.page.params if name in self.page.values}
        return self.page.finished(CallMeta(inputs=inputs, attrs=attrs, product=product))

    @cached_property
    def _keywords(self) -> Sizes:
        """Keywords of `build` besides type and product, with their values in the smallest call."""
        return {**{name: values[0] for name, values in self.values.items()}, **self.sizes}

    def _signed(self, build: Callable[..., CallMeta]) -> Callable[..., CallMeta]:
        """`build`, or one that passes keywords on to it, with all of them in its signature, for who asks."""
        own = inspect.signature(build).parameters.values()
        if all(each.kind is each.KEYWORD_ONLY for each in own):
            return build

        @wraps(build)
        def signed(**given: Any) -> CallMeta:
            return build(**given)

        keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        derived = {
            n: keyword(n, default=v, annotation=_type(v)) for n, v in {**self.sizes, **self._keywords}.items()
        }
        shared = {n: inspect.signature(self.build).parameters[n] for n in ("dtype", "product")}
        named = {each.name: each for each in own if each.kind is each.KEYWORD_ONLY}
        signature = inspect.Signature([*({**shared, **derived} | named).values()])
        signed.__signature__ = signature  # type: ignore[attr-defined]
        return signed

    # ---------------------------------------------------------------------------- samples

    def samples(self, product: Product) -> Iterator[Sample]:
        """Yields the smallest call in every type, and changed in one way each, where that is legal."""
        found: list[CallMeta] = []
        for name, call in self._candidates(product):
            if call not in found and self.page.is_legal(call):
                found.append(call)
                yield Sample(name, call)

    def _candidates(self, product: Product) -> Iterator[tuple[str, CallMeta]]:
        base, first = self.build(product=product), self.page.inputs[0]
        for dtype in first.dtypes.get(product, ()):
            yield f"{dtype}", self.build(dtype=dtype, product=product)
        for param in self.page.inputs[1:]:
            meta = base.tensor(param.name)
            for dtype in param.dtypes.get(product, ()):
                retyped = TensorMeta(dtype, meta.shape)
                yield f"{param.name}_{dtype}", base.with_inputs(**{param.name: retyped})
            broadcast = TensorMeta(meta.dtype, meta.shape[1:])
            yield f"{param.name}_broadcast", base.with_inputs(**{param.name: broadcast})
        for name, changed in self._changes():
            yield name, self.build(product=product, **changed)
        wide = next((p.name for p in self.page.inputs if base.tensor(p.name).rank > 1), first.name)
        shape = base.tensor(wide).shape
        if len(shape) > 1:  # the first axis repeated, the others in reversed order
            strides = (0, *(math.prod(shape[1:axis]) for axis in range(1, len(shape))))
            strided = TensorMeta(DType.FLOAT32, shape, strides=strides)
            yield "strided", base.with_inputs(**{wide: strided})

    def _changes(self) -> Iterator[tuple[str, Sizes]]:
        """Yields combined values of attributes, masks with at most one bit, other ranks and sizes of 0."""
        free = {name: self.values[name] for name in self.page.values if name in self.values and name != MASK}
        for chosen in itertools.product(*free.values()):
            yield "-".join(map(str, chosen)), dict(zip(free, chosen, strict=True))
        yield from ((f"no_{p.name}", {f"with_{p.name}": False}) for p in self.page.inputs if p.optional)
        few = (mask for mask in (*self.values.get(MASK, ()), (False,) * len(self._outputs)) if sum(mask) < 2)
        if MASK in self.values:
            yield from (("mask" + "".join("01"[bit] for bit in mask), {MASK: mask}) for mask in few)
        for name, size in self.sizes.items():
            if isinstance(size, tuple):
                fixed = max(len(axes) - 1 for axes in self.page.axes.values() if f"*{name}" in axes)
                yield from ((f"{name}_rank{rank}", {name: _LONG[:rank]}) for rank in (0, 1, 8 - fixed))
            yield f"empty_{name}", {name: (0, *size[1:]) if isinstance(size, tuple) else 0}
        ones = {name: (1,) * len(size) if isinstance(size, tuple) else 1 for name, size in self.sizes.items()}
        yield "ones", ones

    # ---------------------------------------------------------------------------- workloads

    def workloads(self, models: Iterable[Workload]) -> Workloads:
        """The sizes of measurements, then those of models, of which the first is shown."""
        measured = [Workload(name=name, sizes=self._grown(number)) for name, number in _ELEMENTS.items()]
        modelled = [
            replace(each, shown=not place, simulated=each.simulated or self._shrunk(each.sizes))
            for place, each in enumerate(models)
        ]
        return Workloads(
            named=named(*measured, *modelled),
            variants={name: values for name, values in self.values.items() if len(values) > 1},
            uneven={**self.page.smallest, **self._sizes(itertools.cycle(_UNEVEN))},
        )

    def _elements(self, sizes: Sizes) -> int:
        """Elements of the largest input."""
        return max(math.prod(self.page.shape_of(p.name, sizes)) for p in self.page.inputs)

    def _grown(self, elements: int) -> Sizes:
        """Sizes doubled in turn, as far as they may be, until an input has so many elements."""
        sizes = dict(self.sizes)
        for name, axis in itertools.islice(itertools.cycle(_lengths(sizes)), 256):
            doubled = _times(sizes[name], axis, 2)
            if self._elements(sizes) < elements and (
                axis is not None or doubled in self.page.limits.get(name, ANY)
            ):
                sizes[name] = doubled
        return sizes

    def _shrunk(self, sizes: Mapping[str, Any]) -> Sizes:
        """Sizes halved, the longest first, until the largest input has a sixteenth of its elements."""
        full = {**self.sizes, **sizes}
        most = self._elements(full) // _MOST_HALVED
        while self._elements(full) > most:
            lengths = _lengths({name: full[name] for name in self.sizes})
            name, axis = max(lengths, key=lambda place: lengths[place])
            full[name] = _times(full[name], axis, 0.5)
        return {name: full[name] for name in sizes}

    # ---------------------------------------------------------------------------- the rest

    def completed(self, models: Iterable[Workload], given: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the record, those given and, where they are not, those that are derived."""
        names = tuple(p.name for p in self.page.inputs)
        derived = {
            "workloads": None,
            "build": self.build,
            "samples": self.samples,
            "make_inputs": self.make_inputs,
            "reads": lambda call: dict.fromkeys(self._outputs, names),
            "extra_tolerance": lambda inputs, attrs, output: 0.0,
            "determinism_check": lambda call, release: None,
        }
        found = {**derived, **given}
        found["build"] = self._signed(found["build"])
        found["workloads"] = found["workloads"] or self.workloads(models)
        if "data_check" in found and "references_by_rule" not in found:
            found["reference"] = _checked(found["reference"], found["data_check"])
        return found

    def make_inputs(self, call: CallMeta, rng: np.random.Generator) -> dict[str, npt.NDArray[Any] | None]:
        """Draws the operands of a call, as their parameters say."""
        made: dict[str, npt.NDArray[Any] | None] = {}
        for param in self.page.inputs:
            meta = call.inputs[param.name]
            made[param.name] = array = None if meta is None else np.empty(meta.shape, meta.dtype.numpy)
            if array is not None:
                draw = param.draw or Draw("constant")
                if param.name in self.page.bounds:
                    bound = min(self.page.bounds[param.name](call), _held(array.dtype))
                    draw = Draw("integers", (0.0, float(bound)))
                fill(array.reshape(-1), draw, int(rng.integers(2**63)))
        return made


def _held(dtype: np.dtype[Any]) -> int:
    """How many whole numbers from 0 on a type holds without a gap, at most those that can be drawn."""
    if dtype == np.bool_:
        return 2
    most = np.iinfo(dtype).max if dtype.kind in "iu" else 2 ** (np.finfo(dtype).nmant + 1) - 1
    return min(int(most), 2**31 - 1) + 1


def _checked(reference: Callable[..., None], data_check: Callable[..., None]) -> Callable[..., None]:
    """A reference that takes any values, after the check that comes before the operator everywhere."""

    @wraps(reference)
    def run(inputs: Arrays, attrs: Mapping[str, Any], outputs: Mapping[str, Any], **how: Any) -> None:
        data_check(inputs, attrs)
        reference(inputs, attrs, outputs, **how)

    return run


def _type(value: Any) -> str:
    """The annotation of a keyword of `build`."""
    if isinstance(value, tuple):
        return f"tuple[{type(value[0]).__name__ if value else 'int'}, ...]"
    return type(value).__name__


def _lengths(sizes: Mapping[str, Any]) -> dict[tuple[str, int | None], int]:
    """Every number in sizes, by its name and its place in a list."""
    lists = {name: size if isinstance(size, tuple) else None for name, size in sizes.items()}
    alone: dict[tuple[str, int | None], int] = {
        (name, None): sizes[name] for name, entries in lists.items() if entries is None
    }
    return alone | {(name, axis): n for name, e in lists.items() for axis, n in enumerate(e or ())}


def _times(size: Any, axis: int | None, factor: float) -> Any:
    if axis is None:
        return int(size * factor)
    return (*size[:axis], int(size[axis] * factor), *size[axis + 1 :])
