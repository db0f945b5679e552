"""`remote`: runs the backward operators of a block on the service."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npugrad.usage import reports_usage
from npugrad_client._legality import require_client
from npugrad_client._policy import MIN_BYTES, Options, Policies, PolicyEngine, require_policies, show_policies
from npugrad_client.torch._fused import DECIDING, Fuser, attend, has_saved_tensors_hooks
from npugrad_client.torch._recognised import replace, restore
from npugrad_client.torch._translation import TAKEN_APART, TAKEN_APART_BY, TRANSLATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from npugrad_client import Client
    from npugrad_client._summary import Summary

_CREATE_GRAPH = "it is decomposed for create_graph=True"


class Remote(ContextDecorator):
    """Context manager returned by `remote`.

    Thread safety: any number of threads may enter the same object, also recursively; each thread enters it
    for its own backward passes. Counts are shared.

    Example:
        >>> model, mode = torch.nn.GroupNorm(8, 64), remote(client)
        >>> @mode
        ... def step(x):
        ...     model(x).square().mean().backward()
        >>> step(torch.rand(4, 64, 32, 32))
        >>> mode.summary().sent
        1
    """

    def __init__(self, client: Client, options: Options, policies: Policies, *, fused: bool) -> None:
        self._client, self._policies = client, policies
        self._engine = PolicyEngine(client, options, policies)
        self._fuser = Fuser(self._engine, is_on=fused)
        self._entered = _Entered()
        self.seen: dict[Any, str] | None = {}
        """Autograd nodes that ran inside, one for each elementary operator, because asking for a node takes
        microseconds; None once an operator was handled, because the nodes are not needed then."""

    def __enter__(self) -> Remote:
        """Starts intercepting the backward operators of this thread."""
        if self._fuser.is_on:
            replace(attend, self._engine.tell)
        mode = _Mode(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered.modes.append(mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops intercepting.

        Raises:
            RuntimeError: This thread has not entered it.
        """
        if not self._entered.modes:
            raise RuntimeError("remote: this thread has not entered it")
        self._entered.modes.pop().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self._fuser.is_on:
            restore()

    def summary(self) -> Summary:
        """Returns counts of what ran where, over all threads; print it for a table."""
        summary, seen = self._policies.summary(), self.seen
        if seen is None:
            return summary
        nodes = {name for name in [*seen.values()] if "AccumulateGrad" not in name}
        return dataclasses.replace(summary, seen=tuple(sorted(nodes)))

    def __repr__(self) -> str:
        """The client, the policies in short, and how many calls were sent."""
        return show_policies("Remote", self._policies, repr(self._client))

    def _repr_html_(self) -> str:
        """The summary's tables, for notebooks."""
        return self.summary()._repr_html_()

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one intercepted operator, locally or on the service."""
        if DECIDING.is_local:
            return func(*args, **kwargs)

        def local() -> Any:
            with DECIDING:  # an outer `remote` must not send or report what this one runs here
                return func(*args, **kwargs)

        translate = TRANSLATIONS.get(func)
        if translate is None:
            self._notice_taken_apart(func)
            return local()
        request = translate(*args, **kwargs)
        return local() if request.is_abstract else self._engine.run(request, local)

    def _notice_taken_apart(self, func: Any) -> None:
        """Counts a node that autograd decomposes into elementary operators, which the service lacks."""
        node = _current_node()
        operator = TAKEN_APART.get(node.name())
        why = TAKEN_APART_BY[func] if not torch.is_grad_enabled() else _CREATE_GRAPH
        if operator is None or not why or has_saved_tensors_hooks():  # a checkpoint recomputes forward
            return
        evaluation = (torch._C._current_graph_task_id(), node._sequence_nr())
        if evaluation == self._entered.last_taken_apart:
            return
        self._entered.last_taken_apart = evaluation
        self._engine.keep(operator, why)


@reports_usage
def remote(
    client: Client,
    *,
    min_bytes: int = MIN_BYTES,
    on_refused: Literal["warn", "local", "raise"] = "warn",
    on_error: Literal["raise", "local"] = "raise",
    policy: Literal["always", "faster"] = "always",
    fused: bool = True,
    timeout_s: float | None = None,
    deterministic: bool = False,
    priority: int = 0,
    label: str = "",
    verify: bool = False,
) -> Remote:
    """Context manager that sends the backward operators of an unmodified model to the service.

    It sends the backward of `grid_sample` (bilinear and nearest), `group_norm`, `layer_norm` and of what else
    the pages of operators in the reference name a function of PyTorch for, on CPU tensors in float32, float16
    and bfloat16, for volumes also in float64. Operands of mixed dtypes that the documents do not allow, such
    as bfloat16 data with float32 weights in `group_norm`, are sent as float32 and the results cast back.
    Everything else runs locally, as usual. Enter it around ``backward()``; around the forward pass it is
    harmless, but adds a few microseconds per operator.

    With ``create_graph=True``, autograd decomposes the backward of `group_norm` into elementary operators,
    which run locally, with a warning; the other operators are still sent. The same happens under `torch.func`
    transforms, and if mean or rstd of `native_group_norm` have gradients.

    Multi-scale deformable attention built from one `grid_sample` per level is sent as a single call if the
    forward pass runs inside the block too. This covers transformers, mmcv, copies of Mask2Former's code, and
    functions named with `register_deformable_attention`. These functions are replaced while a `remote` is
    active; they run unchanged in other threads, in compiled or exported code, for calls that would not be
    sent, and under saved-tensor hooks, as in a non-reentrant checkpoint. A point on the edge between two
    pixels may get the gradient of the other pixel, because the operator rounds coordinates differently.

    An operator that the server lacks, for example because it is of an earlier release, runs locally with one
    warning, whatever the policies.

    In nested blocks, the innermost `remote` decides. Any number of threads may enter the same object, each
    for its own backward passes. Hooks, both kinds of checkpoints and autocast are supported.

    Args:
        client: Client to call the service with.
        min_bytes: Calls with fewer bytes of operands and results run locally. 0 sends all.
        on_refused: For calls that the documents do not allow (float64 images, bicubic, ...) or that have
            operands other than dense CPU tensors: ``"warn"`` runs them locally with one warning of each kind,
            ``"local"`` runs them locally without a warning, ``"raise"`` raises the documented error, or
            TypeError, from backward.
        on_error: When the service fails: ``"raise"`` raises its error from backward, ``"local"`` runs the
            call locally, with a warning for each class of error, and counts it.
        policy: ``"always"`` sends every call it can. ``"faster"`` sends calls that are faster on the service.
            For each kind of call (operator, dtypes, flags, and sizes rounded to a power of two) the first
            calls alternate between local and remote, at most three each, and later calls take the faster way.
            The slower way is measured again when that costs at most 1 % of the time spent since.
        fused: Send deformable attention as one call; False handles each `grid_sample` separately.
        timeout_s: Deadline of each call in seconds; None for the client's default.
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment.
        verify: Have the server recompute each call with its reference and fail if a result differs.

    Returns:
        A context manager that is also a decorator; its `summary()` shows what ran where.

    Raises:
        WrongType: An argument is unknown or missing, or `client` is not a `Client`.
        WrongValue: Unknown policy, or negative `min_bytes`.

    Example:
        >>> model = torch.nn.LayerNorm(512)
        >>> loss = model(torch.rand(256, 512)).square().mean()
        >>> with Client("localhost:50051") as client, remote(client) as mode:
        ...     loss.backward()
        >>> mode.summary().sent
        1
    """
    options = Options(
        timeout_s=timeout_s, deterministic=deterministic, priority=priority, label=label, verify=verify
    )
    require_client("remote", client)
    require_policies("remote", on_refused, on_error, min_bytes, policy)
    policies = Policies(on_refused=on_refused, on_error=on_error, min_bytes=min_bytes, policy=policy)
    return Remote(client, options, policies, fused=fused)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One entry by one thread; it is stateless, so autograd may pass it to its threads."""

    def __init__(self, owner: Remote) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._seen: dict[int, Any] = {}
        self.fuser = owner._fuser

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to keep torch.compile out of `__torch_dispatch__`; it asks when the class is made.

        It would with a wrapper, which takes as long as all the rest and at first imports torch._dynamo, for
        seconds. Newer versions can be told to skip what a function runs.
        """
        core: Any = torch._C
        try:
            frames = core._dynamo.eval_frame
            strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)
        except AttributeError:
            return True
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # This runs for every operator, and most of them are not ours. They hash slowly, and live for ever.
        number = id(func)
        if number in _OURS and (func in TRANSLATIONS or _is_taking_apart()):
            self._owner.seen = None
            return self._owner._run(func, args, kwargs or {})
        seen = self._owner.seen
        if seen is not None and number not in self._seen and (node := _current_node()) is not None:
            self._seen[number] = seen[func] = node.name()
        return func(*args, **kwargs) if kwargs else func(*args)


_OURS = {id(func) for func in (*TRANSLATIONS, *TAKEN_APART_BY)}


class _Entered(threading.local):
    """The entries of a thread, and the last decomposed node seen in it."""

    def __init__(self) -> None:
        self.modes: list[_Mode] = []
        self.last_taken_apart: tuple[int, int] | None = None


_current_node: Any = torch._C._current_autograd_node


def _is_taking_apart() -> bool:
    """Whether autograd is inside a node that it may decompose; outside a backward pass there is none."""
    node = _current_node()
    return node is not None and node.name() in TAKEN_APART
