"""`make new-operator` on pages: what it reads, and an operator begun with it in a copy of this repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from npugrad import OPERATORS, DType, Product
from npugrad._tools.vendor_page import VendorPage, read_page
from npugrad.attributes import KINDS

Run = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("rms_norm_grad_page.md")
TOOLS = "protos/npugrad/_tools"
FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
# A page with what the other has not: an attribute of every kind, a mask, a code of two rows, an exception.
EVERY_KIND = f"""
## 产品支持情况
| 产品 | 是否支持 |
| --- | --- |
| Atlas A2 训练系列产品 | √ |
| Atlas 训练系列产品 | √ |
## aclnnEveryKind2DBackwardGetWorkspaceSize
aclnnStatus aclnnEveryKind2DBackwardGetWorkspaceSize(
const aclTensor* gradOut, const aclTensor *weightOptional,
{"".join(f"const {kind.c_type} {name}A, " for name, kind in KINDS.items())}
const aclBoolArray* outputMask, aclTensor* gradInputOut, uint64_t* workspaceSize, aclOpExecutor** executor)

- <table>
  <tr><th>参数名</th><th>输入/输出</th><th>描述</th><th>使用说明</th><th>数据类型</th><th>数据格式</th><th>维度</th></tr>
  <tr><td>gradOut</td><td>输入</td><td>-</td><td>-</td><td>FLOAT、DOUBLE、BFLOAT16</td><td>ND</td><td>[B,N]</td></tr>
  <tr><td>weightOptional</td><td>输入</td><td>-</td><td>-</td><td>INT32</td><td>ND</td><td>1</td></tr>
  <tr><td>gradInputOut</td><td>输出</td><td>-</td><td>-</td><td>FLOAT、DOUBLE、BFLOAT16</td><td>ND</td><td>2</td></tr>
  </table>
  - Atlas 训练系列产品: `gradOut`、`gradInputOut`的数据类型不支持BFLOAT16。
- <table>
  <tr><th>返回码</th><th>错误码</th><th>描述</th></tr>
  <tr><td>NULLPTR</td><td>161001</td><td>空指针。</td></tr>
  <tr><td rowspan="2">INVALID</td><td rowspan="2">161002</td><td>A | B</td></tr>
  <tr><td>数据类型不支持。</td></tr>
  </table>
"""


@pytest.fixture(scope="module")
def rms_norm() -> VendorPage:
    """Return what the page of the first one says."""
    return read_page(PAGE.read_text("utf-8"))


def test_parameters_are_read_with_their_types_ranks_and_shapes(rms_norm: VendorPage) -> None:
    assert (rms_norm.aclnn_name, rms_norm.repository) == ("aclnnRmsNormGrad", "ops-nn")
    assert rms_norm.products == (Product.ATLAS_A2, Product.ATLAS_A3)
    found = {p.c_name: (p.name, p.is_output, p.ranks, p.like) for p in rms_norm.parameters}
    assert found == {
        "dy": ("dy", False, (2, 8), ""),
        "x": ("x", False, (2, 8), "dy"),
        "rstd": ("rstd", False, (1, 7), ""),
        "gamma": ("gamma", False, (1, 7), ""),
        "dxOut": ("dx", True, (2, 8), "dy"),
        "dgammaOut": ("dgamma", True, (1, 7), "gamma"),
    }
    types = {p.name: dict(p.dtypes) for p in rms_norm.parameters}
    assert types["gamma"] == dict.fromkeys(rms_norm.products, FLOATS)
    assert types["dgamma"] == dict.fromkeys(rms_norm.products, (DType.FLOAT32,))
    assert rms_norm.prototype.startswith("const aclTensor* dy, const aclTensor* x, ")
    assert rms_norm.rows == (
        ("return codes, 161001", "row 1", "空指针。"),
        ("return codes, 161002", "row 1", "数据类型不支持。"),
        ("return codes, 561002", "row 1", "参数不满足要求。"),
        ("constraints", "entry 1", "默认非确定性实现。"),
    )


def test_attributes_exceptions_and_rows_that_span_are_read() -> None:
    page = read_page(EVERY_KIND)
    assert page.products == (Product.ATLAS_TRAINING, Product.ATLAS_A2)
    grad_out, weight, *attrs, mask, grad_input = page.parameters
    assert [attr.kind for attr in attrs] == list(KINDS)
    assert (mask.name, mask.kind, mask.is_optional) == ("output_mask", "bool_array", False)
    assert (weight.name, weight.is_optional, weight.ranks) == ("weight", True, (1, 1))
    assert (grad_out.name, grad_out.shape, grad_out.ranks) == ("grad_out", "(B, N)", (2, 2))
    assert grad_input.dtypes == {
        Product.ATLAS_TRAINING: (DType.FLOAT32, DType.FLOAT64),
        Product.ATLAS_A2: (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64),
    }
    assert [(section[-6:], row) for section, row, _ in page.rows[:3]] == [
        ("161001", "row 1"),
        ("161002", "row 1"),
        ("161002", "row 2"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("aclnnStatus", "Status", "found no C prototype; expected one of aclnn...GetWorkspaceSize(...)"),
        ("const aclTensor* gradOut", "const aclTensorList* x", "x: found aclTensorList*; expected one of "),
        (
            "const aclTensor* gradOut",
            "aclTensor",
            "found the parameter 'aclTensor'; expected a type and a name",
        ),
        (
            "参数名",
            "Name",
            "found no table of parameters of aclnnEveryKind2DBackwardGetWorkspaceSize; expected",
        ),
        ("产品支持情况", "产品", "table of products, line 2: found []; expected a mark"),
        ("√ |", "|", "table of products, line 2: found ['Atlas A2 训练系列产品', '']; expected a mark"),
        (
            "<td>INT32",
            "<td>INT33",
            "table of parameters, line 3 (weightOptional): unknown dtype 'int33'; known ",
        ),
        (
            "<td>INT32",
            "<td>整数",
            "table of parameters, line 3 (weightOptional): found the types '整数'; expected",
        ),
        (
            "161001",
            "16100",
            "table of return codes, line 2: found ['NULLPTR', '16100', '空指针。']; expected a code",
        ),
        (
            "不支持BFLOAT16",
            "不支持BF16",
            "note on gradOut、gradInputOut的数据类型: unknown dtype 'bf16'; known ",
        ),
    ],
)
def test_a_page_that_cannot_be_read_is_refused_by_table_and_line(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_page(EVERY_KIND.replace(old, new))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Begin both operators in a copy, generate, and return what runs a command there."""
    gen_python = ROOT / os.environ.get("VENV_GEN", ".venv-gen") / "bin" / "python"
    if not gen_python.exists():
        pytest.skip("no pinned toolchain here; `make gen` sets it up")
    copy = tmp_path_factory.mktemp("begun") / "npugrad"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__"))
    paths = os.pathsep.join(str(copy / folder) for folder in ("protos", "server", "client"))

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        environment, asked = {**os.environ, "PYTHONPATH": paths}, list(map(str, command))
        return subprocess.run(
            asked, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    other = tmp_path_factory.mktemp("page") / "page.md"
    other.write_text(EVERY_KIND, "utf-8")
    for command in (
        (sys.executable, "-m", "npugrad._tools.new_operator", PAGE),
        (sys.executable, "-m", "npugrad._tools.new_operator", other),
        (sys.executable, f"{TOOLS}/gen_contract.py"),
        (gen_python, f"{TOOLS}/gen_protos.py"),
        (sys.executable, f"{TOOLS}/gen_client.py"),
        (sys.executable, f"{TOOLS}/gen_docs.py"),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return run


def failures_in(run: Run, tmp_path: Path, *arguments: str) -> dict[str, str]:
    """Run tests in the copy: what each that failed says, by its name."""
    report = tmp_path / "report.xml"
    options = ("-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}")
    done = run(sys.executable, "-m", "pytest", *options, *arguments)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    root = ET.parse(report).getroot()
    assert not list(root.iter("error")), done.stdout
    return {
        case.get("name", ""): f"{failure.get('message')}\n{failure.text}"
        for case in root.iter("testcase")
        for failure in case.iter("failure")
    }


@pytest.mark.slow
@pytest.mark.deep
def test_tests_of_the_recipe_and_of_the_contract_say_what_is_left_and_the_others_stand(
    begun: Run, tmp_path: Path
) -> None:
    """One test, because a copy of the repository for each of several processes would take longer."""
    _has_the_form_of_the_rest_and_is_not_begun_again(begun)
    # Whatever is named is collected; those of the recipe and of the contract run.
    others = ("tests/e2e", "tests/congruence", "tests/server/acl", "tests/server/backends")
    of_others = [f"--ignore-glob=*/contract/*/test_{name}.py" for name in OPERATORS]
    wanted = "test_new_operator or (contract and rms_norm_grad and not e2e and not congruence and not server)"
    arguments = ("tests/project/test_new_operator.py", "tests/contract", *of_others, *others, "-k", wanted)
    failed = failures_in(begun, tmp_path, *arguments)
    left = failed["test_nothing_is_left_to_do"]
    for place in ("references/rms_norm_grad.py", "ops/rms_norm_grad.py", "contract/document_rows.txt"):
        assert re.search(rf"{place}:\d+: .*TODO", left), place
    assert failed.keys() >= {
        f"test_the_changelog_tells_of_every_operator[{name}]"
        for name in ("rms_norm_grad", "every_kind_2d_backward")
    }
    assert {name.split("[")[0] for name in failed} >= {
        "test_every_row_is_cited_or_explained",
        "test_every_operator_has_the_sizes_of_measurements_and_some_of_models",
        "test_an_independent_implementation_agrees",
        "test_layout_changes_no_bit",
    }
    for name, text in failed.items():
        assert re.match(r"AssertionError|(NotImplementedError|Failed): TODO", text), f"{name}: {text}"


def _has_the_form_of_the_rest_and_is_not_begun_again(begun: Run) -> None:
    for command in ("check", "format --check"):
        done = begun(sys.executable, "-m", "ruff", *command.split(), "protos", "client", "tests/contract")
        assert done.returncode == 0, done.stdout + done.stderr
    done = begun(sys.executable, "-m", "npugrad._tools.new_operator", PAGE)
    assert done.returncode == 1
    assert "found a record of rms_norm_grad; expected a new operator" in done.stderr
