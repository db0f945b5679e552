"""The file of tenants: which identities are whose, and what each tenant may have.

It is read whole, or not at all: one that is wrong somewhere changes nothing. What it says of a tenant holds
for calls that arrive from then on, on connections that were there before, too.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from npugrad.call import PRIORITIES
from npugrad.errors import TenantRefused
from npugrad_server.logs import get_logger
from npugrad_server.pool.tenant import OTHERS, Tenant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] - of pydantic-settings[toml]

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK_INTERVAL_S = 1.0
"""How often the file is looked at. One that changed is taken when it is the same at the next look, so that a
file that is being written is not taken for a whole one."""

MAX_IDENTITY = 255
"""Characters of an identity."""
Identity = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=MAX_IDENTITY)]
"""A DNS name, in lower case, or ``spiffe://`` URI of a certificate, or what a gateway says in its header."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class TenantsError(ValueError):
    """The file of tenants cannot be used.

    Attributes:
        problems: One line for each thing that is wrong.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class TenantLimits(BaseModel):
    """What a tenant may have at once.

    Attributes:
        max_priority: What higher priorities of its calls are lowered to.
        max_queue_depth: Its calls that have not started, uploads included; None for no quota.
        max_inflight_bytes: Operands and results of its calls, until the memory is given back; None likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_priority: int = Field(default=PRIORITIES[-1], ge=PRIORITIES[0], le=PRIORITIES[-1])
    max_queue_depth: int | None = Field(default=None, ge=1)
    max_inflight_bytes: ByteSize | None = Field(default=None, ge=1)


class UnlistedTenants(TenantLimits):
    """Callers in no entry: each identity, or address where there is none, is a tenant of weight 1.

    Attributes:
        refuse: Whether their calls are refused.
    """

    refuse: bool = False


class TenantEntry(TenantLimits):
    """One tenant.

    Attributes:
        name: Its name in logs and metrics.
        identities: Who its callers are.
        weight: Its share of the devices' time, relative to those of others that have calls waiting.
    """

    name: Name
    identities: tuple[Identity, ...] = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0, le=1e6)


class TenantsFile(BaseModel):
    """The whole file.

    Attributes:
        gateways: Identities of gateways, which say in a header whose call it is.
        unlisted: What holds for callers in no entry.
        tenant: The entries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    gateways: tuple[Identity, ...] = ()
    unlisted: UnlistedTenants = UnlistedTenants()
    tenant: tuple[TenantEntry, ...] = ()

    @model_validator(mode="after")
    def _nothing_stands_twice(self) -> TenantsFile:
        if not self.tenant:
            raise ValueError("found no [[tenant]]; expected at least one")
        names = [OTHERS, *(entry.name for entry in self.tenant)]
        identities = [*self.gateways, *(name for entry in self.tenant for name in entry.identities)]
        for what, found in (("name", names), ("identity", identities)):
            if twice := sorted({name for name in found if found.count(name) > 1}):
                taken = " (metrics call those in no entry so)" if twice[0] == OTHERS else ""
                raise ValueError(f"found the {what} {twice[0]!r} twice{taken}; expected each once")
        return self


class TenantTable:
    """Who is which tenant, as one reading of the file has it.

    Attributes:
        gateways: Identities of gateways.
        listed: Tenants by identity.
        remembered: Those that were found before, by what tells a caller; see `rpc.identity`.
    """

    def __init__(self, file: TenantsFile | None = None) -> None:
        """Makes it.

        Args:
            file: What the file holds; None where there is none, and every caller is in no entry.
        """
        self._unlisted = file.unlisted if file is not None else UnlistedTenants()
        self.gateways = frozenset(file.gateways if file is not None else ())
        self.listed: dict[str, Tenant] = {}
        for entry in file.tenant if file is not None else ():
            tenant = _tenant(entry.name, entry, weight=entry.weight, shown=entry.name)
            self.listed.update(dict.fromkeys(entry.identities, tenant))
        self.remembered: dict[tuple[object, ...], Tenant] = {}

    def tenant(self, kind: str, *identities: str) -> Tenant:
        """The tenant of a caller with identities that were verified: the first one that is listed decides.

        Args:
            kind: What they are, which is part of the name of a tenant in no entry.
            identities: At least one.

        Raises:
            TenantRefused: None is listed, and callers in no entry are refused.
        """
        for identity in identities:
            if identity in self.listed:
                return self.listed[identity]
        return self.unlisted(f"{kind}:{identities[0]}")

    def unlisted(self, name: str) -> Tenant:
        """The tenant of a caller in no entry; errors as of `tenant`."""
        if self._unlisted.refuse:
            raise TenantRefused(f"tenant: found {name}, which is in no entry; expected a listed identity")
        return _tenant(name, self._unlisted)


def _tenant(name: str, limits: TenantLimits, *, weight: float = 1.0, shown: str = "") -> Tenant:
    return Tenant(
        name,
        weight,
        max_priority=limits.max_priority,
        max_queue_depth=limits.max_queue_depth,
        max_inflight_bytes=limits.max_inflight_bytes,
        **({"shown": shown} if shown else {}),
    )


def read_tenants(path: str) -> TenantTable:
    """Reads the file.

    Raises:
        TenantsError: It cannot be read, or something in it is wrong; all of it at once.
    """
    return parse_tenants(path, _content(path))


def parse_tenants(path: str, content: bytes) -> TenantTable:
    """Makes the table of what the file holds; errors as of `read_tenants`."""
    try:
        return TenantTable(TenantsFile.model_validate(tomllib.loads(content.decode())))
    except ValidationError as error:
        raise TenantsError(*_problems(path, error)) from None
    except ValueError as error:  # no TOML, or no text
        raise TenantsError(f"tenants: {path!r}: {error}") from None


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TenantsError(f"tenants: cannot read {path!r}: {error.strerror}") from None


def _problems(path: str, error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        message = detail["msg"].removeprefix("Value error, ")
        where = ".".join(str(part) for part in detail["loc"])
        if not message.startswith("found "):
            message = f"found {str(detail['input'])[:80]!r}; {message}"
        yield f"tenants: {path!r}: {where + ': ' if where else ''}{message}"


class LiveTenants:
    """The table of tenants in use; a file that changes is read again.

    The file's contents are compared, so that it does not matter how a change came about, by a rename, by the
    swap of a symbolic link above it, as Kubernetes does it, or by writing into the file.

    Attributes:
        table: The one in use.
        look_count: How often the file was looked at since the start.
    """

    def __init__(self, path: str | None = None, look_interval_s: float = LOOK_INTERVAL_S) -> None:
        """Reads the file.

        Args:
            path: The file; None for none, where every caller is in no entry.
            look_interval_s: Seconds from one look at it to the next.

        Raises:
            TenantsError: It cannot be used.
        """
        self._path, self._look_interval_s, self._log = path, look_interval_s, get_logger()
        self._content = b"" if path is None else _content(path)
        self.table = TenantTable() if path is None else parse_tenants(path, self._content)
        self.look_count = 0
        self._told: tuple[str, ...] = ()

    async def watch(self) -> None:
        """Looks at the file until it is cancelled."""
        seen: bytes | TenantsError = self._content
        while self._path is not None:
            await asyncio.sleep(self._look_interval_s)
            found = await asyncio.to_thread(_look, self._path)
            if isinstance(found, TenantsError):
                self._keep(found)
            elif found == seen and (found != self._content or self._told):
                self._take(self._path, found)
            seen = found
            self.look_count += 1

    def _take(self, path: str, content: bytes) -> None:
        try:
            table = parse_tenants(path, content)
        except TenantsError as error:
            self._keep(error)
            return
        self._content, self.table, self._told = content, table, ()
        names = sorted({tenant.name for tenant in table.listed.values()})
        self._log.info("tenants swapped", tenants=names, gateways=sorted(table.gateways))

    def _keep(self, error: TenantsError) -> None:
        """The file cannot be used: says so once, and goes on with the table there is."""
        if error.problems != self._told:
            self._told = error.problems
            self._log.warning("tenants kept", problems=list(error.problems))


def _look(path: str) -> bytes | TenantsError:
    try:
        return _content(path)
    except TenantsError as error:
        return error
