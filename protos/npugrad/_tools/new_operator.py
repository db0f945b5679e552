"""Starts a new operator from its official page: `make new-operator PAGE=aclnnRmsNormGrad.md`.

Writes record, workloads, reference, tests and the rows of the page; the rest follows from the record. What a
page does not specify becomes a TODO, which fails a test with its step number.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from npugrad._tools.gen_contract import load
from npugrad._tools.vendor_page import read_page
from npugrad.attributes import KINDS
from npugrad.dtypes import DType
from npugrad.names import camel_case, snake_case
from npugrad.ops import OPERATORS
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad._tools.vendor_page import Parameter, VendorPage

ROOT = Path(__file__).resolve().parents[3]
_FILES = {
    "protos/npugrad/ops/{}.py": "record.py",
    "protos/npugrad/ops/_{}_workloads.py": "workloads.py",
    "protos/npugrad/references/{}.py": "reference.py",
    "tests/contract/ops/test_{}.py": "test.py",
    "tests/contract/references/test_{}.py": "test.py",
}
"""Files of an operator by its name, and the template of each."""
_LINES = (
    ("documented", "tests/contract/document_rows.txt", r".*\n"),
    ("signed", "tests/congruence/signatures.py", r'.*?PROTOTYPES = """.*?(?="""\n)'),
    ("told", "CHANGELOG.md", r".*?## \[Unreleased\].*?### Added\n.*?\n(?=\n#)"),
)
"""Each addition to an existing file: its name, the file, and a pattern of the text before it."""
_ATTRIBUTES: dict[str, tuple[str, str]] = {
    "int64": ("int", "0"),
    "int32": ("int", "0"),
    "int8": ("int", "0"),
    "uint64": ("int", "0"),
    "double": ("float", "1.0"),
    "bool": ("bool", "False"),
    "string": ("str | None", '""'),
    "int64_array": ("tuple[int, ...] | None", "(1,)"),
    "float_array": ("tuple[float, ...] | None", "(1.0,)"),
    "bool_array": ("tuple[bool, ...] | None", "(True,)"),
    "scalar": ("Scalar | None", 'Scalar("float32", 1.0)'),
}
"""For each kind of attribute: its type in Python and an example value."""
_POINTERS = {kind for kind, row in KINDS.items() if row.is_pointer}
_FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


class _Operator:
    """What the templates need from a page."""

    def __init__(self, page: VendorPage) -> None:
        self.page = page
        self.aclnn = page.aclnn_name
        self.rpc = self.aclnn.removeprefix("aclnn")
        self.name = snake_case(self.rpc)
        self.wire = load()[-1].wire + 1
        self.params = page.parameters
        self.attrs = [p for p in self.params if p.kind]
        self.outputs = [p for p in self.params if p.is_output]
        self.inputs = [p for p in self.params if not p.kind and not p.is_output]
        self.required = [p for p in self.inputs if not p.is_optional]
        self.pointers = [p for p in self.attrs if p.kind in _POINTERS and not p.is_optional]
        self.mask = next((p for p in self.attrs if p.name == "output_mask"), None)
        self.lacking = set(Product) - set(page.products)
        self.repository = page.repository or "TODO"

    def row(self, code: int, word: str) -> str:
        """The first row of a return code that contains a word, as an argument; nothing if there is none."""
        rows = [row for section, row, text in self.page.rows if str(code) in section and word in text]
        return ", " + rows[0].replace(" ", "=") if rows else ""

    def renamed(self, param: Parameter) -> str:
        """The name in C as an argument, unless it follows from the name."""
        return "" if param.c_name == camel_case(param.name) else f', c_name="{param.c_name}"'

    def argument(self, param: Parameter) -> str:
        """Type and default of the keyword of `build`, as code."""
        assert param.kind
        annotation, value = _ATTRIBUTES[param.kind]
        if param is self.mask:
            value = str((True,) * len(self.outputs))
        if param.is_optional:
            return f"{annotation} = None,"
        return f"{annotation} = {value}," + ("  # noqa: B008" if param.kind == "scalar" else "")

    def facts(self, param: Parameter) -> str:
        """What the page's table says about a tensor."""
        types = dict.fromkeys(dtype for dtypes in param.dtypes.values() for dtype in dtypes)
        return ", ".join(filter(None, (param.shape, *types)))

    def names(self, params: Sequence[Parameter]) -> str:
        """Names as a tuple, as code."""
        return _tuple(f'"{param.name}"' for param in params)

    def products(self) -> str:
        """The products as a tuple, as code."""
        return _tuple(f"Product.{product.name}" for product in self.page.products)

    def dtypes(self, param: Parameter, product: Product = Product.ATLAS_A2) -> tuple[DType, ...]:
        """Types of a tensor on a product."""
        return param.dtypes.get(product) or _FLOATS

    def types(self, param: Parameter) -> str:
        """Types of a tensor by product, as code."""
        listed = {
            product: _tuple(f"DType.{dtype.name}" for dtype in self.dtypes(param, product))
            for product in self.page.products
        }
        if len(set(listed.values())) == 1:
            return f"dict.fromkeys(PRODUCTS, {listed.popitem()[1]})"
        return "{" + ", ".join(f"Product.{product.name}: {names}" for product, names in listed.items()) + "}"

    def draw(self, param: Parameter) -> str:
        """What a recipe draws, as code."""
        first = self.dtypes(param)[0]
        name = "normal" if "float" in first else "bernoulli" if first is DType.BOOL else "integers"
        return f'Draw("{name}")'

    def like(self, param: Parameter) -> str:
        """The input that an output is shaped like, as the page says, or a guess."""
        return next((p.name for p in self.required if p.c_name == param.like), self.required[0].name)

    def has_type_of_like(self, param: Parameter) -> bool:
        """Whether an output has the types of the input that it is like."""
        return self.types(param) == self.types(next(p for p in self.inputs if p.name == self.like(param)))


def _tuple(items: Iterable[str]) -> str:
    """Code of a tuple, without a comma that would spread it over lines."""
    listed = list(items)
    return f"({', '.join(listed)}{',' * (len(listed) == 1)})"


def begin(page: VendorPage) -> _Operator:
    """Writes the operator's own files, and adds it to the shared ones.

    Raises:
        SystemExit: There is a record of this name already, or a shared file is not as expected.
    """
    operator = _Operator(page)
    if operator.name in OPERATORS:
        raise SystemExit(f"new_operator: found a record of {operator.name}; expected a new operator")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters["lines"] = textwrap.wrap
    texts: dict[Path, str] = {}
    for place, template in _FILES.items():
        made = templates.get_template(f"{template}.jinja").render(op=operator, place=place)
        texts[ROOT / place.format(operator.name)] = made
    lines = templates.get_template("lines.jinja").module
    for name, place, anchor in _LINES:
        text = texts.get(ROOT / place) or (ROOT / place).read_text("utf-8")
        found = re.match(anchor, text, re.DOTALL)
        if found is None:
            raise SystemExit(f"new_operator: {place}: found nothing like {anchor!r}; expected it there")
        addition = getattr(lines, name)(operator)
        texts[ROOT / place] = text[: found.end()] + addition + text[found.end() :]
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    _tidy([path for path in texts if path.suffix == ".py"])
    return operator


def _tidy(paths: list[Path]) -> None:
    """Sorts lists, removes imports that this operator does not need, and formats."""
    ruff = (sys.executable, "-m", "ruff")
    fix = ("check", "--quiet", "--fix-only", "--unsafe-fixes", "--select", "I,F401,TC,RUF022")
    for command in (fix, ("format", "--quiet")):
        subprocess.run([*ruff, *command, *map(str, paths)], cwd=ROOT, check=True)


def main() -> None:
    """Starts the operator and prints the next step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", type=Path, help="markdown file, as in the vendor's repositories")
    page = parser.parse_args().page
    try:
        operator = begin(read_page(page.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise SystemExit(f"new_operator: {page}: {error}") from error
    print(f"{operator.name}: begun; after `make gen`, tests/project/test_new_operator.py lists what is to do")


if __name__ == "__main__":
    main()
