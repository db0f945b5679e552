"""Messages and services of an operator for tests, declared in this process: no .proto has to be compiled."""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from npugrad.operator import OpRecord, TensorParam
from npugrad.v1 import backward_pb2, operators_pb2, tensor_pb2, validation_pb2

_Field = FieldDescriptorProto
_PLAIN = {
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "int8": _Field.TYPE_INT32,
    "uint64": _Field.TYPE_UINT64,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "npugrad.v1.Product": _Field.TYPE_ENUM,
}
"""Types of fields that are no messages."""
_MESSAGES = {
    "int64_array": "npugrad.v1.Int64Array",
    "float_array": "npugrad.v1.FloatArray",
    "bool_array": "npugrad.v1.BoolArray",
    "scalar": "npugrad.v1.Scalar",
}


def declared(record: OpRecord, package: str) -> FileDescriptor:
    """A file with the operator's messages, and services with its RPC, Execute and Validate."""
    file = FileDescriptorProto(name=f"{package.replace('.', '/')}.proto", package=package, syntax="proto3")
    for module in (backward_pb2, operators_pb2, tensor_pb2, validation_pb2):
        file.dependency.append(module.DESCRIPTOR.name)
    request, response = f"{package}.{record.rpc}Request", f"{package}.{record.rpc}Response"
    params = {p.name: _kind(p) if isinstance(p, TensorParam) else p.type for p in record.params}
    _message(file, f"{record.rpc}Request", {"options": "npugrad.v1.CallOptions", **params})
    results = dict.fromkeys((p.name for p in record.outputs), "npugrad.v1.Tensor")
    _message(file, f"{record.rpc}Response", {"info": "npugrad.v1.ExecutionInfo", **results})
    _message(file, "ExecuteHeader", {record.name: request}, oneof="call")
    _message(file, "ExecuteResponseHeader", {record.name: response}, oneof="call")
    for name, header in (("ExecuteRequest", "ExecuteHeader"), ("ExecuteResponse", "ExecuteResponseHeader")):
        _message(file, name, {"header": f"{package}.{header}", "chunk": "npugrad.v1.Chunk"}, oneof="frame")
    _message(file, "ValidateRequest", {"call": f"{package}.ExecuteHeader", "product": "npugrad.v1.Product"})
    service = file.service.add(name=f"{record.rpc}Service")
    service.method.add(name=record.rpc, input_type=f".{request}", output_type=f".{response}")
    streamed = {"input_type": f".{package}.ExecuteRequest", "output_type": f".{package}.ExecuteResponse"}
    service.method.add(name="Execute", client_streaming=True, server_streaming=True, **streamed)
    file.service.add(name=f"{record.rpc}ValidationService").method.add(
        name="Validate",
        input_type=f".{package}.ValidateRequest",
        output_type=".npugrad.v1.ValidateResponse",
    )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


def _kind(param: TensorParam) -> str:
    return "npugrad.v1.Tensor" if param.role == "input" else "npugrad.v1.DeclaredOutput"


def _message(file: FileDescriptorProto, name: str, kinds: dict[str, str], oneof: str = "") -> None:
    """Adds a message with fields of these kinds, numbered from 1; one that is no message has presence."""
    made = file.message_type.add(name=name)
    if oneof:
        made.oneof_decl.add(name=oneof)
    for number, (field_name, kind) in enumerate(kinds.items(), 1):
        field = made.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
        field.type = _PLAIN.get(kind, _Field.TYPE_MESSAGE)
        if field.type in (_Field.TYPE_MESSAGE, _Field.TYPE_ENUM):
            field.type_name = f".{_MESSAGES.get(kind, kind)}"
        if oneof:
            field.oneof_index = 0
        elif field.type not in (_Field.TYPE_MESSAGE, _Field.TYPE_ENUM):
            field.proto3_optional, field.oneof_index = True, len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field_name}")
