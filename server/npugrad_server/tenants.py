"""The tenants file: which identities belong to which tenant, and each tenant's limits.

The file is applied as a whole or not at all: one with an error changes nothing. Changes apply to calls that
arrive afterwards, also on existing connections.
"""

from __future__ import annotations

import sys
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
from npugrad_server.watched_files import LOOK_INTERVAL_S, FileWatch, read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] - of pydantic-settings[toml]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

MAX_IDENTITY = 255
"""Longest identity, in characters."""
Identity = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=MAX_IDENTITY)]
"""A DNS name in lower case or a ``spiffe://`` URI of a certificate, what a gateway sends in its header, or
the Unix socket that a caller came by, such as ``unix:/run/npugrad.sock``."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class TenantsError(ValueError):
    """The tenants file cannot be used.

    Attributes:
        problems: One line per problem.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class TenantLimits(BaseModel):
    """Limits of a tenant.

    Attributes:
        max_priority: Highest priority of its calls; higher ones are lowered to it.
        max_queue_depth: Limit on calls that have not started, uploads included; None for no quota.
        max_inflight_bytes: Limit on bytes of operands and results until their memory is given back; None for
            no quota.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_priority: int = Field(default=PRIORITIES[-1], ge=PRIORITIES[0], le=PRIORITIES[-1])
    max_queue_depth: int | None = Field(default=None, ge=1)
    max_inflight_bytes: ByteSize | None = Field(default=None, ge=1)


class UnlistedTenants(TenantLimits):
    """Callers that no entry lists: each identity, or address if there is none, is a tenant of weight 1.

    Attributes:
        refuse: Whether their calls are refused.
    """

    refuse: bool = False


class TenantEntry(TenantLimits):
    """One tenant.

    Attributes:
        name: Its name in logs and metrics.
        identities: Identities of its callers.
        weight: Its share of the devices' time, relative to other tenants that have calls waiting.
    """

    name: Name
    identities: tuple[Identity, ...] = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0, le=1e6)


class TenantsFile(BaseModel):
    """The whole file.

    Attributes:
        gateways: Identities of gateways, which name a call's tenant in a header.
        unlisted: Rules for callers that no entry lists.
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
                taken = " (the name of unlisted callers in metrics)" if twice[0] == OTHERS else ""
                raise ValueError(f"found the {what} {twice[0]!r} twice{taken}; expected each once")
        return self


class TenantTable:
    """Maps callers to tenants, as of one reading of the file.

    Attributes:
        gateways: Identities of gateways.
        listed: Tenants by identity.
        remembered: Tenants found before, by what identifies a caller; see `rpc.identity`.
    """

    def __init__(self, file: TenantsFile | None = None) -> None:
        """Builds the table.

        Args:
            file: Contents of the file; None if there is none, and no caller is listed.
        """
        self._unlisted = file.unlisted if file is not None else UnlistedTenants()
        self.gateways = frozenset(file.gateways if file is not None else ())
        self.listed: dict[str, Tenant] = {}
        for entry in file.tenant if file is not None else ():
            tenant = _tenant(entry.name, entry, weight=entry.weight, shown=entry.name)
            self.listed.update(dict.fromkeys(entry.identities, tenant))
        self.remembered: dict[tuple[object, ...], Tenant] = {}

    def socket_problems(self, sockets: AbstractSet[str]) -> Iterator[str]:
        """What does not fit the Unix sockets that a server has."""
        there = ", ".join(sorted(sockets)) or "none"
        for name in self.listed.keys() | self.gateways:
            if name.startswith("unix:") and name not in sockets:
                yield f"found the identity {name!r}; expected one of the server's sockets: {there}"
        for name in sorted(sockets - self.listed.keys()) if self._unlisted.refuse else ():
            yield f"found no tenant with the identity {name!r}; expected one, as others are refused"

    def tenant(self, kind: str, *identities: str) -> Tenant:
        """The tenant of a caller with verified identities: the first one that is listed decides.

        Args:
            kind: Their kind, which is part of the name of a tenant that is not listed.
            identities: At least one.

        Raises:
            TenantRefused: None is listed, and unlisted callers are refused.
        """
        for identity in identities:
            if identity in self.listed:
                return self.listed[identity]
        return self.unlisted(f"{kind}:{identities[0]}")

    def arrived_by(self, socket: str) -> Tenant:
        """The tenant of callers of a Unix socket without other identities; errors as in `tenant`."""
        return self.listed.get(socket) or self.unlisted(socket)

    def unlisted(self, name: str) -> Tenant:
        """The tenant of an unlisted caller; errors as in `tenant`."""
        if self._unlisted.refuse:
            raise TenantRefused(f"tenant: found {name}, which is not listed; expected a listed identity")
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
        TenantsError: It cannot be read or is invalid; lists all problems.
    """
    return parse_tenants(path, _content(path))


def parse_tenants(path: str, content: bytes, sockets: frozenset[str] | None = None) -> TenantTable:
    """Builds the table from the file's contents, with a server's sockets; errors as in `read_tenants`."""
    try:
        table = TenantTable(TenantsFile.model_validate(tomllib.loads(content.decode())))
    except ValidationError as error:
        raise TenantsError(*_problems(path, error)) from None
    except ValueError as error:  # not TOML, or not text
        raise TenantsError(f"tenants: {path!r}: {error}") from None
    if problems := [] if sockets is None else list(table.socket_problems(sockets)):
        raise TenantsError(*(f"tenants: {path!r}: {problem}" for problem in problems))
    return table


def _content(path: str) -> bytes:
    try:
        return read_file(path)
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
    """The current table of tenants; the file is read again when it changes.

    Attributes:
        table: The one in use.
        looks: The checks of the file.
    """

    def __init__(
        self,
        path: str | None = None,
        look_interval_s: float = LOOK_INTERVAL_S,
        sockets: frozenset[str] | None = None,
    ) -> None:
        """Reads the file.

        Args:
            path: The file; None for none, so that no caller is listed.
            look_interval_s: Seconds between two checks of the file.
            sockets: The server's Unix sockets; None to leave those of the file unchecked.

        Raises:
            TenantsError: The file cannot be used.
        """
        self._path, self._sockets, self._log = path, sockets, get_logger()
        self._content = b"" if path is None else _content(path)
        self.table = TenantTable() if path is None else parse_tenants(path, self._content, sockets)
        self.looks = FileWatch(lambda: _look(path or ""), look_interval_s)
        self._told: tuple[str, ...] = ()

    async def watch(self) -> None:
        """Checks the file for changes until cancelled."""
        if self._path is None:
            return
        async for content, problems in self.looks.settled():
            if problems:
                self._keep(problems)
            elif content != self._content or self._told:
                self._take(self._path, content)

    def _take(self, path: str, content: bytes) -> None:
        try:
            table = parse_tenants(path, content, self._sockets)
        except TenantsError as error:
            self._keep(error.problems)
            return
        self._content, self.table, self._told = content, table, ()
        names = sorted({tenant.name for tenant in table.listed.values()})
        self._log.info("tenants swapped", tenants=names, gateways=sorted(table.gateways))

    def _keep(self, problems: tuple[str, ...]) -> None:
        """Logs once that the file cannot be used, and keeps the current table."""
        if problems != self._told:
            self._told = problems
            self._log.warning("tenants kept", problems=list(problems))


def _look(path: str) -> tuple[bytes, tuple[str, ...]]:
    try:
        return _content(path), ()
    except TenantsError as error:
        return b"", error.problems
