"""Functions of other libraries that `remote` recognises as deformable attention and replaces.

A function is recognised by its module and qualified name, wherever it is imported, and by the names of its
parameters. A function with which another library has replaced it is never touched.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

from npugrad.errors import WrongValue
from npugrad.usage import reports_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    Attend = Callable[["Recognised", tuple[Any, ...], Mapping[str, Any]], Tensor | None]
    """Computes a call of a function, or returns None if the function itself must."""

_FUNCTION = ("value", "value_spatial_shapes", "sampling_locations", "attention_weights")
_METHOD = (
    *("self", "value", "value_spatial_shapes", "value_spatial_shapes_list", "level_start_index"),
    *("sampling_locations", "attention_weights", "im2col_step"),
)


@dataclass(frozen=True)
class _Known:
    """Required name and parameters of a function.

    Attributes:
        module: Name of its module, with ``*`` for any part of it.
        qualname: Name inside the module, such as ``"Attention.forward"``.
        parameters: Names of all its parameters, in order.
        roles: Which of them are value, spatial shapes, locations and weights.
    """

    module: str
    qualname: str
    parameters: tuple[str, ...]
    roles: tuple[str, str, str, str]

    def is_named(self, module: str, qualname: str) -> bool:
        return qualname == self.qualname and fnmatchcase(module, self.module)


_IN_LIST = ("value", "value_spatial_shapes_list", "sampling_locations", "attention_weights")
_known: list[_Known] = [
    _Known("transformers.models.*.modeling_*", "MultiScaleDeformableAttention.forward", _METHOD, _IN_LIST),
    *(
        _Known(module, qualname, _FUNCTION, _FUNCTION)
        for module, qualname in (
            ("transformers.models.*.modeling_*", "multi_scale_deformable_attention"),
            ("mmcv.ops.multi_scale_deform_attn", "multi_scale_deformable_attn_pytorch"),
            ("*.ops.functions.ms_deform_attn_func", "ms_deform_attn_core_pytorch"),
            ("kornia.models.rt_detr.architecture.rtdetr_head", "_deformable_attention_kernel"),
            ("ultralytics.nn.modules.utils", "multi_scale_deformable_attn_pytorch"),
        )
    ),
]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@reports_usage
def register_deformable_attention(
    name: str,
    *,
    parameters: Sequence[str] = _FUNCTION,
    value: str = "value",
    spatial_shapes: str = "value_spatial_shapes",
    locations: str = "sampling_locations",
    weights: str = "attention_weights",
) -> None:
    """Makes every `remote` treat a function of yours as multi-scale deformable attention.

    The function must compute it with one `grid_sample` per level, with zeros padding and
    ``align_corners=False``, and return (bs, nq, nh*ch). From the next time a `remote` is entered, it is
    replaced in every module that has it under its own name, provided that its parameters match those given
    here and its first result equals that of the operator.

    Args:
        name: Module and qualified name, such as ``"models.attention:sample"`` or
            ``"models.attention:Sampler.forward"``. In the module name, ``*`` matches anything.
        parameters: Names of all parameters in order, with ``"self"`` for a method.
        value: Name of the parameter for value, (bs, nk, nh, ch).
        spatial_shapes: Name of the parameter for the height and width of each level: (nl, 2), or a list of
            pairs.
        locations: Name of the parameter for the sampling points, (bs, nq, nh, nl, np, 2), x and y, 0 to 1
            across a level.
        weights: Name of the parameter for the attention weights, (bs, nq, nh, nl, np).

    Raises:
        ValueError: `name` has no module, or a role is not among `parameters`.

    Example:
        >>> register_deformable_attention("models.attention:sample",
        ...     parameters=("feats", "shapes", "points", "scores"), value="feats",
        ...     spatial_shapes="shapes", locations="points", weights="scores")
    """
    module, colon, qualname = name.partition(":")
    if not (module and colon and qualname):
        raise WrongValue(f"register_deformable_attention: name: found {name!r}; expected 'module:function'")
    roles = (value, spatial_shapes, locations, weights)
    for role in roles:
        if role not in parameters:
            raise WrongValue(
                f"register_deformable_attention: parameters: found {tuple(parameters)}; expected {role!r} "
                "among them"
            )
    with _lock:
        _known.insert(0, _Known(module, qualname, tuple(parameters), roles))


@dataclass(frozen=True)
class AttentionOperands:
    """One call's arguments by role. The shapes are those of a valid call, and not checked.

    Attributes:
        value: (bs, nk, nh, ch).
        location: (bs, nq, nh, nl, np, 2).
        attn_weight: (bs, nq, nh, nl, np).
        spatial_shapes: Height and width of each level.
        rerun: Calls the function itself with other value, location and attn_weight.
    """

    value: Tensor
    location: Tensor
    attn_weight: Tensor
    spatial_shapes: list[tuple[int, int]]
    rerun: Callable[[Tensor, Tensor, Tensor], Any]


class Recognised:
    """A known function that was found.

    Attributes:
        name: Module and qualified name.
        agrees: Whether a call showed that it computes what its name says; None if none has shown it yet.
    """

    def __init__(self, original: FunctionType, known: _Known) -> None:
        self.agrees: bool | None = None
        self.name = f"{original.__module__}.{original.__qualname__}"
        self._original = original
        self._signature = inspect.signature(original)
        self._roles = known.roles

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionOperands | None:
        """The arguments of a call by role; None if they are something else."""
        try:
            bound = self._signature.bind(*args, **kwargs)
            value, shapes, location, weight = (bound.arguments[role] for role in self._roles)
            if not all(type(tensor) in _PLAIN for tensor in (value, location, weight)):
                return None
            pairs = [(int(height), int(width)) for height, width in shapes]
        except (KeyError, TypeError, ValueError):
            return None  # the function itself reports what is wrong

        def rerun(*floats: Tensor) -> Any:
            value_role, _, *others = self._roles
            given = dict(zip((value_role, *others), floats, strict=True))
            again = self._signature.bind(*args, **kwargs)
            again.arguments.update(given)
            return self._original(*again.args, **again.kwargs)

        return AttentionOperands(value, location, weight, pairs, rerun)


_lock = threading.Lock()
_depth = 0
"""Number of times that `remote` is entered now, over all threads."""
_replaced: list[tuple[Any, str, FunctionType]] = []
"""Where a wrapper is, under which name, and what it replaced."""
_wrappers: dict[FunctionType, FunctionType] = {}
"""By original, kept forever: other patchers may keep a wrapper for longer than `remote` is entered."""


def replace(attend: Attend, tell: Callable[[str, str], None]) -> None:
    """Replaces all known functions, until `restore`.

    Args:
        attend: Computes a call of a known function, or returns None if the function itself must; always the
            same one.
        tell: Called with kind and text of a warning about an object in a known function's place.
    """
    global _depth
    with _lock:
        found = list(_find())
    for place in found:
        if isinstance(place.recognised, str):
            tell(f"not replaced: {place.what}", f"{place.what} is not replaced: {place.recognised}")
    with _lock:
        _depth += 1
        for place in found:
            _replace(place, attend)


def restore() -> None:
    """Undoes one `replace`; the last one restores the originals."""
    global _depth
    with _lock:
        _depth -= 1
        while _replaced and not _depth:
            holder, name, original = _replaced.pop()
            if vars(holder).get(name) is _wrappers[original]:  # else another library has patched it since
                setattr(holder, name, original)


@dataclass(frozen=True)
class _Place:
    """Where a function of a known name was found.

    Attributes:
        holder: The module or the class that has it.
        name: Its name there.
        original: The function, unwrapped if it is wrapped by us.
        what: Module and qualified name of the place.
        recognised: The function, or why it is not recognised.
    """

    holder: Any
    name: str
    original: Any
    what: str
    recognised: Recognised | str


class _Candidates:
    """Modules with the first name of a known function.

    There are thousands of modules whenever a `remote` is entered. They are looked through again only if one
    has got more or fewer names, or if modules or known functions have come or gone.
    """

    def __init__(self) -> None:
        self._key: tuple[int, list[int]] = (0, [])
        self._modules: list[tuple[str, ModuleType]] = []
        self._spaces: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._found: list[tuple[str, ModuleType]] = []

    def find(self) -> list[tuple[str, ModuleType]]:
        """Returns names and modules."""
        imported: dict[str, object] = dict(sys.modules)
        key = (len(_known), [id(module) for module in imported.values()])
        if key != self._key:
            self._modules = [(name, it) for name, it in imported.items() if isinstance(it, ModuleType)]
            self._spaces = [vars(module) for _, module in self._modules]
            self._key, self._sizes = key, []
        sizes = [len(names) for names in self._spaces]
        if sizes != self._sizes:
            self._sizes = sizes
            firsts = {known.qualname.split(".")[0] for known in _known}
            pairs = zip(self._modules, self._spaces, strict=True)
            self._found = [it for it, names in pairs if any(first in names for first in firsts)]
        return self._found


_candidates = _Candidates()


def _find() -> Iterator[_Place]:
    """Yields every place with a known function, and those in its own module with something else."""
    ours = {wrapper: original for original, wrapper in _wrappers.items()}
    for module_name, module in _candidates.find():
        for qualname in {known.qualname for known in _known}:
            path = qualname.split(".")
            if path[0] not in vars(module):
                continue
            holder, found = _walk(module, path)
            original = ours.get(found, found) if isinstance(found, FunctionType) else found
            recognised = _recognise(original)
            if isinstance(recognised, Recognised) or any(k.is_named(module_name, qualname) for k in _known):
                yield _Place(holder, path[-1], original, f"{module_name}.{qualname}", recognised)


def _walk(module: object, path: Sequence[str]) -> tuple[Any, Any]:
    """The object that has the last name of a path, and its value there; None if the path leads nowhere."""
    holder, found = None, module
    for name in path:
        holder, found = found, vars(found).get(name) if isinstance(found, (ModuleType, type)) else None
    return holder, found


def _recognise(found: Any) -> Recognised | str:
    """Recognises an object; else returns why it is left alone."""
    if isinstance(found, FunctionType) and not hasattr(found, "__wrapped__"):
        for known in _known:
            if known.is_named(found.__module__, found.__qualname__):
                takes = tuple(inspect.signature(found).parameters)
                if takes == known.parameters:
                    return Recognised(found, known)
                return f"its parameters are {', '.join(takes)} instead of {', '.join(known.parameters)}"
    return "something else is in its place"


def _replace(place: _Place, attend: Attend) -> None:
    """Puts the wrapper of a function into a place, unless it is already there."""
    if isinstance(place.recognised, str):
        return
    wrapper = _wrappers.get(place.original)
    if wrapper is None:
        wrapper = _wrappers[place.original] = _wrap(place.original, place.recognised, attend)
    entry = (place.holder, place.name, place.original)
    if vars(place.holder).get(place.name) in (place.original, wrapper) and entry not in _replaced:
        setattr(place.holder, place.name, wrapper)
        _replaced.append(entry)


def _wrap(original: FunctionType, recognised: Recognised, attend: Attend) -> FunctionType:
    @functools.wraps(original)
    def attended(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # compile or export the function itself
            result = attend(recognised, args, kwargs)
            if result is not None:
                return result
        return original(*args, **kwargs)

    return cast("FunctionType", attended)
