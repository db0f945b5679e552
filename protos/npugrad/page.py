"""`Page`: an operator's record, written down in the order of its official page.

First the parameters, in the order of the C signature; then the rules, each a kind of `npugrad.rules`, with
the row of the page's error table and the number of the vendor's check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Literal

from npugrad.changes import MASK, Breaking
from npugrad.citing import Citing
from npugrad.derivation import Calls
from npugrad.error_table import PARAM_INVALID
from npugrad.generators import Draw
from npugrad.meta import TensorMeta
from npugrad.names import camel_case
from npugrad.operator import AttrParam, Constraint, NotExpressible, OpRecord, TensorParam
from npugrad.profiles import Released, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from npugrad.attributes import AttrType
    from npugrad.changes import Candidates
    from npugrad.citing import Numbers
    from npugrad.dtypes import DType
    from npugrad.errors import Source
    from npugrad.meta import CallMeta
    from npugrad.operator import Finding, Param, VendorCode
    from npugrad.products import Product
    from npugrad.workloads import Workload

    Check = Callable[[CallMeta], Finding | None]
    DTypes = Mapping[Product, tuple[DType, ...]]

_NORMAL = Draw("normal")
_MADE_BY_SERVICE = ("workspaceSize", "executor", "workspace", "stream")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule about one operand, as a kind of `npugrad.rules` makes it.

    Attributes:
        kind: Second half of its identifier.
        text: The sentence; without a full stop, the operand's name in C goes before it.
        check: Returns None if it holds; asked about an output only if it is wanted.
        breaks: Changes of a legal call, one of which breaks it and nothing else.
        about: Further operands that it concerns.
        requires: Constraints to hold first, besides those against null pointers.
        code: aclnn code of a call that violates it.
        is_always: Whether it is asked about outputs that are masked out, too.
        is_nullable: Whether it is asked about operands that are null, too.
        vendor: The vendor's code for calls that violate it, by default `code`, and why it differs.
    """

    kind: str
    text: str
    check: Check
    breaks: Candidates
    about: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    code: int = PARAM_INVALID
    is_always: bool = False
    is_nullable: bool = False
    vendor: tuple[VendorCode | Callable[[CallMeta], VendorCode], str] | None = None


@dataclass
class Page(Citing, Breaking, Released):
    """One operator's page, with what differs in those of other releases of CANN.

    Attributes:
        document, repository, editions: As in `Citing`.
        products: Products that have it, with the source of that fact.
        accepts_unchecked: Whether a call succeeds before anything is checked.
        keeps_format: Whether outputs have the storage format of the inputs that they are like, else ND.
        arranged: The call with the axes of its operands in the order of `axes`, and what is said of that.
        params: Parameters by name, in the order of the C signature.
        axes: Sizes on the axes of tensors, in the words of the page.
        leaders: Which axis of which input defines a size.
        short: What sizes are called in `build`, if not by the page's words.
        smallest: Sizes of the smallest call, by those names, wherever they are not derived.
        limits: Sizes that may not be any number.
        values: Legal values of attributes, those of the smallest call first.
        bounds: Of operands of whole numbers, from a call: they are less, and not negative.
        unexamined: Calls that the vendor's source accepts before its checks, though they are checked here.
        finished: A derived call with what no axis tells.
    """

    document: str
    repository: str
    products: Mapping[Product, str]
    editions: tuple[str, ...] = ()
    accepts_unchecked: Callable[[CallMeta], bool] = lambda call: False
    keeps_format: bool = False
    arranged: Callable[[CallMeta], tuple[CallMeta, str]] = lambda call: (call, "")
    params: dict[str, Param] = field(default_factory=dict, init=False)
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)
    leaders: dict[str, tuple[str, int]] = field(default_factory=dict, init=False)
    short: Mapping[str, str] = field(default_factory=dict)
    smallest: Mapping[str, Any] = field(default_factory=dict)
    limits: dict[str, Sequence[int]] = field(default_factory=dict, init=False)
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict, init=False)
    bounds: dict[str, Callable[[CallMeta], int]] = field(default_factory=dict, init=False)
    unexamined: Callable[[CallMeta], bool] = lambda call: False
    finished: Callable[[CallMeta], CallMeta] = lambda call: call
    _constraints: dict[str, Constraint] = field(default_factory=dict, init=False)
    _applying: dict[Product, dict[str, Constraint]] = field(default_factory=dict, init=False)
    _not_expressible: list[NotExpressible] = field(default_factory=list, init=False)
    _followers: dict[str, list[str]] = field(default_factory=dict, init=False)
    _bits: dict[str, int | None] = field(default_factory=dict, init=False)
    _metas: dict[str, Callable[[CallMeta], TensorMeta]] = field(default_factory=dict, init=False)

    # ---------------------------------------------------------------------------- parameters

    @row
    def input(self, name: str, dtypes: DTypes | str, doc: str, *, axes: str = "", **extra: Any) -> None:
        """An input; `axes` names its sizes, such as ``n c *spatial`` where `spatial` is any number of axes.

        Instead of types, the name of an input with the same types and, by default, axes; `extra` is the rest
        of `TensorParam`, its `axes` as `order`, and for whole numbers `below`, for `bounds`.
        """
        if isinstance(dtypes, str):
            axes = axes or " ".join(self.axes[dtypes])
            extra = {"uncarried": self.tensor(dtypes).uncarried, **extra}
            dtypes = self.tensor(dtypes).dtypes
        if "below" in extra:
            self.bounds[name], extra["draw"] = extra.pop("below"), None
        self._tensor(name, "input", {"dtypes": dtypes, "doc": doc, "draw": _NORMAL, **extra})
        self.axes[name] = tuple(axes.split())

    @row
    def output(
        self,
        name: str,
        like: str,
        doc: str,
        *,
        meta: Callable[[CallMeta], TensorMeta] | None = None,
        **extra: Any,
    ) -> None:
        """An output with dtype and shape of an input, or as `meta` says; it has a bit of the mask, if any."""
        own, bit = extra.get("dtypes"), len(self._metas) if MASK in self.params else None
        types = {} if own else {key: getattr(self.tensor(like), key) for key in ("dtypes", "uncarried")}
        extra = {**types, "doc": doc, "like": like, "masked_by": bit, **extra}
        self._tensor(name, "output", extra)
        self._bits[name], self._metas[name] = bit, meta or (lambda call: self._alike(call, like, own))

    @row
    def attr(self, name: str, kind: AttrType, doc: str, values: Sequence[Any] = (), **extra: Any) -> None:
        """An attribute, with legal values that derived calls have; `extra` is the rest of `AttrParam`."""
        by_type = (False, True) if kind == "bool" else tuple(extra.get("choices", {}).values())
        self.values[name] = tuple(values) or by_type
        extra = {"c_name": camel_case(name), **extra}
        self.params[name] = AttrParam(name=name, type=kind, doc=doc, **extra)

    def _tensor(self, name: str, role: Literal["input", "output"], extra: dict[str, Any]) -> None:
        extra = {"c_name": camel_case(name), "axes": extra.pop("order", None), **extra}
        self.params[name] = TensorParam(name=name, role=role, **extra)

    @row
    def sizes(self, names: str, *, of: str) -> None:
        """Which input defines sizes: the others that have them are compared with it."""
        self.leaders |= {name: (of, self.axes[of].index(name)) for name in names.split()}

    def tensor(self, name: str) -> TensorParam:
        """The input or output of that name."""
        param = self.params[name]
        assert isinstance(param, TensorParam), name
        return param

    def _alike(self, call: CallMeta, like: str, dtypes: DTypes | None) -> TensorMeta:
        """What an output is inferred to be: like an input, in its own first type if it lacks the input's."""
        meta = call.tensor(like)
        if self.keeps_format:
            return meta
        own = (dtypes or {}).get(call.product) or (meta.dtype,)
        return TensorMeta(meta.dtype if meta.dtype in own else own[0], meta.shape)

    @property
    def inputs(self) -> list[TensorParam]:
        """The inputs."""
        return [p for p in self.params.values() if isinstance(p, TensorParam) and p.role == "input"]

    def shape_of(self, name: str, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of a tensor for given sizes, several for ``*name``."""
        each = (int(axis) if axis.isdigit() else sizes[self.size(axis)] for axis in self.axes[name])
        return tuple(chain.from_iterable(size if isinstance(size, tuple) else (size,) for size in each))

    def is_output(self, name: str) -> bool:
        """Whether it is one."""
        return name in self._metas

    def output_metas(self, call: CallMeta) -> dict[str, TensorMeta]:
        """Metas of all outputs of a legal call: as declared, else as inferred."""
        metas = {name: call.declared(name) or infer(call) for name, infer in self._metas.items()}
        return {name: meta.contiguous() for name, meta in metas.items()}

    def is_wanted(self, call: CallMeta, name: str) -> bool:
        """Whether the mask, if any, is legal and includes an output."""
        bit = self._bits[name]
        if bit is None:
            return True
        mask = call.mask()
        return mask is not None and len(mask) == len(self._metas) and mask[bit]

    # ---------------------------------------------------------------------------- rules

    @row
    def rule(
        self,
        kind: Callable[[Page, str], Rule],
        names: str,
        *,
        row: Numbers = None,
        check: Numbers = None,
        entry: Numbers = None,
        cite: str = "",
        **extra: Any,
    ) -> None:
        """A rule about each of some operands.

        Args:
            kind: Makes the rule of an operand.
            names: The operands, with spaces between them.
            row: Row of the page's error table for the rule's code, from 1.
            check: Check of the first phase in the vendor's source, from 1.
            entry: Entry of the page's constraint section, from 1.
            cite: Further operands whose descriptions on the page say it.
            extra: `id`, `text`, `code` and `breaks`, if not those of the kind; `requires`, in addition to the
                kind's, with ``{}`` for the operand; `vendor` for `vendor_code`; else for `Constraint`.
        """
        for place, name in enumerate(names.split()):
            made, options = kind(self, name), dict(extra)
            code = options.pop("code", made.code)
            cited = (self.sources("parameters", self.params[each].c_name) for each in cite.split())
            sources = self.places(place, row, entry, check, code)
            self._add(name, made, code, (*sources, *chain.from_iterable(cited)), options)

    def _add(
        self, name: str, made: Rule, code: int, sources: tuple[Source, ...], options: dict[str, Any]
    ) -> None:
        vendor, pick = made.vendor or (code, "")
        vendor, pick = options.pop("vendor", vendor), options.pop("pick", pick)
        identifier = options.pop("id", f"{name}.{made.kind}")
        if identifier in self._constraints:
            raise ValueError(f"{self.document}: two rules have the identifier {identifier}")
        requires = (*self._required(made, name), *made.requires, *options.pop("requires", ()))
        requires = tuple(dict.fromkeys(each.format(name) for each in requires))
        self._constraints[identifier] = Constraint(
            id=identifier,
            code=code,
            text=options.pop("text", self._sentence(name, made)),
            sources=(*sources, *self._cited(name, made)),
            operands=(name, *made.about),
            check=self._asked(name, made),
            violate=self.violation(identifier, options.pop("breaks", made.breaks), vendor),
            requires=requires,
            vendor_code=vendor,
            pick=pick,
            **options,
        )

    def _sentence(self, name: str, made: Rule) -> str:
        if name not in self.params:
            return made.text
        is_whole = made.text.endswith(".")
        sentence = made.text if is_whole else f"{self.params[name].c_name} {made.text}."
        if made.is_always or not self._is_masked(name):
            return sentence
        return f"When outputMask[{self.tensor(name).masked_by}] is true, {sentence}"

    def _cited(self, name: str, made: Rule) -> Iterator[Source]:
        """Where the page describes the operand, and attributes that its rule is about."""
        if name not in self.params:
            yield from self.sources("supported products", "list")
            return
        is_cited = [made.is_nullable or isinstance(self.params[each], AttrParam) for each in made.about]
        for each in (name, *compress(made.about, is_cited)):
            yield from self.sources("parameters", self.params[each].c_name)

    def _required(self, made: Rule, name: str) -> Iterator[str]:
        """What a rule requires because of its operands: that none is null, and that the mask is legal."""
        masks = [f"{MASK}.length"] if self._is_masked(name) else []
        nulls = [] if made.is_nullable else [f"{each}.not_null" for each in (name, *made.about)]
        return (each for each in (*masks, *nulls) if each in self._constraints)

    def _is_masked(self, name: str) -> bool:
        """Whether rules about an operand hold only if the mask includes it."""
        param = self.params.get(name)
        if not isinstance(param, TensorParam) or param.masked_by is None:
            return False
        return param.when_masked == "null"

    def _asked(self, name: str, made: Rule) -> Check:
        if made.is_always or not self._is_masked(name):
            return made.check
        return lambda call: made.check(call) if self.is_wanted(call, name) else None

    @row
    def not_expressible(
        self, reason: str, *, check: Numbers = None, entry: Numbers = None, name: str = ""
    ) -> None:
        """A part of the page, or a check, that no call can break, and why."""
        described = self.sources("parameters", self.params[name].c_name) if name else ()
        sources = (*self.places(0, None, entry, check), *described)
        self._not_expressible += [NotExpressible(source, reason) for source in sources]

    @cached_property
    def calls(self) -> Calls:
        """What is derived of its parameters, once all are there."""
        return Calls(self)

    def size(self, axis: str) -> str:
        """What the size of an axis is called in `build`."""
        return self.short.get(axis, axis.lstrip("*"))

    def record(
        self,
        name: str,
        *,
        sizes: Mapping[str, Any] | None = None,
        models: Sequence[Workload] = (),
        **extra: Any,
    ) -> OpRecord:
        """The record: this page, what `Calls` derives from it, and further attributes of `OpRecord`.

        The sizes are `smallest`; of the models' workloads the demo shows the first.
        """
        given = {"sizes": sizes, "models": models, **extra}
        self.smallest = sizes or self.smallest
        extra = self.calls.completed(models, extra)
        made = chain.from_iterable(self.sources("parameters", each) for each in _MADE_BY_SERVICE)
        reason = "created by the service, never null"
        return OpRecord(
            name=name,
            aclnn_name=self.document,
            documents=self.titles,
            repositories=(self.repository,),
            params=tuple(self.params.values()),
            products=self.products,
            constraints=tuple(self._constraints.values()),
            not_expressible=(*self._not_expressible, *(NotExpressible(each, reason) for each in made)),
            output_metas=self.output_metas,
            accepts_unchecked=self.accepts_unchecked,
            release=self.release,
            notes=self.notes,
            profiles=cache(lambda release: self.at(release).record(name, **given)),
            **extra,
        )
