"""The operators known to one side of the wire, and their messages."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from google.protobuf.message_factory import GetMessageClass

from npugrad.ops import OPERATORS
from npugrad.profiles import records_at
from npugrad.v1 import backward_pb2, validation_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.descriptor import Descriptor, ServiceDescriptor

    from npugrad.operator import OpRecord
    from npugrad.releases import CannRelease


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
        """Finds the messages; raises KeyError if the services lack an operator."""
        self.records, self.backward, self.validation = records, backward, validation
        execute = backward.methods_by_name["Execute"]
        # By the headers, which name the operators, so that this needs no record.
        self.requests: dict[str, type[Any]] = _by_operator(execute.input_type, records)
        self.responses: dict[str, type[Any]] = _by_operator(execute.output_type, records)
        self.execute_request: type[Any] = GetMessageClass(execute.input_type)
        self.execute_response: type[Any] = GetMessageClass(execute.output_type)
        self.validate_request: type[Any] = GetMessageClass(validation.methods_by_name["Validate"].input_type)

    def at(self, release: CannRelease | None) -> Registry:
        """The same with the records of a release of CANN; None for the pages that they are written from."""
        made = copy(self)
        made.records = records_at(self.records, release)
        return made


def _by_operator(frame: Descriptor, names: Iterable[str]) -> dict[str, type[Any]]:
    """The message of each operator, as the header of a stream has it."""
    header: Any = frame.fields_by_name["header"].message_type
    return {name: GetMessageClass(header.fields_by_name[name].message_type) for name in names}


REGISTRY = Registry(
    OPERATORS,
    backward_pb2.DESCRIPTOR.services_by_name["BackwardService"],
    validation_pb2.DESCRIPTOR.services_by_name["ValidationService"],
)
"""The registry of the contract."""
