"""Reads a page of the vendor's documents: C prototype, products, parameters, return codes, constraints.

A page is Markdown with HTML tables, in Chinese, as in the operators' repositories. Only the prototype is
required: what a page without tables does not specify is empty in the result of `read_page`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import TYPE_CHECKING

from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from npugrad.attributes import KINDS
from npugrad.dtypes import DType, dtype_from_name
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bs4 import Tag

    from npugrad.attributes import AttrType

TENSOR = "aclTensor*"
_PROTOTYPE = re.compile(r"aclnnStatus\s+(aclnn\w+?)GetWorkspaceSize\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\s*(const\s+)?(\w+)\s*(\**)\s*(\w+)\s*")
_REPOSITORY = re.compile(r"gitcode\.com/cann/([a-z-]+)")
_SIZES = re.compile(r"[(\[]\s*(\w[^)\]]*)[)\]]|(\d)(?:-(\d))?\b")
# "The shape is the same as that of `x`", and "the data types do not include BFLOAT16".
_LIKE = re.compile(r"shape\W*与\D*?(\w+)[^。]*?(?:一致|相同|相等)", re.ASCII)
_WITHOUT = re.compile(r"数据类型不支持([A-Z\d、]+)")
_TYPES = {"FLOAT": "float32", "DOUBLE": "float64"}
_PRODUCTS = {
    "Atlas 训练系列产品": Product.ATLAS_TRAINING,
    "Atlas A2 训练系列产品": Product.ATLAS_A2,
    "Atlas A3 训练系列产品": Product.ATLAS_A3,
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the first phase.

    Attributes:
        c_name: Name in C.
        name: Name on the wire and in Python, without C's suffixes for optional parameters and outputs.
        kind: Kind of an attribute; None for a tensor.
        is_output: Whether it is a tensor that the operator writes.
        text: Its description on the page.
        dtypes: Types of a tensor by product; empty if the page has no table.
        shape: Shape of a tensor in symbols, or its ranks; empty if the page does not say.
        ranks: Minimum and maximum rank of a tensor; None if the page does not say.
        formats: Storage formats of a tensor, as on the page.
        like: C name of the tensor whose shape it has according to the page; empty if the page does not say.
    """

    c_name: str
    name: str
    kind: AttrType | None
    is_output: bool
    text: str
    dtypes: Mapping[Product, tuple[DType, ...]]
    shape: str
    ranks: tuple[int, int] | None
    formats: str
    like: str

    @property
    def is_pointer(self) -> bool:
        """Whether C takes a pointer, which may be null."""
        return self.kind is None or KINDS[self.kind].is_pointer

    @property
    def is_optional(self) -> bool:
        """Whether its name says that it may be null."""
        return self.is_pointer and self.c_name.endswith("Optional")


@dataclass(frozen=True)
class VendorPage:
    """Contents of a page.

    Attributes:
        aclnn_name: Name of the function.
        repository: The vendor's public repository of the operator; empty if the page links to none.
        products: Those of our products that have it; all of them if the page has no table.
        prototype: Parameters of the C prototype, spaces as in ``const aclTensor* dy, ...``.
        parameters: In its order, without workspaceSize and executor.
        rows: Rows of the table of return codes and of the constraint section: section, row, text.
    """

    aclnn_name: str
    repository: str
    products: tuple[Product, ...]
    prototype: str
    parameters: tuple[Parameter, ...]
    rows: tuple[tuple[str, str, str], ...]


def snake_case(name: str) -> str:
    """``grid_sampler_2d_backward`` of ``GridSampler2DBackward``, ``hxw`` of ``HxW``."""
    if re.fullmatch(r"[A-Z](x?[A-Z])*", name):
        return name.lower()
    return re.sub(r"(?<=[a-z])(?=\d+D|[A-Z])|(?<=[a-z\dD])(?=[A-Z][a-z])", "_", name).lower()


def read_page(text: str) -> VendorPage:
    """Parses a page.

    Raises:
        ValueError: It has no prototype, or one that the contract cannot express, or an unknown type.
    """
    prototype = _PROTOTYPE.search(text)
    if prototype is None:
        raise ValueError("found no C prototype; expected one of aclnn...GetWorkspaceSize(...)")
    sections = _sections(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    products = _products(sections.get("产品支持情况"))
    first_phase = sections.get(f"{prototype[1]}GetWorkspaceSize")
    table = dict(_described(first_phase))
    parameters = [
        _parameter(declared, table, products)
        for declared in prototype[2].split(",")[:-2]  # workspaceSize and executor end each
    ]
    if not any(parameter.is_output for parameter in parameters):
        raise ValueError("found no output; expected a table of parameters, or tensors without const")
    repository = _REPOSITORY.search(text)
    return VendorPage(
        aclnn_name=prototype[1],
        repository=repository[1] if repository else "",
        products=products,
        parameters=tuple(_without_exceptions(parameters, first_phase)),
        prototype=re.sub(r"\s*(\*+)\s*", r"\1 ", " ".join(prototype[2].split())),
        rows=(*_codes(first_phase), *_constraints(sections.get("约束说明"))),
    )


def _sections(html: str) -> dict[str, Tag]:
    """What follows each heading of the second level, up to the next one."""
    soup = BeautifulSoup(html, "html.parser")
    found: dict[str, Tag] = {}
    for element in list(soup.find_all(recursive=False)):
        if element.name == "h2":
            section = found[element.get_text(strip=True)] = soup.new_tag("section")
        elif found:
            section.append(element)
    return found


def _rows(section: Tag | None, heading: str) -> Iterator[list[str]]:
    """Rows of the table with a column of this heading; a cell that spans rows is repeated in each."""
    for table in section.find_all("table") if section else ():
        grid: dict[tuple[int, int], str] = {}
        for line, row in enumerate(table.find_all("tr")):
            for cell in row.find_all(["td", "th"]):
                column = next(i for i in count() if (line, i) not in grid)
                for reached in range(int(str(cell.get("rowspan", "1")))):
                    grid[line + reached, column] = " ".join(cell.get_text().split())
        rows = [
            [text for _, text in row] for _, row in groupby(sorted(grid.items()), lambda item: item[0][0])
        ]
        if rows and heading in rows[0]:
            yield from rows[1:]


def _products(section: Tag | None) -> tuple[Product, ...]:
    rows = [row for row in _rows(section, "产品") if "√" in row[1]]
    found = {product for name, product in _PRODUCTS.items() for row in rows if row[0].startswith(name)}
    return tuple(product for product in Product if product in found or not rows)


def _described(section: Tag | None) -> Iterator[tuple[str, list[str]]]:
    """Rows of the table of parameters by C name, without the type that some pages append to it."""
    for row in _rows(section, "参数名"):
        yield re.split(r"\W", row[0], maxsplit=1, flags=re.ASCII)[0], row


def _parameter(declared: str, table: Mapping[str, list[str]], products: tuple[Product, ...]) -> Parameter:
    matched = _PARAMETER.fullmatch(declared)
    if matched is None:
        raise ValueError(f"found the parameter {declared.strip()!r}; expected a type and a name")
    const, c_type, c_name = matched[1], matched[2] + matched[3], matched[4]
    kinds: dict[str, AttrType] = {kind.c_type: name for name, kind in KINDS.items()}
    if c_type != TENSOR and c_type not in kinds:
        raise ValueError(f"{c_name}: found {c_type}; expected one of {', '.join((TENSOR, *kinds))}")
    _, role, meaning, usage, types, formats, sizes, *_ = (*table.get(c_name, []), *("",) * 8)
    is_output = c_type == TENSOR and (role == "输出" if role else not const)
    short = c_name.removesuffix("Optional")
    like = _LIKE.search(usage)
    shape, ranks = _sizes(sizes)
    return Parameter(
        c_name=c_name,
        name=snake_case(short.removesuffix("Out") if is_output else short),
        kind=kinds.get(c_type),
        is_output=is_output,
        text=" ".join(part for part in (meaning, usage) if part not in ("", "-")),
        dtypes=dict.fromkeys(products, _dtypes(types)) if c_type == TENSOR else {},
        shape=shape,
        ranks=ranks,
        formats=formats if c_type == TENSOR else "",
        like=like[1] if like else "",
    )


def _sizes(cell: str) -> tuple[str, tuple[int, int] | None]:
    """Shape and ranks of cells like ``[B,N,D]``, ``2-8`` and ``5``."""
    matched = _SIZES.match(cell)
    if matched is None:
        return "", None
    if matched[1]:
        axes = [axis.strip() for axis in matched[1].split(",")]
        return f"({', '.join(axes)})", (len(axes), len(axes))
    low, high = int(matched[2]), int(matched[3] or matched[2])
    return f"rank {low}" + (f" to {high}" if high > low else ""), (low, high)


def _without_exceptions(parameters: list[Parameter], section: Tag | None) -> Iterator[Parameter]:
    """Removes the types that some products lack according to a note below the table."""
    lacking = [
        (names, product, dtype)
        for note in _entries(section)
        if (types := _WITHOUT.search(note)) is not None
        for names in [set(re.findall(r"\w+", note, re.ASCII))]
        for name, product in _PRODUCTS.items()
        if name in note
        for dtype in _dtypes(types[1])
    ]
    for parameter in parameters:
        taken = {(product, dtype) for names, product, dtype in lacking if parameter.c_name in names}
        kept = {
            product: tuple(dtype for dtype in dtypes if (product, dtype) not in taken)
            for product, dtypes in parameter.dtypes.items()
        }
        yield replace(parameter, dtypes=kept)


def _dtypes(text: str) -> tuple[DType, ...]:
    """Types by their names in the documents, such as FLOAT; raises ValueError for an unknown one."""
    found = {dtype_from_name(_TYPES.get(name, name.lower())) for name in re.findall(r"[A-Z]\w*", text)}
    return tuple(dtype for dtype in DType if dtype in found)


def _codes(section: Tag | None) -> Iterator[tuple[str, str, str]]:
    """Rows of the table of return codes, numbered from 1 for each code."""
    counts: Counter[str] = Counter()
    for _, code, text, *_ in _rows(section, "错误码"):
        counts[code] += 1
        yield f"return codes, {code}", f"row {counts[code]}", text


def _constraints(section: Tag | None) -> Iterator[tuple[str, str, str]]:
    for number, text in enumerate(_entries(section), start=1):
        yield "constraints", f"entry {number}", text


def _entries(section: Tag | None) -> Iterator[str]:
    """Texts of the innermost list entries, without tables in them."""
    for entry in section.find_all("li") if section else ():
        if entry.find("li") is None and entry.find_parent("table") is None:
            texts = (text for text in entry.find_all(string=True) if text.find_parent("table") is None)
            yield " ".join("".join(texts).split())
