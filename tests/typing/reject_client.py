"""Mistakes that the types must stop; each line names the errors of the checkers. Never run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npugrad import TensorMeta, validate
from npugrad_client import AsyncClient, Client, MultiScaleDeformableAttentionGradResult

if TYPE_CHECKING:
    import numpy.typing as npt
    from tests.typing.accept_client import Tensor

x = np.zeros((2, 3, 4), np.float32)
client = Client("localhost:50051")

Client()  # rejected: mypy[call-arg] pyright[reportCallIssue]
Client(50051)  # rejected: mypy[arg-type] pyright[reportArgumentType]
Client("localhost:50051", timeout="1 s")  # rejected: mypy[call-arg] pyright[reportCallIssue]

# Operands go by name only: seven arrays in a row invite a swap.
client.fused_floyd_attention_grad(x, x, x)  # rejected: mypy[call-arg] pyright[reportCallIssue]
client.multi_scale_deformable_attention_grad(values=x)  # rejected: mypy[call-arg] pyright[reportCallIssue]
client.multi_scale_deformable_attention_grad(
    value="x",  # rejected: mypy[arg-type] pyright[reportArgumentType]
)
client.group_norm_backward(input=x)  # rejected: mypy[call-arg] pyright[reportCallIssue]
client.grid_sampler_2d_backward(
    interpolation_mode=0.5,  # rejected: mypy[arg-type] pyright[reportArgumentType]
    padding_mode=None,  # rejected: mypy[arg-type] pyright[reportArgumentType]
    align_corners=False,
    output_mask=True,  # rejected: mypy[arg-type] pyright[reportArgumentType]
    out={"input_grad": "x"},  # rejected: mypy[dict-item] pyright[reportArgumentType]
)

grads = client.multi_scale_deformable_attention_grad(value=x)
grads.grad_values  # rejected: mypy[attr-defined] pyright[reportAttributeAccessIssue]
grads.info = None  # rejected: mypy[misc,assignment] pyright[reportAttributeAccessIssue]

# Results are of the arrays that an annotation names.
typed: MultiScaleDeformableAttentionGradResult[Tensor] = grads
typed.grad_value.astype("float32")  # rejected: mypy[attr-defined] pyright[reportAttributeAccessIssue]
text: str = typed.grad_value  # rejected: mypy[assignment] pyright[reportAssignmentType]
numpy: MultiScaleDeformableAttentionGradResult[npt.NDArray[np.float32]] = grads
numpy.grad_value.cpu()  # rejected: mypy[attr-defined] pyright[reportAttributeAccessIssue]

Client(["localhost:50051", 50052])  # rejected: mypy[list-item] pyright[reportArgumentType]
Client("localhost:50051", tls="ca.pem")  # rejected: mypy[arg-type] pyright[reportArgumentType]
AsyncClient("localhost:50051", threads=4)  # rejected: mypy[call-arg] pyright[reportCallIssue]
client.submit.group_norm_backward(values=x)  # rejected: mypy[call-arg] pyright[reportCallIssue]
client.submit(client.server_info, timeout="1 s")  # rejected: mypy[call-arg] pyright[reportCallIssue]

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
