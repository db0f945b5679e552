"""Computes for generated operators: `python -m tests.cann_sim.arithmetic COMMAND...` runs a command with it.

A process of its own, so that what simulates a device holds no reference: generated kernels send it a call
with its data over a Unix socket, it computes with the record's float64 reference and rounds once. The socket
exists before the process is started, so calls wait until it is ready; once it has ended, they fail.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.cann_sim.build import ARITHMETIC

from npugrad.attributes import Scalar
from npugrad.coordinates import CoordinateRule
from npugrad.dtypes import DType, Format
from npugrad.layout import view
from npugrad.meta import TensorMeta
from npugrad.operator import AttrParam, OpRecord, TensorParam
from npugrad.ops import OPERATORS
from npugrad.references._blocks import store

_NOISE = 2.0**-23
"""What another order of summation in float changes in a result, relative to it."""
_DTYPES = {dtype.acl: dtype for dtype in DType}
_FORMATS = {form.acl: form for form in Format}


@contextmanager
def arithmetic() -> Iterator[Path]:
    """Runs the process for a block; gives its socket, for the variable `ARITHMETIC`."""
    with tempfile.TemporaryDirectory(prefix="cann-sim-") as folder:
        path = Path(folder, "arithmetic")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(socket.SOMAXCONN)
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, "--serve", str(listening.fileno())],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,  # which tells it when this process ends, however that comes
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        try:
            yield path
        finally:
            process.kill()
            process.communicate()


def record_of(aclnn_name: str) -> OpRecord:
    """The record of an operator."""
    for record in OPERATORS.values():
        if record.aclnn_name == aclnn_name:
            return record
    raise LookupError(f"no record describes {aclnn_name}")


def compute(request: Mapping[str, Any], content: BufferedIOBase) -> bytes:
    """The wanted outputs of a call, one behind the other.

    Args:
        request: What a generated kernel sends: `op`, `arguments` as in the reports, names of the `operands`
            and `results` that are there, and the `seed` of the noise, 0 for none.
        content: The operands, dense, in that order.
    """
    record = record_of(request["op"])
    values = {each["name"]: each["value"] for each in request["arguments"]}
    params = {param.c_name: param for param in record.params}
    if values.keys() != params.keys():
        raise ValueError(f"found the parameters {[*values]}; expected those of the record, {[*params]}")
    inputs: dict[str, Any] = {param.name: None for param in record.inputs}
    for c_name in request["operands"]:
        meta = _meta(values[c_name])
        inputs[params[c_name].name] = _ordered(params[c_name], meta, bytearray(content.read(meta.nbytes)))
    attrs = {param.name: _attribute(param, values[param.c_name]) for param in record.attrs}
    results = {c_name: _meta(values[c_name]) for c_name in request["results"]}
    contents = {c_name: bytearray(meta.nbytes) for c_name, meta in results.items()}
    arrays = {
        params[c_name].name: _ordered(params[c_name], meta, contents[c_name])
        for c_name, meta in results.items()
    }
    reference = record.references_by_rule.get(CoordinateRule.VENDOR_A2, record.reference)
    _fill(reference, inputs, attrs, arrays, request["seed"])
    return b"".join(contents.values())


def _fill(
    reference: Any, inputs: Any, attrs: Any, outputs: Mapping[str, npt.NDArray[Any]], seed: int
) -> None:
    """Writes the outputs, with noise in the last bits of sums if there is a seed."""
    random = np.random.default_rng(seed)
    noisy = {name for name, array in outputs.items() if seed and array.dtype.kind not in "iub"}
    found = {
        name: np.zeros(array.shape, np.float64 if name in noisy else array.dtype)
        for name, array in outputs.items()
    }
    reference(inputs, attrs, found)
    for name, array in found.items():
        if name in noisy:
            noise = _NOISE if outputs[name].dtype != np.float64 else np.finfo(np.float64).eps
            array *= 1 + noise * random.integers(-1, 2, array.shape)
            store(outputs[name], array)
        else:
            outputs[name][...] = array


def _meta(value: Mapping[str, Any]) -> TensorMeta:
    return TensorMeta(_DTYPES[value["dtype"]], value["shape"], _FORMATS[value["format"]])


def _ordered(param: Any, meta: TensorMeta, content: bytearray) -> npt.NDArray[Any]:
    """An array over the content with its axes in the order of the formula."""
    assert isinstance(param, TensorParam), f"{param.name} is no tensor of the record"
    return view(param.ordered(meta), content)


def _attribute(param: AttrParam, value: Any) -> Any:
    if value is None:
        return None
    if param.type == "scalar":
        return Scalar.of_content(_DTYPES[value["dtype"]], bytes.fromhex(value["bytes"]))
    if param.type == "string":
        return value.encode("latin-1").decode()  # the recorder writes bytes
    if param.type in ("double", "float"):
        return float(value)  # what is not finite is a string
    if param.type == "float_array":
        return tuple(map(float, value))
    return tuple(value) if isinstance(value, list) else value


class _Handler(StreamRequestHandler):
    def handle(self) -> None:
        """Answers one call: length of the results and these, or minus the length of what went wrong."""
        try:
            reply = compute(json.loads(self.rfile.readline()), self.rfile)
            size = len(reply)
        except Exception as error:  # for the kernel to tell
            reply = f"the process that computes failed: {type(error).__name__}: {error}".encode()
            size = -len(reply)
        self.wfile.write(struct.pack("<q", size) + reply)


def _serve(descriptor: int) -> None:
    listening = socket.socket(fileno=descriptor)

    def end_with_parent() -> None:
        sys.stdin.read()
        shutil.rmtree(Path(listening.getsockname()).parent)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with ThreadingUnixStreamServer("", _Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listening
        server.serve_forever()


def main(arguments: list[str]) -> int:
    """Runs a command, or serves."""
    if arguments[:1] == ["--serve"]:
        _serve(int(arguments[1]))
    with arithmetic() as path:
        return subprocess.call(arguments, env={**os.environ, ARITHMETIC: str(path)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
