"""Mistakes that the types must stop; each line names the errors that the checkers give. Never run."""

from __future__ import annotations

from npugrad import TensorMeta, validate

TensorMeta("float32")  # rejected: mypy[call-arg] pyright[reportCallIssue]
TensorMeta("float32", 4)  # rejected: mypy[arg-type] pyright[reportArgumentType]
TensorMeta("float32", (2.5,))  # rejected: mypy[arg-type] pyright[reportArgumentType]

meta = TensorMeta("float32", (2, 3))
meta.shape = (4,)  # rejected: mypy[misc] pyright[reportAttributeAccessIssue]
meta.layout  # rejected: mypy[attr-defined] pyright[reportAttributeAccessIssue]

validate("group_norm_backward", {}, {})  # rejected: mypy[call-arg] pyright[reportCallIssue]
validate("group_norm_backward", inputs={})  # rejected: mypy[call-arg] pyright[reportCallIssue]
validate(
    "group_norm_backward",
    inputs={"grad_out": (2, 3)},  # rejected: mypy[dict-item] pyright[reportArgumentType]
    attrs={},
)
verdict = validate("group_norm_backward", inputs={}, attrs={})
status: str = verdict.status  # rejected: mypy[assignment] pyright[reportAssignmentType]
