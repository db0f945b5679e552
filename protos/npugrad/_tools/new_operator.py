"""Starts a new operator from its official page: `make new-operator PAGE=aclnnRmsNormGrad.md`.

Writes the record, its reference, a test and where the vendor's checks are to be listed; `make gen` makes the
rest from the record. What a page does not specify becomes a TODO, which fails a test.
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
from npugrad.rules import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npugrad._tools.vendor_page import Parameter, VendorPage

ROOT = Path(__file__).resolve().parents[3]
_FILES = {
    "protos/npugrad/ops/{}.py": "record.py",
    "protos/npugrad/references/{}.py": "reference.py",
    "tests/contract/references/test_{}.py": "test.py",
}
"""Files of an operator by its name, and the template of each."""
_ROWS = ROOT / "tests/contract/document_rows.txt"
_VALUES = {
    "double": "1.0",
    "float": "1.0",
    "string": '""',
    "int64_array": "(1,)",
    "float_array": "(1.0,)",
    "bool_array": "(True,)",
    "scalar": 'Scalar("float32", 1.0)',
}
"""A value of each kind of attribute; of the others it is 0, of a bool either one."""
_POINTERS = {kind for kind, row in KINDS.items() if row.is_pointer}


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
        self.is_plain = all(p.formats in ((), ("ND",)) for p in self.params)
        self.repository = page.repository or "TODO"

    def row(self, code: int, word: str) -> str:
        """The first row of a return code that contains a word, as an argument; nothing if there is none."""
        rows = [row for section, row, text in self.page.rows if str(code) in section and word in text]
        return ", " + rows[0].replace(" ", "=") if rows else ""

    def renamed(self, param: Parameter) -> str:
        """The name in C as an argument, unless it follows from the name."""
        return "" if param.c_name == camel_case(param.name) else f', c_name="{param.c_name}"'

    def values(self, param: Parameter) -> str:
        """A legal value of an attribute as an argument, unless the record knows the values."""
        is_known = param is self.mask or param.kind == "bool"
        return "" if is_known else f", ({_VALUES.get(param.kind or '', '0')},)"

    def facts(self, param: Parameter) -> str:
        """What the page's table says about a tensor."""
        types = dict.fromkeys(dtype for dtypes in param.dtypes.values() for dtype in dtypes)
        return ", ".join(filter(None, (param.shape, *types)))

    def names(self, params: Sequence[Parameter]) -> str:
        """Names with spaces between them."""
        return " ".join(param.name for param in params)

    def products(self) -> str:
        """The products, as code."""
        names = [f"Product.{product.name}" for product in self.page.products]
        return _tuple(names) if self.lacking else "Product"

    def dtypes(self, param: Parameter) -> dict[Product, tuple[DType, ...]]:
        """Types of a tensor by product, without those whose data is never sent."""
        found = {product: param.dtypes.get(product) or FLOATS[product] for product in self.page.products}
        return {product: tuple(t for t in dtypes if t.has_data) for product, dtypes in found.items()}

    def types(self, param: Parameter) -> str:
        """Types of an input by product, as code, or the name of an input before it that has the same."""
        before = self.inputs[: self.inputs.index(param)]
        same = (p.name for p in before if self.dtypes(p) == self.dtypes(param))
        return next((f'"{name}"' for name in same), "") or self._listed(param)

    def uncarried(self, param: Parameter) -> str:
        """Types of an input that the service never carries as an argument, unless another input has them."""
        found = dict.fromkeys(t for dtypes in param.dtypes.values() for t in dtypes if not t.has_data)
        is_told = not found or self.types(param).startswith('"')
        return "" if is_told else f", uncarried={_tuple(f'DType.{dtype.name}' for dtype in found)}"

    def _listed(self, param: Parameter) -> str:
        found = self.dtypes(param)
        others = {tuple(t for t in found[product] if t not in FLOATS[product]) for product in found}
        if len(others) == 1 and all({*found[product]} >= {*FLOATS[product]} for product in found):
            more = "".join(f", DType.{dtype.name}" for dtype in others.pop())
            each = f"(*rules.FLOATS[each]{more})" if more else "rules.FLOATS[each]"
            is_all = not more and not self.lacking
            return "rules.FLOATS" if is_all else f"{{each: {each} for each in {self.products()}}}"
        listed = {product: _tuple(f"DType.{dtype.name}" for dtype in found[product]) for product in found}
        if len({*listed.values()}) == 1:
            return f"dict.fromkeys({self.products()}, {listed.popitem()[1]})"
        return "{" + ", ".join(f"Product.{product.name}: {names}" for product, names in listed.items()) + "}"

    def own_types(self, param: Parameter) -> str:
        """Types of an output as an argument, if they are not those of the input that it is like."""
        like = next(p for p in self.inputs if p.name == self.like(param))
        return "" if self.dtypes(param) == self.dtypes(like) else f", dtypes={self._listed(param)}"

    def axes(self, param: Parameter) -> str:
        """Names of an input's axes as an argument, unless it has those of the input whose types it has."""
        like = next((p.name for p in self.inputs if p.c_name == param.like), None)
        if self.types(param) == f'"{like}"':
            return ""
        symbols = re.findall(r"[A-Za-z]\w*|\d+", param.shape) if param.shape.startswith("(") else []
        low, high = param.ranks or (0, 8)
        axes = symbols or (f"{param.name}{axis}" for axis in range(low))
        return f', axes="{"*shape" if low < high else " ".join(axes).lower()}"'

    def draw(self, param: Parameter) -> str:
        """What a recipe draws as an argument, if not normal numbers."""
        first = self.dtypes(param)[self.page.products[0]][0]
        name = "bernoulli" if first is DType.BOOL else "integers"
        return "" if "float" in first else f', draw=Draw("{name}")'

    def like(self, param: Parameter) -> str:
        """The input that an output is shaped like, as the page says, or a guess."""
        return next((p.name for p in self.required if p.c_name == param.like), self.required[0].name)


def _tuple(items: Iterable[str]) -> str:
    """Code of a tuple, without a comma that would spread it over lines."""
    listed = list(items)
    return f"({', '.join(listed)}{',' * (len(listed) == 1)})"


def begin(page: VendorPage) -> _Operator:
    """Writes the operator's own files, and where its checks are to be listed.

    Raises:
        SystemExit: There is a record of this name already.
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
    written = {ROOT / place.format(operator.name): template for place, template in _FILES.items()}
    for path, template in written.items():
        path.write_text(templates.get_template(f"{template}.jinja").render(op=operator), "utf-8")
    with _ROWS.open("a", encoding="utf-8") as rows:
        what = f"vendor source ({operator.repository}) | checks of {operator.aclnn} | check 1"
        rows.write(f"\n[{operator.name}]\n{what} | TODO: each check of the first phase, in order\n")
    _tidy([*written])
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
    print(f'{operator.name}: begun; what is to do: make test ARGS="tests/project/test_new_operator.py"')


if __name__ == "__main__":
    main()
