"""Wrong arguments, reported in the terms of whoever passed them.

Python's own messages name inner classes, and suggest a similar name only from 3.13 on.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from npugrad.errors import WrongType, WrongValue
from npugrad.representation import counted, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    T = TypeVar("T", bound=Callable[..., Any])
else:
    T = TypeVar("T")

_SHOWN_CHARACTERS = 80
_LEAST_RATIO = 0.7
"""Of difflib, 0 to 1: below it, names share little more than an ending."""
_SHORTEST = 3
"""Letters that a name must have for being found inside another one."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant; None if none is similar."""
    import difflib  # here, because only errors need it

    asked, plain = name.lower(), {each.lower(): each for each in known}
    close = difflib.get_close_matches(asked, plain, 1, _LEAST_RATIO)
    close += [
        each for each in plain if min(len(each), len(asked)) >= _SHORTEST and (each in asked or asked in each)
    ]
    return plain[close[0]] if close else None


def instead(name: str, known: Collection[str]) -> str:
    """End of a message about an unknown name: the one that was probably meant, or all of them."""
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known) or 'none'}"


def require_number(
    name: str, value: Any, expected: str, is_allowed: Callable[[Any], bool], *, whole: bool = False
) -> None:
    """Checks a number.

    Args:
        name: Of the argument.
        value: What was passed.
        expected: What is allowed, in words.
        is_allowed: Whether a number is.
        whole: Whether it must be an integer.

    Raises:
        WrongType: It is not a number.
        WrongValue: It is not allowed.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__" if whole else "__float__"):
        found = f"{shortened(repr(value), _SHOWN_CHARACTERS)} ({type(value).__name__})"
        raise WrongType(f"{name}: found {found}; expected {expected}")
    if not is_allowed(value):
        raise WrongValue(f"{name}: found {value}; expected {expected}")


def reports_usage(target: T) -> T:
    """Decorator: arguments that are unknown, missing or given twice raise `WrongType`.

    Of a class, it covers the constructor and the public methods. Signatures stay as they are.
    """
    if not inspect.isclass(target):
        return cast("T", _reporting(target, target.__name__))
    for name, function in [*vars(target).items()]:
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            setattr(target, name, _reporting(function, target.__name__ if name == "__init__" else name))
    return cast("T", target)


def _reporting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wait(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except TypeError as error:
                _report(error, name, function, args, kwargs)
                raise

        return wait

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _report(error, name, function, args, kwargs)
            raise

    return call


def _report(
    error: TypeError, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises `WrongType` if the function did not take the arguments; else it is the function's own error."""
    trace = error.__traceback__
    if trace is None or trace.tb_next is not None:
        return
    if problems := _problems(function, args, kwargs):
        raise WrongType(f"{name}: {'; also '.join(problems)}") from None


def _problems(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    parameters = [*inspect.signature(function).parameters.values()]
    if parameters and parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    placed = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    unknown = [name for name in kwargs if name not in known]
    problems = [f"unknown argument {name!r}; {instead(name, known)}" for name in unknown]
    if len(args) > len(placed):
        most = f"at most {len(placed)}" if placed else "none"
        others = (
            f", and names for the others, such as {known[len(placed)]}=..." if known[len(placed) :] else ""
        )
        problems.append(f"found {counted(len(args), 'argument')} without a name; expected {most}{others}")
    given = {*placed[: len(args)], *kwargs, *(nearest(name, known) for name in unknown)}
    twice = [name for name in placed[: len(args)] if name in kwargs]
    problems += [f"{name}: found two values; expected one" for name in twice]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing and len(args) <= len(placed):
        each = " for each" if len(missing) > 1 else ""
        problems.append(f"found nothing for {', '.join(missing)}; expected a value{each}")
    return problems
