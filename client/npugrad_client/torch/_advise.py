"""Runs a script and measures its backward passes, for `npugrad advise`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npugrad_client._advice import Advice, CallProfile
from npugrad_client._policy import Options, Policies, PolicyEngine
from npugrad_client.errors import NpugradError, OperatorError
from npugrad_client.torch._fused import DECIDING
from npugrad_client.torch._translation import TRANSLATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from npugrad_client import Client
    from npugrad_client._backward_call import BackwardCall

_ENTRIES = ("backward", "grad")
"""Functions of `torch.autograd` with which every backward pass begins, that of `Tensor.backward` included."""


class ScriptError(Exception):
    """The script failed or had no backward pass."""


class _Enough(BaseException):
    """Ends a script after enough passes; of a class that scripts do not catch."""


def advise(client: Client, script: Path, arguments: Sequence[str], steps: int) -> Advice:
    """Runs a script and reports which kinds of its backward calls are worth sending.

    The script runs as ``__main__`` in this process, and its gradients are computed by PyTorch: a `remote` in
    the script sends nothing. Only the thread of the first backward pass is measured.

    Args:
        client: Client to call the service with.
        script: Path of a Python script.
        arguments: Its command line, ``sys.argv[1:]``.
        steps: Number of backward passes after which to end the script; 0 to run it to its end.

    Raises:
        ScriptError: The script failed, with its traceback on standard error; exited with a non-zero status;
            or had no backward pass.
        NpugradError: The service failed.
    """
    profile = CallProfile(_sender(client))
    with _watched(profile, steps), DECIDING.keeping_all():
        _run(script, arguments)
    if not profile.passes:
        raise ScriptError(
            f"{script}: there was no backward pass; it must call backward() or torch.autograd.grad, in "
            "its own process"
        )
    return profile.advice()


def _sender(client: Client) -> Callable[[BackwardCall], str]:
    """Makes a function that sends a call, and returns why it cannot be sent."""
    engine = PolicyEngine(client, Options(), Policies(on_refused="raise"))

    def send(request: BackwardCall) -> str:
        try:
            return "" if engine.run(request, lambda: None) is not None else "the server lacks it"
        except OperatorError as error:
            if error.code is None:
                raise
            return f"refused with {error.code}, {error.constraint}"

    return send


def _run(script: Path, arguments: Sequence[str]) -> None:
    """Runs a script as `python script arguments` does, but in this process."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Enough:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptError(f"{script} ended with {end.code!r}, so there is no advice") from None
    except NpugradError:
        raise
    except Exception as error:
        _print_traceback(error, script)
        name = type(error).__name__
        raise ScriptError(f"{script} failed with {name}, see above, so there is no advice") from None
    finally:
        sys.argv, sys.path[:] = argv, path


def _print_traceback(error: Exception, script: Path) -> None:
    """Prints an error as Python does, without the frames that ran the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


@contextmanager
def _watched(profile: CallProfile, steps: int) -> Iterator[None]:
    """Lets a profile see every backward pass of the process."""
    originals = {name: getattr(torch.autograd, name) for name in _ENTRIES}
    process = os.getpid()

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != process:  # a fork is neither measured nor ended
                return original(*args, **kwargs)
            with profile.backward() as is_watched:
                if not is_watched:
                    return original(*args, **kwargs)
                with _Watch(profile):
                    found = original(*args, **kwargs)
            if profile.passes == steps:
                raise _Enough
            return found

        return watched

    for name, original in originals.items():
        setattr(torch.autograd, name, watching(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a profile the operators that the service knows."""

    def __init__(self, profile: CallProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profile = profile

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, translate = kwargs or {}, TRANSLATIONS.get(func)
        if translate is None:
            return func(*args, **given)
        return self._profile.call(translate(*args, **given), lambda: func(*args, **given))
