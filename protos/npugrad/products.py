"""Product families, spelled as in the vendor's documents."""

from __future__ import annotations

from enum import Enum


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
        ValueError: There is no such product; the message lists all names.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown product {name!r}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


# Longer prefixes first. Chips of a later generation, of which no document kept here speaks, fit none.
_SOC_PREFIXES: tuple[tuple[str, Product | None], ...] = (
    ("Ascend910B", Product.ATLAS_A2),
    ("Ascend910_93", Product.ATLAS_A3),
    ("Ascend910_95", None),
    ("Ascend910", Product.ATLAS_TRAINING),
)


def product_from_soc(name: str) -> Product | None:
    """The product of a chip such as ``"Ascend910B2"``; None when the documents know none."""
    return next((product for prefix, product in _SOC_PREFIXES if name.startswith(prefix)), None)


def product_from_wire(number: int) -> Product | None:
    """The product with this number in `npugrad.v1.Product`; None if there is none."""
    return _BY_WIRE.get(number)
