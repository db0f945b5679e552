"""Reads a page of the vendor's documents: prototype, products, parameters, return codes, determinism.

A page is Markdown with HTML tables, in Chinese, as in the operators' repositories. What a page does not say
of a parameter is empty in the result of `read_page`; a table that cannot be understood is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TYPE_CHECKING, NamedTuple

from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from npugrad.attributes import KINDS
from npugrad.dtypes import DType, Format, dtype_from_name
from npugrad.names import python_name
from npugrad.products import Product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TENSOR = "aclTensor*"
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_PROTOTYPE = re.compile(r"aclnnStatus\s+(aclnn\w+?)GetWorkspaceSize\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\s*(const\s+)?(\w+)(?:\s*(\*+)\s*|\s+)(\w+)\s*")
_REPOSITORY = re.compile(r"gitcode\.com/cann/([a-z-]+)")
_KINDS = {kind.c_type: str(name) for name, kind in KINDS.items()}
# "The shape is the same as that of `x`", and a cell of "the same as `x`".
_LIKE = re.compile(r"shape\W*与\D*?(\w+)[^。]*?(?:一致|相同|相等)", re.ASCII)
_SAME = re.compile(r"[与同和](\w+)", re.ASCII)
_OWN = re.compile(r"^(?:支持)?\d|[\[(（]|\b[A-Z][A-Z\d_]+\b", re.ASCII)
_TYPE = re.compile(r"\b(?:[A-Z][A-Z\d_]{2,}|bool)\b", re.ASCII)
_TYPES = {"FLOAT": "float32", "DOUBLE": "float64"}
# "`x` and `y` do not support / support only / support FLOAT and DOUBLE", without a condition.
_LIMIT = re.compile(r"(.*?)(不|仅|)支持([A-Z][A-Z\d_、和 ]+)(?:数据类型)?，?")
_RANK = re.compile(r"(?:支持)?(\d)维?(?:[-~、/或和](\d))?(?!\w)", re.ASCII)
_AXES = re.compile(r"[(（\[]([^)）\]]*)[)）\]]")
_VALUE = re.compile(r"(?<![\w.])(\d+)\s*[:：(（]\s*['\"‘“]?[A-Za-z]", re.ASCII)
# A parameter in a list instead of a table: "- grad(aclTensor*, input): what it is".
_LISTED = re.compile(r"(\w+)\s*[(（]\w+ ?\**\s*[,，]\s*(\w+)[)）]\s*[:：](.*)")
_PRODUCTS = {
    Product.ATLAS_TRAINING: re.compile(r"Atlas 训练"),
    Product.ATLAS_A2: re.compile(r"Atlas A2 训练|A2/A3平台"),
    Product.ATLAS_A3: re.compile(r"Atlas A3 训练|A2/A3平台"),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the first phase.

    Attributes:
        c_name: Name in C.
        name: Name on the wire and in Python, without C's suffixes for optional parameters and outputs.
        kind: Kind of an attribute; None for a tensor.
        is_output: Whether it is a tensor that the operator writes.
        is_optional: Whether it may be null, by its name or by the page.
        text: Its description on the page.
        dtypes: Types of a tensor by product; empty if the page does not say.
        shape: Shape of a tensor in symbols, or its ranks; empty if the page does not say.
        ranks: Minimum and maximum rank of a tensor; None if the page does not say.
        formats: Storage formats of a tensor, as on the page.
        like: C name of the tensor whose shape it has according to the page; empty if the page does not say.
        values: Numbers that an integer may be, if the page names what each means.
    """

    c_name: str
    name: str
    kind: str | None
    is_output: bool
    is_optional: bool
    text: str
    dtypes: Mapping[Product, tuple[DType, ...]]
    shape: str
    ranks: tuple[int, int] | None
    formats: tuple[str, ...]
    like: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class VendorPage:
    """Contents of a page.

    Attributes:
        aclnn_name: Name of the function.
        repository: The vendor's public repository of the operator; empty if the page links to none.
        products: Those of our products that have it.
        prototype: Parameters of the C prototype, spaces as in ``const aclTensor* dy, ...``.
        parameters: In its order, without workspaceSize and executor.
        rows: Rows of the table of return codes and of the constraint section: section, row, text.
        determinism: ``"default"``, ``"option"`` if it can be switched on, ``"no"``; None if unsaid.
    """

    aclnn_name: str
    repository: str
    products: tuple[Product, ...]
    prototype: str
    parameters: tuple[Parameter, ...]
    rows: tuple[tuple[str, str, str], ...]
    determinism: str | None


class _Described(NamedTuple):
    """What the page says of a parameter: where, and the cells of its row."""

    place: str
    role: str = ""
    meaning: str = ""
    usage: str = ""
    types: str = ""
    formats: str = ""
    sizes: str = ""


class _Note(NamedTuple):
    """A line outside tables: products that it is for (None: all), parameter it stands below, text."""

    products: tuple[Product, ...] | None
    below: str
    text: str


def read_page(text: str) -> VendorPage:
    """Parses a page.

    Raises:
        ValueError: It has no prototype, one that the contract cannot express, or no table of products or
            parameters, or a line of a table cannot be understood; the message names table and line.
    """
    prototype = _PROTOTYPE.search(text)
    if prototype is None:
        raise ValueError("found no C prototype; expected one of aclnn...GetWorkspaceSize(...)")
    aclnn_name = prototype[1]
    # workspaceSize and executor end each.
    declared = [_declared(text) for text in prototype[2].split(",")[:-2]]
    sections = _sections(text)
    first_phase = sections.get(f"{aclnn_name}GetWorkspaceSize", sections.get(aclnn_name, ""))
    constraints = sections.get("约束说明", "")
    described = _described(first_phase)
    if not described:
        raise ValueError(f"found no table of parameters of {aclnn_name}GetWorkspaceSize; expected one")
    products = _products(sections.get("产品支持情况", ""))
    parameters = {
        c_name: _parameter(aclnn_name, c_type, c_name, described, products) for _, c_type, c_name in declared
    }
    if not any(parameter.is_output for parameter in parameters.values()):
        written = {name for const, c_type, name in declared if c_type == TENSOR and not const}
        parameters.update({name: replace(parameters[name], is_output=True) for name in written})
        if not written:
            raise ValueError("table of parameters: found no output; expected one, or a tensor without const")
    for note in (*_notes(first_phase), *_of_columns(constraints)):
        _limit(parameters, note)
    return VendorPage(
        aclnn_name=aclnn_name,
        repository=next(iter(_REPOSITORY.findall(text)), ""),
        products=products,
        parameters=tuple(parameters.values()),
        prototype=", ".join(f"{'const ' * const}{c_type} {c_name}" for const, c_type, c_name in declared),
        rows=(*_codes(first_phase), *_entries(constraints)),
        determinism=_determinism(_notes(constraints)),
    )


def _declared(declared: str) -> tuple[bool, str, str]:
    """Whether it is const, type and name of a parameter of the prototype."""
    matched = _PARAMETER.fullmatch(declared)
    if matched is None:
        raise ValueError(f"found the parameter {declared.strip()!r}; expected a type and a name")
    const, c_type, c_name = matched[1], matched[2] + (matched[3] or ""), matched[4]
    if c_type != TENSOR and c_type not in _KINDS:
        raise ValueError(f"{c_name}: found {c_type}; expected one of {', '.join((TENSOR, *_KINDS))}")
    return const is not None, c_type, c_name


def _sections(text: str) -> dict[str, str]:
    """What follows each heading of the second level, up to the next one; of two of a name the first."""
    parts = re.split(r"^## *(.*?) *$", text, flags=re.MULTILINE)[1:]
    return dict(reversed(list(zip(parts[::2], parts[1::2], strict=True))))


def _tables(section: str) -> Iterator[list[list[str]]]:
    """Tables as lines of cells; a cell that spans lines or columns is repeated in each."""
    # Each by itself: a stray end tag in a cell would end the list around the table.
    for html in re.findall("<table.*?</table>", _MARKDOWN.render(section), re.DOTALL):
        table = BeautifulSoup(html, "html.parser")
        grid: list[dict[int, str]] = [{} for _ in table.find_all("tr")]
        for line, row in enumerate(table.find_all("tr")):
            for cell in row.find_all(["td", "th"]):
                column = next(i for i in count() if i not in grid[line])
                down, across = (int(str(cell.get(span, "1"))) for span in ("rowspan", "colspan"))
                for reached, beside in product(grid[line : line + down], range(across)):
                    reached[column + beside] = " ".join(cell.get_text().split())
        yield [[text for _, text in sorted(row.items())] for row in grid]


def _plain(line: str) -> str:
    """A line of Markdown without tags, emphasis and the mark of a list entry."""
    return re.sub(r"<[^>]*>|[`*]|^[-•·\s]+", "", line.strip()).strip()


def _products(section: str) -> tuple[Product, ...]:
    """Products of a table with check marks, or of lines that end in "supported" or "not supported"."""
    marked = [row for table in _tables(section) for row in table[1:]]
    marked = marked or [re.split("[：:]", _plain(line)) for line in section.splitlines() if "支持" in line]
    for line, row in enumerate(marked or [[]], start=2):
        if row[1:2] not in (["√"], ["×"], ["x"], ["支持"], ["不支持"]):
            raise ValueError(f"table of products, line {line}: found {row}; expected a mark")
    return _ours([name for name, mark, *_ in marked if mark in ("√", "支持")])


def _ours(names: list[str]) -> tuple[Product, ...]:
    return tuple(own for own, pattern in _PRODUCTS.items() if any(map(pattern.match, names)))


def _named_products(text: str) -> tuple[Product, ...] | None:
    """Ours of a list of products; None if it is none."""
    names = text.split("、")
    return _ours(names) if all(re.match("Atlas|Ascend|A2/A3", name) for name in names) else None


def _key(c_name: str) -> str:
    """A name as tables and prototype have in common: some differ in case and underscores."""
    return c_name.replace("_", "").lower()


def _described(section: str) -> dict[str, _Described]:
    """What the table says of each parameter, or a list in its place; some append the type to the name."""
    found = {}
    for table in _tables(section):
        for line, row in enumerate(table[1:], start=2):
            if table[0][0] == "参数名" and row:
                c_name = re.split(r"\W", row[0], maxsplit=1, flags=re.ASCII)[0]
                place = f"table of parameters, line {line} ({c_name})"
                found[_key(c_name)] = _Described(place, *row[1:7])
    for line, text in enumerate([] if found else section.splitlines(), start=1):
        if listed := _LISTED.match(_plain(text)):
            c_name, role, says = listed.groups()
            types, formats, sizes = (
                "".join(re.findall(pattern, says))
                for pattern in (r"数据类型[^。，]*", r"数据格式[^。，]*", r"维度为?([\d-]+)维")
            )
            place = f"list of parameters, line {line} ({c_name})"
            found[_key(c_name)] = _Described(place, role, says, "", types, formats, sizes)
    return found


def _cell(described: Mapping[str, _Described], c_name: str, column: str) -> str:
    """What a cell says, or the one of the parameter that it refers to."""
    text: str = getattr(described.get(_key(c_name), _Described("")), column)
    other = _SAME.search(text)
    if _OWN.search(text) or other is None:
        return text
    others = {name: row for name, row in described.items() if name != _key(c_name)}
    return _cell(others, other[1], column) if _key(other[1]) in others else text


def _parameter(
    op: str, c_type: str, c_name: str, described: Mapping[str, _Described], products: tuple[Product, ...]
) -> Parameter:
    row = described.get(_key(c_name), _Described(""))
    is_tensor, short = c_type == TENSOR, c_name.removesuffix("Optional")
    role = row.role or ("输出" if short.endswith("Out") else "")
    is_output = is_tensor and "输出" in role
    shape, ranks = _sizes(_cell(described, c_name, "sizes"))
    types = _dtypes(_cell(described, c_name, "types"), row.place) if is_tensor else ()
    formats = _cell(described, c_name, "formats") if is_tensor else ""
    return Parameter(
        c_name=c_name,
        name=python_name(c_name, function=op, is_output=is_output),
        kind=None if is_tensor else _KINDS[c_type],
        is_output=is_output,
        is_optional=c_type.endswith("*") and (short != c_name or "可选" in row.role),
        text=" ".join(part for part in (row.meaning, row.usage) if part not in ("", "-")),
        dtypes=dict.fromkeys(products, types) if is_tensor else {},
        shape=shape if is_tensor else "",
        ranks=ranks if is_tensor else None,
        formats=tuple(name for name in re.findall(r"[A-Z][A-Z\d_]+", formats) if name in Format.__members__),
        like=next(iter(_LIKE.findall(row.usage)), ""),
        values=tuple(dict.fromkeys(map(int, _VALUE.findall(row.usage)))) if "int" in c_type else (),
    )


def _sizes(cell: str) -> tuple[str, tuple[int, int] | None]:
    """Shape and ranks of cells like ``[B,N,D]``, ``[BND]、[TD]``, ``2-8`` and ``5``."""
    if matched := _RANK.match(cell):
        low, high = int(matched[1]), int(matched[2] or matched[1])
        return f"rank {low}" + f" to {high}" * (high > low), (low, high)
    # Brackets within an axis, as in (a * (b - c), d), are no shapes.
    shapes = _AXES.findall(re.sub(r"(?<=[(（])[(（][^()（）]*[)）]", "n", re.sub(r"\w\[\d\]", "n", cell)))
    compact = re.compile("[A-Z]{2,}8?" if "[" in cell else "$")
    axes = [list(s) if compact.fullmatch(s) else re.findall(r"[^,，\s][^,，]*", s) for s in shapes]
    ranks = sorted(map(len, axes))
    return (f"({', '.join(axes[0])})", (ranks[0], ranks[-1])) if axes else ("", None)


def _dtypes(text: str, place: str) -> tuple[DType, ...]:
    """Types by their names in the documents, such as FLOAT."""
    try:
        found = {dtype_from_name(_TYPES.get(name, name.lower())) for name in _TYPE.findall(text)}
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not found and text not in ("", "-"):
        raise ValueError(f"{place}: found the types {text!r}; expected names, or another parameter's")
    return tuple(dtype for dtype in DType if dtype in found)


def _notes(section: str) -> Iterator[_Note]:
    """Lines outside tables."""
    products: tuple[Product, ...] | None = None
    below, depth = "", 0
    for line in re.sub(r"<table.*?</table>", "", section, flags=re.DOTALL).splitlines():
        text, indent = _plain(line), len(line) - len(line.lstrip())
        if listed := _LISTED.match(text):
            below, products = listed[1], None
        elif text:
            head, *rest = re.split("[：:]", text, maxsplit=1)
            named = _named_products(head)
            if named is not None:
                products, depth, text = named, indent, "".join(rest)
            elif indent <= depth:
                products = None
            yield _Note(products, below, text)


def _of_columns(section: str) -> Iterator[_Note]:
    """What a table with a column for each product says of types."""
    for heads, *rows in filter(None, _tables(section)):
        for row in (row for row in rows if re.match("dtype|数据类型", row[0])):
            for products, text in zip(map(_named_products, heads), row, strict=False):
                yield _Note(products, "", f"数据类型{text}")


def _limit(parameters: dict[str, Parameter], note: _Note) -> None:
    """Takes the types from the parameters that a note says are not supported, or not among the only ones."""
    for sentence in re.split("[。；]", note.text) if note.products else ():
        limit = _LIMIT.fullmatch(sentence.strip())
        if limit is None or "数据类型" not in sentence or re.search("当|若|时|场景|模式", limit[1]):
            continue
        told = set(_dtypes(limit[3], f"note on {limit[1] or 'types'}"))
        named = set(re.findall(r"\w+", limit[1], re.ASCII)) & parameters.keys() or {note.below} - {""}
        for c_name in named or tuple(parameters):
            dtypes = dict(parameters[c_name].dtypes)
            for own in set(note.products or ()) & dtypes.keys():
                if limit[2] == "不":
                    kept = set(dtypes[own]) - told
                else:  # a note on all tensors is none on those without such types, such as indices
                    kept = told if named else told & set(dtypes[own]) or set(dtypes[own])
                dtypes[own] = tuple(dtype for dtype in DType if dtype in kept)
            parameters[c_name] = replace(parameters[c_name], dtypes=dtypes)


def _codes(section: str) -> Iterator[tuple[str, str, str]]:
    """Rows of the table of return codes, numbered from 1 for each code."""
    counts: Counter[str] = Counter()
    # Older pages have text in place of a table: "161001 is returned: 1. ... 2. ...".
    listed = re.findall(r"返回(\d{6}).*?[：:](.*?)(?=返回\d{6}|```|\Z)", section, re.DOTALL)
    rows = list(_coded(section)) or [
        (code, row) for code, rows in listed for row in re.split(r"\d+\. ", rows)
    ]
    for code, text in rows:
        if text.strip():
            counts[code] += 1
            yield f"return codes, {code}", f"row {counts[code]}", " ".join(text.split())


def _coded(section: str) -> Iterator[tuple[str, str]]:
    for table in _tables(section):
        for line, row in enumerate(table, start=1):
            code = next((i for i, cell in enumerate(row) if re.fullmatch(r"\d{6}", cell)), None)
            if code is not None:
                yield row[code], "".join(row[code + 1 : code + 2])
            elif "错误码" in table[0] and line > 1:
                raise ValueError(f"table of return codes, line {line}: found {row}; expected a code")


def _entries(section: str) -> Iterator[tuple[str, str, str]]:
    """The innermost list entries of the constraints, without tables in them."""
    html = BeautifulSoup(_MARKDOWN.render(section), "html.parser")
    outside = [entry for entry in html.find_all("li") if entry.find_parent("table") is None]
    for number, entry in enumerate((entry for entry in outside if entry.find("li") is None), start=1):
        texts = (text for text in entry.find_all(string=True) if text.find_parent("table") is None)
        yield "constraints", f"entry {number}", " ".join("".join(texts).split())


def _determinism(notes: Iterable[_Note]) -> str | None:
    for sentence in (s for note in notes if note.products != () for s in note.text.split("。")):
        if re.search("默认(支持|采用|为)?确定性", sentence):
            return "default"
        if re.search("不支持(该?算子)?确定性|默认非确定性.*不支持", sentence):
            return "no"
        if re.search("默认非确定性.*支持", sentence):
            return "option"
    return None
