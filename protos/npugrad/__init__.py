"""The contract of npugrad: types, operator records, error codes and the validator.

Client and server import it; it imports neither. `npugrad.validate` returns the status that the aclnn operator
would return and the documented constraints that a call violates, without data and without a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.lazy import on_demand as _on_demand

if TYPE_CHECKING:
    from npugrad.attributes import Scalar
    from npugrad.dtypes import DType, Format
    from npugrad.errors import NpugradError, OperatorError, Source, Violation
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import Constraint, OpRecord
    from npugrad.ops import OPERATORS, get_operator
    from npugrad.products import Product
    from npugrad.validation import Verdict, validate

__version__ = "0.1.0"

__all__ = [
    "OPERATORS",
    "CallMeta",
    "Constraint",
    "DType",
    "Format",
    "NpugradError",
    "OpRecord",
    "OperatorError",
    "Product",
    "Scalar",
    "Source",
    "TensorMeta",
    "Verdict",
    "Violation",
    "__version__",
    "get_operator",
    "validate",
]

if not TYPE_CHECKING:
    # The commands' help, and who wants the version, need neither NumPy nor a record.
    __getattr__, __dir__ = _on_demand(
        __name__,
        {
            "attributes": ("Scalar",),
            "dtypes": ("DType", "Format"),
            "errors": ("NpugradError", "OperatorError", "Source", "Violation"),
            "meta": ("CallMeta", "TensorMeta"),
            "operator": ("Constraint", "OpRecord"),
            "ops": ("OPERATORS", "get_operator"),
            "products": ("Product",),
            "validation": ("Verdict", "validate"),
        },
    )
