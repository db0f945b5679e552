"""Product families, spelled as in the vendor's documents."""

from __future__ import annotations

import re
from enum import Enum

from npugrad.errors import WrongValue


class Product(str, Enum):
    """A product family; compares equal to its name, such as ``"atlas-a2"``.

    Attributes:
        wire: Number in `npugrad.v1.Product`.
        full_name: Name in the vendor's documents, in English.
    """

    wire: int
    full_name: str

    def __new__(cls, name: str, wire: int, full_name: str) -> Product:
        """Builds one row of the table."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.wire, member.full_name = wire, full_name
        return member

    ATLAS_TRAINING = ("atlas-training", 1, "Atlas training series")
    ATLAS_A2 = ("atlas-a2", 2, "Atlas A2 training series / Atlas 800I A2 inference products")
    ATLAS_A3 = ("atlas-a3", 3, "Atlas A3 training series / Atlas A3 inference series")

    def __str__(self) -> str:
        """The name."""
        return str(self.value)


_BY_WIRE: dict[int, Product] = {p.wire: p for p in Product}
_BY_NAME: dict[str, Product] = {p.value: p for p in Product}


def product_from_name(name: Product | str) -> Product:
    """Finds a product by its name.

    Raises:
        WrongValue: Unknown product; the message lists all names.
    """
    if name not in _BY_NAME:
        raise WrongValue(f"unknown product {name!r}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


# Exact names, as in CANN's and torch_npu's own tables: a bare Ascend910B is of the first generation, while
# Ascend910B1 to B4-1 are Atlas A2.
_CHIPS: dict[str, Product] = {
    **dict.fromkeys(
        ("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
        Product.ATLAS_TRAINING,
    ),
    **dict.fromkeys(
        ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
        Product.ATLAS_A2,
    ),
}
_ATLAS_A3_CHIP = re.compile(r"Ascend910_93\d\d")
# Older releases of CANN call them Ascend910_95xx.
_ASCEND_950_CHIP = re.compile(r"Ascend(910_95|950)\w*")


def product_from_soc(name: str) -> Product | None:
    """The product of a chip such as ``"Ascend910B2"``; None if it belongs to no supported product."""
    return Product.ATLAS_A3 if _ATLAS_A3_CHIP.fullmatch(name) else _CHIPS.get(name)


def chip_kind(name: str) -> str:
    """Describes a chip for messages: ``"atlas-a2"``, or why it belongs to no supported product."""
    product = product_from_soc(name)
    if product is not None:
        return str(product)
    if _ASCEND_950_CHIP.fullmatch(name):
        return "of the Ascend 950 family, which is not supported"
    return "of no known product"


def product_from_wire(number: int) -> Product | None:
    """The product with this number in `npugrad.v1.Product`; None if there is none."""
    return _BY_WIRE.get(number)
