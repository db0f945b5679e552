"""torch CPU tensors in and out: the same memory, the same bits, and a clear word about any other tensor."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.client.both import WAYS
from tests.client.fake_service import fake_service, group_norm
from tests.fix_server import ServerProcess

from npugrad.call import ExecutionInfo
from npugrad.products import Product
from npugrad_client import Client, GroupNormBackwardResult, _arrays

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAVEL = ("float32", "float16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


def into_numpy(tensor: Any) -> Any:
    return _arrays.to_numpy(tensor, "op", "x")


def test_a_tensor_is_read_where_it_is() -> None:
    for name in TRAVEL:
        tensor = torch.zeros((2, 3), dtype=getattr(torch, name))
        array = into_numpy(tensor)
        assert array.dtype == np.dtype(name)
        assert array.ctypes.data == tensor.data_ptr()


def test_bfloat16_goes_in_and_out_where_it_is_bit_for_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    array = into_numpy(bits.view(torch.bfloat16))
    assert array.dtype == ml_dtypes.bfloat16
    assert array.ctypes.data == bits.data_ptr()
    np.testing.assert_array_equal(array.view(np.int16), bits.numpy())
    tensor = _arrays.to_torch(array)
    assert tensor.dtype is torch.bfloat16
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.view(torch.int16).numpy(), bits.numpy())


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[:, ::2, 1:],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "rank 0": lambda t: t[0, 0, 0],
    "empty": lambda t: t[:0],
    "requires_grad": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "in a graph": lambda t: t.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_dense_layout_is_read_as_it_is_and_copied_as_a_tensor(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        tensor = LAYOUTS[name](torch.randn(4, 6, 5).to(getattr(torch, dtype)))
        array = into_numpy(tensor)
        assert array.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(array.astype(np.float64), tensor.detach().to(torch.float64).numpy())
        copy = _arrays.copied({"x": tensor})["x"]
        assert copy.dtype is tensor.dtype
        assert torch.equal(copy, tensor.detach())
        if tensor.numel():
            assert array.ctypes.data == tensor.data_ptr() != copy.data_ptr()


def test_lazy_negation_and_conjugation_are_resolved() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    np.testing.assert_array_equal(into_numpy(imaginary), -values.imag.numpy())
    np.testing.assert_array_equal(into_numpy(values.conj()), values.numpy().conj())


def nested() -> Any:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


REFUSED = {
    "meta": (lambda: torch.zeros(2, device="meta"), "a meta tensor, which holds no data; expected"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo; expected a dense tensor"),
    "mkldnn": (lambda: torch.zeros(2, 2).to_mkldnn(), "layout torch._mkldnn; expected a dense tensor"),
    "float8": (lambda: torch.zeros(2, dtype=torch.float8_e5m2), "of torch.float8_e5m2 that NumPy cannot"),
    "half complex": (lambda: torch.zeros(2, dtype=torch.complex32), "of torch.complex32 that NumPy cannot"),
    "nested": (nested, "a nested tensor; expected a dense tensor"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_other_tensors_are_type_errors_that_say_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^op: x: found .*{message}"):
        into_numpy(make())


def test_tensors_without_memory_are_type_errors() -> None:
    def look(row: Any) -> Any:
        with pytest.raises(TypeError, match=r"found a Tensor of torch\.float32 that NumPy cannot read"):
            into_numpy(row)
        return row

    torch.func.vmap(look)(torch.zeros(2, 3))


def test_out_takes_no_tensor_that_would_stay_as_it_was() -> None:
    with pytest.raises(TypeError, match="op: x: found a lazily negated tensor in out"):
        _arrays.writable(torch.zeros(2, dtype=torch.complex64).conj().imag, "op", "x")
    with pytest.raises(TypeError, match="op: x: found an expanded array in out"):
        _arrays.writable(torch.zeros(1).expand(4), "op", "x")


def tensors(dtype: str = "float32") -> dict[str, Any]:
    call = group_norm(n=2, c=4, hxw=32, group=2)
    return {
        k: torch.from_numpy(v).to(getattr(torch, dtype)) if isinstance(v, np.ndarray) else v
        for k, v in call.items()
    }


@WAYS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_in_give_tensors_out_with_the_same_bits_in_place_if_wanted(
    server: ServerProcess, dtype: str, way: int
) -> None:
    call, kind = tensors(dtype), getattr(torch, dtype)
    arrays = {k: into_numpy(v) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    out = {"grad_input": torch.full((2, 4, 32), -7, dtype=kind)}
    out["grad_gamma"] = torch.full((8,), -7, dtype=kind)[::2]
    with Client(server.address, timeout_s=60, stream_from_bytes=way) as client:
        got, expected = client.group_norm_backward(**call), client.group_norm_backward(**arrays)
        filled = client.group_norm_backward(**call, out=out)
    for name in ("grad_input", "grad_gamma", "grad_beta"):
        tensor, array = getattr(got, name), getattr(expected, name)
        assert type(tensor) is torch.Tensor
        assert tensor.dtype is kind
        assert not tensor.requires_grad
        assert into_numpy(tensor).tobytes() == array.tobytes()
        assert torch.equal(getattr(filled, name), tensor)
        if name in out:
            assert getattr(filled, name) is out[name]
        tensor += 1  # memory of its own that may be written


def test_one_tensor_is_enough_for_tensors_out(server: ServerProcess) -> None:
    call = group_norm()
    call["gamma"] = torch.from_numpy(call["gamma"])
    with Client(server.address, timeout_s=60) as client:
        grads = client.group_norm_backward(**call)
    assert all(isinstance(g, torch.Tensor) for g in (grads.grad_input, grads.grad_gamma, grads.grad_beta))


def test_arrays_in_out_stay_arrays_among_tensors() -> None:
    mine = np.ones((2, 4, 32), np.float32)
    with fake_service() as service, Client(service.address, timeout_s=20) as client:
        grads = client.group_norm_backward(**tensors(), out={"grad_input": mine})
    assert grads.grad_input is mine
    assert not mine.any()
    assert isinstance(grads.grad_gamma, torch.Tensor)


def test_a_result_shows_tensors_as_arrays() -> None:
    tensor, array = torch.zeros(2, 3, dtype=torch.bfloat16), np.zeros(4, np.float32)
    info = ExecutionInfo("cpu", "cpu:0", Product.ATLAS_A2)
    found = GroupNormBackwardResult(grad_input=tensor, grad_gamma=array, grad_beta=None, info=info)
    assert "grad_input=bfloat16[2,3]" in repr(found)
    assert "grad_beta=None" in repr(found)
    assert "<td>bfloat16</td><td>2 x 3</td>" in found._repr_html_()
