"""Converts between messages and calls: the only place that maps a record's names to the wire.

Decoding checks only wire integrity (known types, sane sizes and strides, attributes present); the documented
constraints are checked next, and the lengths of contents last (`check_contents`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugrad.attribute_fields import decode_attr, encode_attr
from npugrad.call import CallOptions, ExecutionInfo
from npugrad.errors import InvalidRecipe, MalformedRequest, MalformedTensor, RequestError, UnsupportedOperator
from npugrad.generators import Draw
from npugrad.info_fields import decode_info as decode_info
from npugrad.info_fields import encode_info as encode_info
from npugrad.meta import CallMeta, TensorMeta
from npugrad.meta_fields import decode_meta as decode_meta
from npugrad.meta_fields import encode_meta as encode_meta
from npugrad.recipe import DIGEST_BYTES, Recipe
from npugrad.registry import REGISTRY, Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad.attributes import AttrValue
    from npugrad.operator import OpRecord, TensorParam
    from npugrad.products import Product
    from npugrad.timeline import Recorded
    from npugrad.v1 import operators_pb2, tensor_pb2

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message that either side accepts; without a limit a length could wrap at 2^32."""
CHUNK_BYTES = 2**20
"""Recommended length of a chunk."""
MAX_CHUNK_BYTES = 4 * 2**20
"""Largest chunk that is accepted."""

MAX_PARAMETERS = 8
"""More parameters than any generator has."""


@dataclass(frozen=True)
class WireContent:
    """Content of one operand as a message carries it.

    Attributes:
        nbytes: Its length; the announced one if it follows in chunks, the generated one for a recipe.
        data: The bytes; None if they follow in chunks or are generated from a recipe.
        recipe: Recipe from which the server generates it; None if it is sent.
    """

    nbytes: int
    data: bytes | None = None
    recipe: Recipe | None = None

    @property
    def follows(self) -> bool:
        """Whether it follows in chunks."""
        return self.data is None and self.recipe is None


@dataclass(frozen=True)
class WireCall:
    """A decoded request.

    Attributes:
        record: Its operator.
        call: Metas and attributes.
        options: Options.
        contents: Content of each operand that has one and is not null.
        unsupported: Kind of content by operand, for kinds that no server supports yet.
    """

    record: OpRecord
    call: CallMeta
    options: CallOptions
    contents: Mapping[str, WireContent] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ requests


def decode_request(record: OpRecord, message: Any, product: Product) -> WireCall:
    """Decodes a typed request.

    Args:
        record: The operator.
        message: Its request message.
        product: Product to validate for.

    Raises:
        MalformedTensor: Unknown type or format, negative sizes, bad strides, sizes beyond int64.
        MalformedRequest: A missing attribute or an invalid option.
    """
    inputs: dict[str, TensorMeta | None] = {}
    contents: dict[str, WireContent] = {}
    unsupported: dict[str, str] = {}
    for param in record.inputs:
        inputs[param.name] = None
        if not message.HasField(param.name):
            continue
        tensor = getattr(message, param.name)
        meta = inputs[param.name] = decode_meta(tensor.meta, record.name, param.name)
        kind = tensor.WhichOneof("content")
        if kind == "data":
            data = tensor.data  # copied at every access: read once
            contents[param.name] = WireContent(len(data), data)
        elif kind == "chunked_bytes":
            contents[param.name] = WireContent(tensor.chunked_bytes)
        elif kind == "recipe":
            recipe = decode_recipe(tensor.recipe, meta)
            contents[param.name] = WireContent(recipe.meta.content_bytes, recipe=recipe)
        elif kind is not None:
            unsupported[param.name] = kind
    call = CallMeta(
        inputs=inputs,
        attrs={p.name: decode_attr(record, p, message) for p in record.attrs},
        outputs=_decode_declared(record, message),
        product=product,
    )
    return WireCall(record, call, _decode_options(record, message.options), contents, unsupported)


def decode_recipe(message: tensor_pb2.Recipe, meta: TensorMeta) -> Recipe:
    """Decodes a recipe; `check_contents` checks whether it is valid."""
    # One more than any generator has is enough to detect that there are too many.
    parameters = tuple(message.parameters[: MAX_PARAMETERS + 1])
    draw = Draw(message.generator, parameters, message.repeat or 1)
    return Recipe.of(draw, meta, message.seed, message.digest[: DIGEST_BYTES + 1])


def _decode_declared(record: OpRecord, message: Any) -> dict[str, TensorMeta | None]:
    declared: dict[str, TensorMeta | None] = {}
    for param in record.outputs:
        if message.HasField(param.name):
            output = getattr(message, param.name)
            meta = decode_meta(output.meta, record.name, param.name) if output.HasField("meta") else None
            declared[param.name] = meta
    return declared


def _decode_options(record: OpRecord, message: operators_pb2.CallOptions) -> CallOptions:
    options = CallOptions(message.deterministic, message.priority, message.label, message.verify)
    problem = options.problem()
    if problem:
        name, text = problem
        raise MalformedRequest(f"{record.name}: {name}: {text}", operator=record.name, operand=name)
    return options


def check_contents(wire: WireCall, *, chunked: bool) -> None:
    """Checks the length of every content against its meta.

    Args:
        wire: The decoded request, already validated.
        chunked: Whether chunks may follow (Execute) or not (unary).

    Raises:
        MalformedTensor: A content is missing, too short or too long, or announced where no chunks follow.
        InvalidRecipe: RECIPE_INVALID: a recipe from which nothing can be generated.
        RequestError: CONTENT_UNSUPPORTED: shared memory, or a type that is legal but never carried.
    """
    for param in wire.record.inputs:
        name, meta = param.name, wire.call.inputs[param.name]
        if meta is None:
            continue
        problem = _kind_problem(param, meta, wire.unsupported.get(name))
        if problem:
            raise RequestError(
                f"{wire.record.name}: {name}: {problem}",
                reason="CONTENT_UNSUPPORTED",
                operator=wire.record.name,
                operand=name,
            )
        found = wire.contents.get(name)
        problem = found.recipe.problem() if found is not None and found.recipe is not None else None
        if problem:
            raise InvalidRecipe(
                f"{wire.record.name}: {name}: {problem}", operator=wire.record.name, operand=name
            )
        problem = _content_problem(meta, found, chunked)
        if problem:
            raise MalformedTensor(
                f"{wire.record.name}: {name}: {problem}", operator=wire.record.name, operand=name
            )


def _kind_problem(param: TensorParam, meta: TensorMeta, kind: str | None) -> str | None:
    if kind is not None:
        return f"found content of kind {kind}; expected data, chunks or a recipe"
    if meta.dtype not in param.uncarried:
        return None
    carried = ", ".join(dict.fromkeys(dtype for dtypes in param.dtypes.values() for dtype in dtypes))
    return f"found dtype {meta.dtype}, which the operator takes, but which is never sent; expected {carried}"


def _content_problem(meta: TensorMeta, found: WireContent | None, chunked: bool) -> str | None:
    if not meta.dtype.has_data:
        return (
            None
            if found is None or not found.nbytes
            else f"found content; expected none for dtype {meta.dtype}"
        )
    if found is None:
        return f"found no content; expected {meta.content_bytes} bytes for {meta}"
    if found.follows and not chunked:
        return "found content announced in chunks; expected it inline in a unary call"
    if found.nbytes != meta.content_bytes:
        return f"found {found.nbytes} bytes of content; expected {meta.content_bytes} for {meta}"
    return None


def encode_request(
    wire_metas: Mapping[str, TensorMeta | None],
    contents: Mapping[str, memoryview | Recipe],
    record: OpRecord,
    attrs: Mapping[str, AttrValue],
    outputs: Mapping[str, TensorMeta | None] | None = None,
    options: CallOptions | None = None,
    *,
    chunk_from_bytes: int | None = None,
    registry: Registry = REGISTRY,
) -> tuple[Any, list[tuple[int, memoryview]]]:
    """Encodes a typed request.

    Args:
        wire_metas: Meta of each input, None for null.
        contents: Content or recipe of each input that is not null; empty to validate without data.
        record: The operator.
        attrs: Every attribute in its wire type, as `make_call` returns them.
        outputs: Declared outputs, None for null.
        options: Options of the call.
        chunk_from_bytes: Contents of at least this length are announced for chunks; None sends all inline.
        registry: Registry with the operator's message.

    Returns:
        The message, and (parameter index, content) of each announced operand in order.
    """
    message = registry.requests[record.name]()
    follow = []
    for param in record.inputs:
        meta = wire_metas[param.name]
        if meta is None:
            continue
        tensor = getattr(message, param.name)
        encode_meta(meta, tensor.meta)
        data = contents.get(param.name)
        if isinstance(data, Recipe):
            encode_recipe(data, tensor.recipe)
        elif data is not None and _set_content(tensor, data, chunk_from_bytes):
            follow.append((record.param_index(param.name), data))
    for attr in record.attrs:
        encode_attr(message, attr, attrs[attr.name])
    for name, declared in (outputs or {}).items():
        getattr(message, name).SetInParent()
        if declared is not None:
            encode_meta(declared, getattr(message, name).meta)
    _encode_options(message, options or CallOptions())
    return message, follow


def _set_content(tensor: tensor_pb2.Tensor, data: memoryview, chunk_from_bytes: int | None) -> bool:
    if chunk_from_bytes is not None and data.nbytes >= max(chunk_from_bytes, 1):
        tensor.chunked_bytes = data.nbytes
        return True
    tensor.data = bytes(data)
    return False


def encode_recipe(recipe: Recipe, message: tensor_pb2.Recipe) -> None:
    """Writes a recipe, without its meta, into a message."""
    message.generator, message.seed, message.digest = recipe.draw.generator, recipe.seed, recipe.digest
    message.parameters.extend(recipe.draw.parameters)
    if recipe.draw.repeat != 1:
        message.repeat = recipe.draw.repeat
    message.SetInParent()


def _encode_options(message: Any, options: CallOptions) -> None:
    if options != CallOptions():
        message.options.deterministic = options.deterministic
        message.options.priority = options.priority
        message.options.label = options.label
        message.options.verify = options.verify


# ----------------------------------------------------------------------------------- responses


@dataclass(frozen=True)
class WireResult:
    """A decoded response.

    Attributes:
        metas: Meta of each output; None for masked-out ones.
        contents: Content of each output that is not masked out.
        info: Execution info.
    """

    metas: Mapping[str, TensorMeta | None]
    contents: Mapping[str, WireContent]
    info: ExecutionInfo


def encode_response(
    record: OpRecord,
    metas: Mapping[str, TensorMeta | None],
    contents: Mapping[str, memoryview],
    info: ExecutionInfo,
    *,
    chunk_from_bytes: int | None = None,
    registry: Registry = REGISTRY,
) -> tuple[Any, list[tuple[int, memoryview]]]:
    """Encodes a typed response, as `encode_request` does a request; masked-out outputs stay unset."""
    message = registry.responses[record.name]()
    follow = []
    for param in record.outputs:
        meta = metas[param.name]
        if meta is None:
            continue
        tensor = getattr(message, param.name)
        encode_meta(meta, tensor.meta)
        if _set_content(tensor, contents[param.name], chunk_from_bytes):
            follow.append((record.param_index(param.name), contents[param.name]))
    encode_info(info, message.info)
    return message, follow


def decode_response(record: OpRecord, message: Any, recorded: Recorded | None = None) -> WireResult:
    """Decodes a typed response; raises MalformedTensor if it is inconsistent."""
    metas: dict[str, TensorMeta | None] = {}
    contents: dict[str, WireContent] = {}
    for param in record.outputs:
        metas[param.name] = None
        if not message.HasField(param.name):
            continue
        tensor = getattr(message, param.name)
        meta = metas[param.name] = decode_meta(tensor.meta, record.name, param.name)
        chunked = tensor.WhichOneof("content") == "chunked_bytes"
        data = None if chunked else tensor.data
        found = contents[param.name] = WireContent(tensor.chunked_bytes if data is None else len(data), data)
        problem = _content_problem(meta, found, chunked=True)
        if problem:
            raise MalformedTensor(
                f"{record.name}: {param.name}: {problem}", operator=record.name, operand=param.name
            )
    return WireResult(metas, contents, decode_info(message.info, recorded))


# ------------------------------------------------------------------------------------- headers


def wrap(header: Any, record: OpRecord, message: Any) -> Any:
    """Puts a typed message into the `call` oneof of a header and returns the header."""
    getattr(header, record.name).CopyFrom(message)
    return header


def unwrap(
    header: Any, registry: Registry = REGISTRY, field: str = "execute: header"
) -> tuple[OpRecord, Any]:
    """The operator and typed message of a header.

    `field` names the RPC and the field of the header in errors.

    Raises:
        MalformedRequest: The header has no call.
        UnsupportedOperator: OPERATOR_UNSUPPORTED. This side does not know the operator of the call, for
            instance because the client is newer than the server.
    """
    name = header.WhichOneof("call")
    if name is not None:
        return registry.records[name], getattr(header, name)
    expected = f"expected one of {', '.join(registry.records)}"
    if header.ByteSize():  # a header has nothing but a call: one of a later release
        raise UnsupportedOperator(f"{field}: found a call of an unknown operator; {expected}")
    raise MalformedRequest(f"{field}: found no call; {expected}")
