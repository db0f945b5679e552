"""Server information and verdicts as frozen records."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from npugrad import codec
from npugrad.dtypes import DType, dtype_from_wire
from npugrad.errors import NpugradError, RequestError, Source, Violation
from npugrad.meta import TensorMeta
from npugrad.ops import get_operator
from npugrad.products import Product, product_from_name, product_from_wire
from npugrad.recipe import Recipe
from npugrad.registry import REGISTRY, Registry
from npugrad.representation import Shown, counted, html_table, in_lines, some
from npugrad.v1 import server_pb2
from npugrad.validation import Verdict, make_call, validate_call
from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from npugrad.releases import CannRelease
    from npugrad.v1 import validation_pb2
    from npugrad_client._arrays import Operand

_SHOWN = (
    *("version", "product", "draining", "uptime_s", "queue_depth", "accepted_calls"),
    *("input_arena_used_bytes", "output_arena_used_bytes", "verify_sample", "cann"),
)
"""Fields of `ServerInfo` that a notebook shows as they are."""
SERVER_INFO_REQUEST = server_pb2.GetServerInfoRequest()


@dataclass(frozen=True, repr=False)
class DeviceInfo(Shown):
    """One device of a server.

    Example:
        >>> [d.name for d in client.server_info().devices if d.state == "ready"]
        ['cpu:0']

    Attributes:
        name: Such as ``"cpu:0"``.
        backend: ``"cpu"``, ``"cpu-reference"``, ``"npu"`` or ``"test"``.
        description: Description by the backend.
        simulated: True when the device is simulated.
        state: ``"starting"``, ``"ready"``, ``"restarting"``, ``"down"`` or ``"quarantined"``.
        restarts: Number of times its worker was replaced.
        reason: Why it is not ready, when it is not.
    """

    name: str
    backend: str
    description: str
    simulated: bool
    state: str
    restarts: int
    reason: str


@dataclass(frozen=True, repr=False)
class ServerLimits(Shown):
    """Limits of a server in bytes, except `max_queue_depth`, which is a number of calls.

    Example:
        >>> limits = client.server_info().limits
        >>> f"{limits.max_queue_depth} calls, {limits.input_arena_bytes >> 20} MiB of operands"
        '... calls, ... MiB of operands'
    """

    max_message_bytes: int
    max_chunk_bytes: int
    recommended_chunk_bytes: int
    input_arena_bytes: int
    output_arena_bytes: int
    max_queue_depth: int


@dataclass(frozen=True, repr=False)
class ServerInfo:
    """Description of a server.

    Example:
        >>> info = client.server_info()
        >>> print(info.product, info.queue_depth)
        atlas-a2 0

    Attributes:
        version: Version of the server.
        product: Product it serves.
        devices: Its devices.
        limits: Its limits.
        versions: Versions of the components it is built on, by name.
        operators: Names of the operators it runs.
        draining: Whether it is shutting down, so that calls should go elsewhere.
        uptime_s: Seconds since it started.
        queue_depth: Calls currently waiting for a device.
        accepted_calls: Calls admitted since it started.
        input_arena_used_bytes: Bytes of operands currently held.
        output_arena_used_bytes: Bytes of results currently held.
        verify_sample: Fraction of calls that it verifies without being asked; None if it does not say.
        cann: Release of CANN by whose pages calls are checked; empty for those of each operator.
    """

    version: str
    product: Product
    devices: tuple[DeviceInfo, ...]
    limits: ServerLimits
    versions: Mapping[str, str]
    operators: tuple[str, ...]
    draining: bool
    uptime_s: float
    queue_depth: int
    accepted_calls: int
    input_arena_used_bytes: int
    output_arena_used_bytes: int
    verify_sample: float | None = None
    cann: str = ""

    def __repr__(self) -> str:
        """Version, product, devices and load; ``npugrad info`` and the attributes show the rest."""
        devices = [f"{device.name} {device.state}" for device in self.devices]
        state = "draining" if self.draining else "serving"
        parts = [
            f"npugrad {self.version} for {self.product}",
            f"{state} for {self.uptime_s:.0f} s",
            f"devices: {some(devices, 3, '.devices') or 'none'}",
            counted(len(self.operators), "operator"),
            f"{self.queue_depth} of {self.limits.max_queue_depth} calls waiting",
        ]
        return in_lines("ServerInfo", parts)

    def _repr_html_(self) -> str:
        """A table of the devices and one of the other fields, for notebooks."""
        header = ("device", "state", "backend", "description", "restarts", "reason")
        rows = [
            (
                d.name,
                d.state,
                d.backend + " (simulated)" * d.simulated,
                d.description,
                str(d.restarts),
                d.reason,
            )
            for d in self.devices
        ]
        told = {name: str(getattr(self, name)) for name in _SHOWN}
        told["uptime_s"] = f"{self.uptime_s:.0f}"
        told["operators"] = ", ".join(self.operators)
        told["versions"] = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        told |= {each.name: str(getattr(self.limits, each.name)) for each in fields(self.limits)}
        return "\n".join(
            (html_table("ServerInfo", ("field", "value"), told.items()), html_table("Devices", header, rows))
        )


@dataclass(frozen=True, repr=False)
class ParameterInfo(Shown):
    """One parameter of an operator, as a server describes it.

    Example:
        >>> operators = {each.name: each for each in client.list_operators()}
        >>> floyd = operators["fused_floyd_attention_grad"]
        >>> [p.name for p in floyd.parameters if p.optional]
        ['atten_mask']

    Attributes:
        name: Name on the wire and in Python.
        c_name: Name in the C signature.
        role: ``"input"``, ``"attribute"`` or ``"output"``.
        doc: Meaning, with the shape in symbols.
        dtypes: Supported types on the product.
        optional: True when null is legal.
    """

    name: str
    c_name: str
    role: str
    doc: str
    dtypes: tuple[DType, ...]
    optional: bool


@dataclass(frozen=True, repr=False)
class ConstraintInfo(Shown):
    """One constraint of an operator.

    Example:
        >>> operators = {each.name: each for each in client.list_operators()}
        >>> floyd = operators["fused_floyd_attention_grad"]
        >>> [c.id for c in floyd.constraints if c.code == 161001]
        ['query.not_null', ...]

    Attributes:
        id: Stable identifier.
        code: aclnn code of a call that violates it.
        text: The documented sentence.
        sources: Where it is documented.
        operands: Operands it concerns.
        vendor_code: What the vendor's own source returns: a number, ``"accepts"``, or ``"varies"`` if it
            depends on the call.
    """

    id: str
    code: int
    text: str
    sources: tuple[Source, ...]
    operands: tuple[str, ...]
    vendor_code: str


@dataclass(frozen=True, repr=False)
class OperatorInfo:
    """One operator, as a server describes it.

    Example:
        >>> [o.name for o in client.list_operators() if o.supported]
        ['multi_scale_deformable_attention_grad', ...]

    Attributes:
        name: Such as ``"group_norm_backward"``.
        aclnn_name: Name of the aclnn function.
        summary: What it computes.
        parameters: In the order of the C signature.
        constraints: In the order they are reported.
        supported: False if the product or all of the server's devices lack the operator.
        min_cann: Oldest CANN release with the operator.
    """

    name: str
    aclnn_name: str
    summary: str
    parameters: tuple[ParameterInfo, ...]
    constraints: tuple[ConstraintInfo, ...]
    supported: bool
    min_cann: str

    def __repr__(self) -> str:
        """Names and counts; ``npugrad ops OPERATOR`` and the attributes show the rest."""
        counts = [counted(len(self.parameters), "parameter"), counted(len(self.constraints), "constraint")]
        state = "supported" if self.supported else "not supported"
        return in_lines("OperatorInfo", [self.name, self.aclnn_name, *counts, state])


def product_number(product: Product | str | None) -> Any:
    """Wire number of a product; 0 for None, which is the server's."""
    return 0 if product is None else product_from_name(product).wire


class Validation:
    """A call to validate. The metas of operands are sent; values, of those that are arrays, are checked here.

    Attributes:
        request: Asks a server.
    """

    def __init__(
        self,
        operator: str,
        inputs: Mapping[str, Operand | TensorMeta | None],
        attrs: Mapping[str, Any],
        outputs: Mapping[str, TensorMeta | None] | None,
        product: Product | str | None,
        *,
        registry: Registry = REGISTRY,
    ) -> None:
        """Arguments and errors as in `Client.validate`."""
        self._record = record = get_operator(operator, registry.records)
        known = {name: _known(value, record.name, name) for name, value in inputs.items()}
        self._arrays = {name: array for name, (_, array) in known.items() if array is not None}
        metas = {name: meta for name, (meta, _) in known.items()}
        self._call = call = make_call(record, metas, attrs, outputs, product or Product.ATLAS_A2)
        message, _ = codec.encode_request(
            call.inputs, {}, record, call.attrs, call.outputs, registry=registry
        )
        self.request = registry.validate_request(product=product_number(product))
        codec.wrap(self.request.call, record, message)

    def verdict(self, response: validation_pb2.ValidateResponse) -> Verdict:
        """The verdict of a server; NpugradError if it is malformed, else errors as in `Client.validate`."""
        return self._checked(decode_verdict(response))

    def local(self, release: CannRelease | None = None) -> Verdict:
        """The verdict without a server, for Atlas A2 if no product was given; errors as above."""
        return self._checked(validate_call(self._record.at(release), self._call))

    def _checked(self, verdict: Verdict) -> Verdict:
        record, known = self._record, self._arrays
        if not verdict.status and known.keys() >= {*record.checked_operands}:
            operands: dict[str, Any] = {**self._call.inputs, **known}  # of the others only the shape matters
            record.data_check(operands, self._call.attrs)
        return verdict


def _known(
    value: Operand | TensorMeta | None, operator: str, name: str
) -> tuple[TensorMeta | None, npt.NDArray[Any] | None]:
    """Meta of an operand, and its values, if they are here."""
    if value is None or isinstance(value, TensorMeta):
        return value, None
    if isinstance(value, Recipe):
        return value.meta, None
    array = _arrays.to_numpy(value, operator, name)
    return _arrays.pack(array)[0], array


def decode_verdict(response: validation_pb2.ValidateResponse) -> Verdict:
    """Decodes the verdict of a server; raises NpugradError if it is malformed."""
    try:
        outputs: dict[str, TensorMeta | None] = {
            o.name: codec.decode_meta(o.meta, "validate", o.name) if o.HasField("meta") else None
            for o in response.outputs
        }
    except RequestError as error:  # the request was fine: not the caller's mistake
        raise NpugradError(f"the server's reply is malformed: {error}") from None
    violations = tuple(
        Violation(v.id, v.code, tuple(v.operands), v.found, v.expected, v.text, _sources(v.sources))
        for v in response.violations
    )
    return Verdict(
        response.status,
        violations,
        outputs,
        predicted_wait_s=response.predicted_wait_s if response.HasField("predicted_wait_s") else None,
        predicted_run_s=response.predicted_run_s if response.HasField("predicted_run_s") else None,
    )


def _sources(messages: Any) -> tuple[Source, ...]:
    return tuple(Source(s.document, s.section, s.row) for s in messages)


def decode_server_info(response: server_pb2.GetServerInfoResponse) -> ServerInfo:
    """Decodes the description of a server; raises NpugradError if its product is unknown here."""
    product = product_from_wire(response.product)
    if product is None:
        raise NpugradError(
            f"server_info: the server's reply is malformed: found product {response.product}; "
            f"expected one of {', '.join(f'{p.wire} ({p})' for p in Product)}"
        )
    limits = ServerLimits(**{name: getattr(response.limits, name) for name in ServerLimits.__annotations__})
    devices = tuple(
        DeviceInfo(d.name, d.backend, d.description, d.simulated, _state(d.state), d.restarts, d.reason)
        for d in response.devices
    )
    return ServerInfo(
        version=response.version,
        product=product,
        devices=devices,
        limits=limits,
        versions=dict(response.versions),
        operators=tuple(response.operators),
        draining=response.draining,
        uptime_s=response.uptime_s,
        queue_depth=response.queue_depth,
        accepted_calls=response.accepted_calls,
        input_arena_used_bytes=response.input_arena_used_bytes,
        output_arena_used_bytes=response.output_arena_used_bytes,
        verify_sample=response.verify_sample if response.HasField("verify_sample") else None,
        cann=response.cann,
    )


def _state(number: Any) -> str:
    if number not in server_pb2.DeviceState.values():
        return f"state {number}"  # from a newer server
    return str(server_pb2.DeviceState.Name(number)).removeprefix("DEVICE_STATE_").lower()


def encode_list(product: Product | str | None) -> server_pb2.ListOperatorsRequest:
    """Encodes the request to list the operators."""
    return server_pb2.ListOperatorsRequest(product=product_number(product))


def decode_operators(response: server_pb2.ListOperatorsResponse) -> tuple[OperatorInfo, ...]:
    """Decodes the list of operators."""
    return tuple(
        OperatorInfo(
            name=o.name,
            aclnn_name=o.aclnn_name,
            summary=o.summary,
            parameters=tuple(_parameter(p) for p in o.parameters),
            constraints=tuple(
                ConstraintInfo(c.id, c.code, c.text, _sources(c.sources), tuple(c.operands), c.vendor_code)
                for c in o.constraints
            ),
            supported=o.supported,
            min_cann=o.min_cann,
        )
        for o in response.operators
    )


def _parameter(message: server_pb2.Parameter) -> ParameterInfo:
    dtypes = tuple(d for d in map(dtype_from_wire, message.data_types) if d is not None)
    return ParameterInfo(message.name, message.c_name, message.role, message.doc, dtypes, message.optional)
