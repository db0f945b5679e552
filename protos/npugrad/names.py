"""Names in Python and on the wire of what a vendor page names: operators, parameters, results."""

from __future__ import annotations

import keyword
import re

RENAMED = {
    "self": "input",
    "lambda": "lambd",
    "out": "output",
    "deterministic": "is_deterministic",
    "aclnnConvTbcBackward.self": "grad_output",
    "aclnnEmbeddingDenseBackward.out": "grad_weight",
}
"""Inputs and attributes whose own names a method of the client cannot have, of all functions or of one."""
RESULTS = {"out": "grad_input", "result": "grad_input", "output": "grad_input"}
"""Results whose own names do not say what they are the gradient of; a record may say it better."""
RESERVED = {
    *("self", "out", "timeout_s", "deterministic", "priority", "label", "verify", "progress", "copy"),
    *("options", "info", "dtype", "product"),
}
"""What methods, messages and builders take or return beside the operator's parameters."""


def snake_case(name: str) -> str:
    """``grid_sampler_2d_backward`` of ``GridSampler2DBackward``, ``nll_loss`` of ``NLLLoss``."""
    if re.fullmatch(r"[A-Z](x?[A-Z])*", name):
        return name.lower()
    return re.sub(r"(?<=[a-z])(?=\d+D|[A-Z])|(?<=[A-Za-z\d])(?=[A-Z][a-z])", "_", name).lower()


def camel_case(name: str) -> str:
    """``gradOut`` of ``grad_out``."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def python_name(c_name: str, *, function: str = "", is_output: bool = False) -> str:
    """Name of a parameter, without C's suffixes for optional parameters and outputs.

    Args:
        c_name: Its name on the page.
        function: The page's function, such as ``"aclnnSiluBackward"``.
        is_output: Whether the operator writes it.

    Raises:
        ValueError: Python or the client needs the name for something else.
    """
    short = c_name.removesuffix("Optional")
    name = snake_case(short.removesuffix("Out") if is_output else short)
    name = RENAMED.get(f"{function}.{c_name}") or (RESULTS if is_output else RENAMED).get(name, name)
    if keyword.iskeyword(name) or name in RESERVED:
        raise ValueError(f"{c_name}: found a name that is taken; expected a row for it in npugrad.names")
    return name
