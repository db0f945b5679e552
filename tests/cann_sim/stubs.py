"""The C++ of operators that have a page but no source here: both phases, generated from the page's facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.pages import RELEASES, Facts, ParameterFacts, load

from npugrad.products import Product
from npugrad.releases import CannRelease

_PRODUCTS = {
    Product.ATLAS_TRAINING: "Training",
    Product.ATLAS_A2: "A2",
    Product.ATLAS_A3: "A3",
}
"""Names in C++, in the order of the enumeration there."""
_PLAIN = {
    **dict.fromkeys(("int64", "int32", "int8"), "integer"),
    "uint64": "natural",
    **dict.fromkeys(("double", "float"), "real"),
    "bool": "boolean",
}
_POINTERS = {
    "int64_array": "int_array",
    "float_array": "float_array",
    "bool_array": "bool_array",
    "scalar": "scalar",
    "string": "text",
}
"""Functions of PhaseOne by kind of attribute."""
_DETERMINISM = {"default": "Always", "option": "Option", "no": "Never", None: "Option"}
_MASK = "outputMask"
_ANY_RANK = (0, 2**31 - 1)
_BEGINNING = """// In libopapi_{library}.
#include "nnopbase/stub.h"

using namespace cann_sim;
"""
_PHASES = """
extern "C" int {name}GetWorkspaceSize({prototype}, uint64_t* workspaceSize, aclOpExecutor** executor) {{
  Stub stub("{name}", {{{products}}}, Determinism::{determinism});
{arguments}
  return stub.finish(workspaceSize, executor);
}}

extern "C" int {name}(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {{
  return launch("{name}", workspace, size, executor, stream);
}}
"""


def pages_of(cann: str) -> Mapping[str, Facts]:
    """Facts of the newest release with pages that is not newer; of the oldest if all are."""
    release = CannRelease.parse(cann)
    older = [each for each in RELEASES if CannRelease.parse(each) <= release]
    return load((older or RELEASES)[-1 if older else 0])


def write(pages: Iterable[Facts], folder: Path) -> list[Path]:
    """Writes a source for each library; returns their paths."""
    libraries: dict[str, str] = {}
    for page in pages:
        library = page.repository.removeprefix("ops-")
        libraries[library] = libraries.get(library, _BEGINNING.format(library=library)) + phases(page)
    folder.mkdir(parents=True, exist_ok=True)
    for library, text in libraries.items():
        (folder / f"{library}.cpp").write_text(text)
    return [folder / f"{library}.cpp" for library in libraries]


def phases(page: Facts) -> str:
    """Both phases of an operator."""
    return _PHASES.format(
        name=page.name,
        prototype=page.prototype,
        products=", ".join(f"Product::{_PRODUCTS[product]}" for product in page.products),
        determinism=_DETERMINISM[page.determinism],
        arguments="\n".join(f"  {_argument(param)};" for param in page.params),
    )


def _argument(param: ParameterFacts) -> str:
    name = param.c_name
    passed = f'"{name}", {name}'
    if param.type == "tensor":
        return f"stub.{'result' if param.output else 'operand'}({passed}, {_table(param)})"
    if param.type in _PLAIN:
        return f"stub.{_PLAIN[param.type]}({passed})"
    taken = f"stub.{_POINTERS[param.type]}({passed})"
    if name == _MASK:
        taken = f"stub.masks({taken})"
    return taken if param.optional else f'stub.given("{name}", {name}), {taken}'


def _table(param: ParameterFacts) -> str:
    dtypes = (
        "{" + ", ".join(str(dtype.acl) for dtype in param.dtypes.get(product, ())) + "}"
        for product in _PRODUCTS
    )
    low, high = param.ranks or _ANY_RANK
    return f"{{{str(param.optional).lower()}, {{{', '.join(dtypes)}}}, {low}, {high}}}"
