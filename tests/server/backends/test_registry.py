from __future__ import annotations

import sys

import pytest

from npugrad_server.backends import make_backend
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.backends.test import TestBackend


def test_each_kind_has_its_backend() -> None:
    assert isinstance(make_backend("cpu"), CpuBackend)
    assert isinstance(make_backend("test"), TestBackend)


def test_the_backend_of_npus_needs_no_torch_before_it_is_opened() -> None:
    before = set(sys.modules)
    assert make_backend("npu").name == "npu"
    assert not {"torch", "torch_npu"} & (set(sys.modules) - before)


def test_a_kind_without_a_backend_lists_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="found device kind 'gpu'; this build has backends for cpu, npu, test"
    ):
        make_backend("gpu")
