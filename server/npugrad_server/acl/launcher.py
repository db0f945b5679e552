"""The two phases of an operator, from its record.

    with launcher.plan(record, attrs, tensors) as plan:      phase 1: checks, tiling, size of the workspace
        plan.launch(workspace, stream)                     phase 2: queues the work, uses the executor up

Guarantees
    - Arguments follow the order of `OpRecord.params`; nothing depends on an operator's name.
    - Phase 2 is called at most once for an executor; if it is not called, the executor is destroyed, even if
      phase 1 refused: generated interfaces return one before their checks.
    - Handles live until phase 2 has returned, and no longer.
Both phases and the exit from the block must be on one thread.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from npugrad.operator import TensorParam
from npugrad_server.acl.libraries import Missing
from npugrad_server.acl.release import predating
from npugrad_server.acl.runtime import AclError, concerning
from npugrad_server.acl.symbols import operator_symbols
from npugrad_server.acl.tensor import Handles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npugrad.attributes import AttrValue
    from npugrad.operator import OpRecord
    from npugrad.releases import CannRelease
    from npugrad_server.acl.libraries import Cann
    from npugrad_server.acl.runtime import Runtime
    from npugrad_server.acl.tensor import DeviceTensor

_LOG = logging.getLogger(__name__)


class Launcher:
    """Plans and launches operators."""

    def __init__(self, cann: Cann, runtime: Runtime, release: CannRelease | None = None) -> None:
        """Takes the bound functions; operators are bound on first use.

        Args:
            cann: The libraries.
            runtime: The runtime.
            release: Release of CANN, which tells operators that came later; None to go by functions alone.
        """
        self._cann = cann
        self._runtime = runtime
        self._release = release
        self._phases: dict[str, tuple[Any, Any]] = {}
        self._complained = False

    def missing(self, record: OpRecord) -> str:
        """Why an operator cannot be launched; empty when it can.

        Either no library has a function, or CANN is older than the operator: a function that is there all the
        same may take other arguments than the documented one.
        """
        reasons = [phase.reason for phase in self.phases(record) if isinstance(phase, Missing)]
        return "; ".join(reasons) or predating(self._release, record)

    def phases(self, record: OpRecord) -> tuple[Any, Any]:
        """The bound functions of both phases."""
        if record.name not in self._phases:
            symbols = operator_symbols(record)
            bound = self._cann.operator(symbols)
            self._phases[record.name] = (bound[symbols[0].name], bound[symbols[1].name])
        return self._phases[record.name]

    @contextmanager
    def plan(
        self, record: OpRecord, attrs: Mapping[str, AttrValue], tensors: Mapping[str, DeviceTensor | None]
    ) -> Iterator[FirstPhase]:
        """Runs the first phase.

        Args:
            record: The operator.
            attrs: Every attribute by name, as `make_call` returns them; None for null.
            tensors: Every operand and output by name; None for null.

        Raises:
            AclError: CANN refused.
            SymbolMissing: No library has the operator.
        """
        first, second = self.phases(record)
        with Handles(self._runtime, self._cann.tensors) as handles:
            arguments = _arguments(record, attrs, tensors, handles)
            plan = FirstPhase(self._runtime, second)
            self._runtime.forget_errors()  # even a copy queued successfully may have left a text
            try:
                plan.make(first, arguments)
                yield plan
            finally:
                self._destroy(record, plan.take_executor())

    def _destroy(self, record: OpRecord, executor: int | None) -> None:
        """Destroys an executor; a failure, as CANN reports for strided operands (561000), is only logged.

        It says nothing about the call, and only the first one is logged.
        """
        if executor is None:
            return
        try:
            self._runtime.call(self._cann.tensors["aclDestroyAclOpExecutor"], executor)
        except AclError as error:
            if not self._complained:
                self._complained = True
                _LOG.warning("%s: an executor may be leaked: %s; logged once", record.name, error)


class FirstPhase:
    """The result of the first phase."""

    def __init__(self, runtime: Runtime, launch: Any) -> None:
        """Made by `Launcher.plan`."""
        self._runtime = runtime
        self._launch = launch
        self._workspace_bytes, self._executor = ctypes.c_uint64(), ctypes.c_void_p()

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the launch needs, 0 for none."""
        return self._workspace_bytes.value

    def make(self, plan: Any, arguments: Sequence[Any]) -> None:
        """Runs the first phase; for `Launcher.plan`.

        Raises:
            AclError: CANN refused; there may still be an executor.
        """
        self._runtime.call(plan, *arguments, self._workspace_bytes, self._executor)

    def take_executor(self) -> int | None:
        """Hands the executor over to the caller; None if there is none, or none any more."""
        executor, self._executor = self._executor.value, ctypes.c_void_p()
        return executor

    def launch(self, workspace: int, stream: int) -> None:
        """Runs the second phase, which queues the work; called once.

        Args:
            workspace: Address of `workspace_bytes` of device memory; any value if that is 0.
            stream: Raw stream.

        Raises:
            AclError: CANN refused; the executor is used up all the same.
            RuntimeError: There is no executor, or none any more.
        """
        executor = self.take_executor()
        if executor is None:
            raise RuntimeError("found no executor; expected one from the first phase, not yet launched")
        address = workspace if self.workspace_bytes else None
        self._runtime.forget_errors()
        self._runtime.call(self._launch, address, self.workspace_bytes, executor, stream)


def _arguments(
    record: OpRecord,
    attrs: Mapping[str, AttrValue],
    tensors: Mapping[str, DeviceTensor | None],
    handles: Handles,
) -> list[Any]:
    arguments: list[Any] = []
    for param in record.params:
        with concerning(param.name):
            if isinstance(param, TensorParam):
                tensor = tensors[param.name]
                arguments.append(None if tensor is None else handles.tensor(tensor))
            else:
                arguments.append(handles.attribute(param.type, attrs[param.name]))
    return arguments
