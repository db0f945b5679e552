"""The operators known to one side of the wire, and their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message_factory import GetMessageClass

from npugrad.ops import OPERATORS
from npugrad.v1 import backward_pb2, validation_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor import ServiceDescriptor

    from npugrad.operator import OpRecord


class Registry:
    """Operators and two services: one with an RPC for each operator and Execute, the other with Validate.

    Attributes:
        records: Records by name.
        backward: The service that runs them.
        validation: The service that validates their calls.
        requests: Request message of each operator by name.
        responses: Response message of each operator by name.
        execute_request: Frame of a streamed call.
        execute_response: Frame of a streamed reply.
        validate_request: A call to validate.
    """

    def __init__(
        self, records: Mapping[str, OpRecord], backward: ServiceDescriptor, validation: ServiceDescriptor
    ) -> None:
        """Finds the messages; raises KeyError if the services lack an RPC."""
        self.records, self.backward, self.validation = records, backward, validation
        methods = backward.methods_by_name
        self.requests: dict[str, type[Any]] = {
            name: GetMessageClass(methods[record.rpc].input_type) for name, record in records.items()
        }
        self.responses: dict[str, type[Any]] = {
            name: GetMessageClass(methods[record.rpc].output_type) for name, record in records.items()
        }
        self.execute_request: type[Any] = GetMessageClass(methods["Execute"].input_type)
        self.execute_response: type[Any] = GetMessageClass(methods["Execute"].output_type)
        self.validate_request: type[Any] = GetMessageClass(validation.methods_by_name["Validate"].input_type)


REGISTRY = Registry(
    OPERATORS,
    backward_pb2.DESCRIPTOR.services_by_name["BackwardService"],
    validation_pb2.DESCRIPTOR.services_by_name["ValidationService"],
)
"""The registry of the contract."""
