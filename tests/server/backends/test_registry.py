from __future__ import annotations

import pytest

from npugrad_server.backends import make_backend
from npugrad_server.backends.cpu import CpuBackend
from npugrad_server.backends.test import TestBackend


def test_each_kind_has_its_backend() -> None:
    assert isinstance(make_backend("cpu"), CpuBackend)
    assert isinstance(make_backend("test"), TestBackend)


def test_a_kind_without_a_backend_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="found device kind 'npu'; this build has backends for cpu, test"):
        make_backend("npu")
