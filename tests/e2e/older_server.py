"""The server as it would be without an operator: without its record, messages, method and arms of `call`.

Run as ``older_server.py OPERATOR CAN_TELL serve ...``, like ``npugrad-server serve ...``. CAN_TELL is 1;
or 0 for one that takes a call that it does not know for none, as the first servers did.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest.mock import patch

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from npugrad.errors import MalformedRequest
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS

MODULES = ("tensor", "operators", "backward", "validation", "server")


class _Pool:
    """Takes the files of the contract into the default pool, without an operator."""

    def __init__(self, rpc: str) -> None:
        self._pool = descriptor_pool.Default()
        self._rpc = rpc

    def AddSerializedFile(self, data: bytes) -> Any:
        file = FileDescriptorProto.FromString(data)
        own = {f"{self._rpc}Request", f"{self._rpc}Response"}
        _keep(file.message_type, lambda message: message.name not in own)
        for message in file.message_type:
            _keep(message.field, lambda field: field.type_name.rpartition(".")[2] not in own)
        for service in file.service:
            _keep(service.method, lambda method: method.name != self._rpc)
        return self._pool.AddSerializedFile(file.SerializeToString())


def _keep(found: Any, is_kept: Any) -> None:
    kept = [one for one in found if is_kept(one)]
    del found[:]
    found.extend(kept)


def _unwrap_as_before(header: Any, *_: Any) -> tuple[OpRecord, Any]:
    """What the first servers did."""
    name = header.WhichOneof("call")
    if name is None:
        raise MalformedRequest(f"execute: header: found no call; expected one of {', '.join(OPERATORS)}")
    return OPERATORS[name], getattr(header, name)


def main(operator: str, can_tell: str, *arguments: str) -> None:
    pool = _Pool(OPERATORS[operator].rpc)
    OPERATORS._names = tuple(name for name in OPERATORS if name != operator)
    with patch.object(descriptor_pool, "Default", lambda: pool):
        for name in MODULES:
            importlib.import_module(f"npugrad.v1.{name}_pb2")
    if can_tell == "0":
        importlib.import_module("npugrad.codec").unwrap = _unwrap_as_before  # type: ignore[attr-defined]
    cli = importlib.import_module("npugrad_server.cli")
    sys.argv = ["npugrad-server", *arguments]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
