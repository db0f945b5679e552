"""The contract of npugrad: types, operator records, error codes and the validator.

Client and server import it; it imports neither. `npugrad.validate` returns the status that the aclnn operator
would return and the documented constraints that a call violates, without data and without a server.
"""

from __future__ import annotations

from npugrad.attributes import Scalar
from npugrad.dtypes import DType, Format
from npugrad.errors import NpugradError, OperatorError, Source, Violation
from npugrad.meta import CallMeta, TensorMeta
from npugrad.operator import Constraint, OpRecord, Verdict
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.validation import validate

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
