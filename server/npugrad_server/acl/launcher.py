"""The two phases of an operator, from its record.

    with launcher.plan(spec, attrs, tensors) as plan:      phase 1: checks, tiling, size of the workspace
        plan.launch(workspace, stream)                     phase 2: queues the work, uses the executor up

Guarantees
    - Arguments follow the order of `OpSpec.params`; nothing depends on an operator's name.
    - Phase 2 is called at most once for an executor; if it is not called, the executor is destroyed.
    - Handles live until phase 2 has returned, and not longer.
Both phases, and leaving the block, belong to one thread.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from npugrad.spec import TensorParam
from npugrad_server.acl.libraries import Missing
from npugrad_server.acl.runtime import AclError, concerning
from npugrad_server.acl.symbols import operator_symbols
from npugrad_server.acl.tensor import Handles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npugrad.spec import AttrValue, OpSpec
    from npugrad_server.acl.libraries import Cann
    from npugrad_server.acl.runtime import Runtime
    from npugrad_server.acl.tensor import DeviceTensor


class Launcher:
    """Plans and launches operators."""

    def __init__(self, cann: Cann, runtime: Runtime) -> None:
        """Takes what is bound; operators are bound when first asked for."""
        self._cann = cann
        self._runtime = runtime
        self._phases: dict[str, tuple[Any, Any]] = {}

    def missing(self, spec: OpSpec) -> str:
        """Why an operator cannot be launched: a function that no library has; empty when it can."""
        reasons = [phase.reason for phase in self.phases(spec) if isinstance(phase, Missing)]
        return "; ".join(reasons)

    def phases(self, spec: OpSpec) -> tuple[Any, Any]:
        """The bound functions of both phases."""
        if spec.name not in self._phases:
            symbols = operator_symbols(spec)
            bound = self._cann.operator(symbols)
            self._phases[spec.name] = (bound[symbols[0].name], bound[symbols[1].name])
        return self._phases[spec.name]

    @contextmanager
    def plan(
        self, spec: OpSpec, attrs: Mapping[str, AttrValue], tensors: Mapping[str, DeviceTensor | None]
    ) -> Iterator[Plan]:
        """Runs the first phase.

        Args:
            spec: The operator.
            attrs: Every attribute by name; a bool array may be None for null.
            tensors: Every operand and output by name; None for null.

        Raises:
            AclError: CANN refused.
            SymbolMissing: No library has the operator.
        """
        first, second = self.phases(spec)
        workspace_bytes, executor = ctypes.c_uint64(), ctypes.c_void_p()
        with Handles(self._runtime, self._cann.tensors) as handles:
            arguments = _arguments(spec, attrs, tensors, handles)
            self._runtime.forget_errors()  # a copy that was queued all right may have left a text
            self._runtime.call(first, *arguments, workspace_bytes, executor)
            plan = Plan(self._runtime, second, workspace_bytes.value, executor.value)
            destroy = self._cann.tensors["aclDestroyAclOpExecutor"]
            try:
                yield plan
            except BaseException:
                with suppress(AclError):  # what went wrong first is what the caller has to know
                    plan.abandon(destroy)
                raise
            plan.abandon(destroy)


class Plan:
    """What the first phase made.

    Attributes:
        workspace_bytes: Device memory that the launch needs, 0 for none.
    """

    def __init__(self, runtime: Runtime, launch: Any, workspace_bytes: int, executor: int | None) -> None:
        """Made by `Launcher.plan`."""
        self.workspace_bytes = workspace_bytes
        self._runtime = runtime
        self._launch = launch
        self._executor = executor

    def launch(self, workspace: int, stream: int) -> None:
        """Runs the second phase, which queues the work; once.

        Args:
            workspace: Address of `workspace_bytes` of device memory; anything when that is 0.
            stream: Raw stream.

        Raises:
            AclError: CANN refused; the executor is used up all the same.
            RuntimeError: There is no executor, or no longer.
        """
        executor, self._executor = self._executor, None
        if executor is None:
            raise RuntimeError("found no executor; expected one from the first phase, not yet launched")
        address = workspace if self.workspace_bytes else None
        self._runtime.forget_errors()
        self._runtime.call(self._launch, address, self.workspace_bytes, executor, stream)

    def abandon(self, destroy: Any) -> None:
        """Destroys the executor unless a launch has used it up."""
        executor, self._executor = self._executor, None
        if executor is not None:
            self._runtime.call(destroy, executor)


def _arguments(
    spec: OpSpec,
    attrs: Mapping[str, AttrValue],
    tensors: Mapping[str, DeviceTensor | None],
    handles: Handles,
) -> list[Any]:
    arguments: list[Any] = []
    for param in spec.params:
        with concerning(param.name):
            if isinstance(param, TensorParam):
                tensor = tensors[param.name]
                arguments.append(None if tensor is None else handles.tensor(tensor))
            elif param.type == "bool_array":
                values = attrs[param.name]
                arguments.append(handles.bool_array(values) if isinstance(values, tuple) else None)
            else:
                arguments.append(attrs[param.name])
    return arguments
