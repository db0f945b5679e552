"""The command `npugrad-server`: serve, check, preflight, ops, acceptance.

The options of `serve` and `check` are generated from the fields of `ServerSettings`. Exit status: 0 ok, 1
failed, 2 the command line or, for `serve`, a setting is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

import npugrad
from npugrad.ops import OPERATORS
from npugrad.products import Product
from npugrad_server import logs
from npugrad_server.app import serve as serve_until_ended
from npugrad_server.cluster import (
    PROFILES,
    ClusterError,
    ask_cluster,
    check_cluster,
    fitting_profile,
    read_cluster,
    request_of,
)
from npugrad_server.config import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    LoadedSettings,
    ServerSettings,
    SettingsError,
    load_settings,
)
from npugrad_server.start_checks import StartError, StartFinding
from npugrad_server.start_checks import check as check_all
from npugrad_server.worker.memory import keep_freed_memory, use_one_malloc_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic.fields import FieldInfo

    from npugrad.operator import OpRecord
    from npugrad_server.addresses import Address

FAILED, USAGE = 1, 2
_FILES = dict.fromkeys(("certificate", "key", "ca", "tenants"), "FILE")
_FILE_COLUMNS = 180
"""Width of a table written to a file or a pipe."""

app = typer.Typer(
    help="Run Ascend aclnn backward operators for hosts without an NPU.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line."""
    app(prog_name="npugrad-server")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"npugrad-server {npugrad.__version__}")
        raise typer.Exit


# ---------------------------------------------------------------- options from the settings model


def with_settings(command: Callable[[dict[str, Any], str | None], None]) -> Callable[..., None]:
    """Adds every setting as an option, and `--config`, to a command."""
    options = {name: _option(name, field) for name, field in ServerSettings.model_fields.items()}
    config = typer.Option(
        "--config", metavar="FILE", help=f"TOML file with settings. [env {CONFIG_VARIABLE}]"
    )
    parameters = [*options.values(), _parameter("config", str | None, config)]

    def run(**given: Any) -> None:
        config = given.pop("config")
        command(given, config)

    # Typer reads names, types and help from the signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    shown = "" if field.default is None else f"default {field.default if field.default != '' else 'empty'}, "
    text = f"{field.description} [{shown}env {ENV_PREFIX}{name.upper()}]"
    if field.annotation is bool:
        return _parameter(
            name, bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)
        )
    # Everything else stays text: the model converts and validates values from every source.
    return _parameter(name, str | None, typer.Option(flag, metavar=_metavar(name, field), help=text))


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[annotation, option])


def _metavar(name: str, field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    if name.endswith("_per_s"):
        return "BYTES/S"
    unit = name.rpartition("_")[2]
    units = {"s": "SECONDS", "bytes": "BYTES", "listen": "ADDR", "devices": "LIST", "header": "KEY", **_FILES}
    return units.get(unit, "N")


# --------------------------------------------------------------------------------------- commands


@app.command()
@with_settings
def serve(flags: dict[str, Any], config: str | None) -> None:
    """Serve until SIGTERM or SIGINT; prints "listening on ADDR" once it takes calls.

    SIGHUP makes it read the files of tenants and certificates again.
    """
    keep_freed_memory()
    use_one_malloc_arena()  # before the log's threads start
    loaded = _loaded(flags, config)
    close_log = logs.configure(loaded.settings.log_format, loaded.settings.log_level)
    try:
        with logs.relayed() as print_fd:
            code = asyncio.run(serve_until_ended(loaded, partial(_announce, loaded.settings), print_fd))
    except StartError as error:
        code = FAILED
        for problem in error.problems:
            typer.echo(f"npugrad-server: {problem}", err=True)
    finally:
        close_log()
    raise typer.Exit(code)


@app.command()
@with_settings
def check(flags: dict[str, Any], config: str | None) -> None:
    """Check everything that serve needs, without binding its ports, and list all problems."""
    findings: list[StartFinding] = []
    try:
        loaded = load_settings(flags, config)
        findings.append(StartFinding(True, "settings"))
    except SettingsError as error:
        loaded = error.usable
        findings += [StartFinding(False, f"settings: {problem}") for problem in error.problems]
    close_log = logs.configure(loaded.settings.log_format, "error")
    try:
        findings += asyncio.run(check_all(loaded.settings))
    finally:
        close_log()
    for finding in findings:
        typer.echo(f"{finding.label:<4}  {finding.text}")
    raise typer.Exit(0 if all(finding.ok for finding in findings) else FAILED)


@app.command()
def preflight(
    nodes: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Output of kubectl get nodes,pods,runtimeclasses -A -o json; - reads standard input. "
            "Default: ask the API server, from inside the cluster.",
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(metavar="|".join(PROFILES), help="Profile of the chart. Default: the one that fits."),
    ] = "",
    resource: Annotated[
        str,
        typer.Option(metavar="NAME", help="devices.resource of the chart, if it differs from the profile's."),
    ] = "",
    cards: Annotated[int, typer.Option(min=1, metavar="N", help="devices.count of the chart.")] = 1,
    chip: Annotated[str, typer.Option(metavar="CHIP", help="image.chip of the chart.")] = "910b",
    architecture: Annotated[
        str, typer.Option(metavar="amd64|arm64", help="Architecture of the image, if it has just one.")
    ] = "",
) -> None:
    """Report which chart profile fits a cluster, and whatever keeps the server off its nodes."""
    if profile not in ("", *PROFILES):
        raise typer.BadParameter(
            f"found {profile!r}; expected one of {', '.join(PROFILES)}", param_hint="--profile"
        )
    try:
        cluster = ask_cluster() if not nodes else read_cluster(_text_of(nodes))
        profile = profile or fitting_profile(cluster)
        request = request_of(profile, cards, chip, architecture)
        findings = check_cluster(cluster, profile, request, resource)
    except ClusterError as error:
        typer.echo(f"npugrad-server: {error}", err=True)
        raise typer.Exit(USAGE) from None
    for finding in findings:
        typer.echo(f"{finding.label:<4}  {finding.text}" + (f" -> {finding.cure}" if finding.cure else ""))
    raise typer.Exit(FAILED if any(finding.label == "fail" for finding in findings) else 0)


def _text_of(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file}: found {error}; expected the output of kubectl") from None


@app.command()
def ops() -> None:
    """List the operators and the dtypes of their inputs on each product."""
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS, highlight=False)
    for record in OPERATORS.values():
        # Operator names are long: as rows of a single table, they would not fit an 80-column terminal.
        table = Table.grid(Column(no_wrap=True), Column(), Column(), padding=(0, 2))
        for product in Product:
            for row in _dtype_rows(record, product):
                table.add_row(*row)
        console.print(f"{record.name} ({record.aclnn_name})", style="bold", soft_wrap=True)
        console.print(Padding.indent(table, 2))


@app.command()
def acceptance(
    device: Annotated[str, typer.Option(metavar="N", help="NPU, as a number or by name: npu:N.")] = "0",
    report: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON report to write. An HTML page (.html) and the workers' output (.log) go next to it.",
        ),
    ] = Path("acceptance.json"),
    steps: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers or names of the steps to run, such as 1,3,soak.")
    ] = "",
    soak_s: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Length of the soak.")] = 600.0,
    product: Annotated[
        str, typer.Option(metavar="auto|" + "|".join(Product), help="Product; auto asks the NPU.")
    ] = "auto",
    streams: Annotated[
        int, typer.Option(min=1, max=16, metavar="N", help="Calls that run at once on the NPU.")
    ] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what takes long: a first look in less than 3 minutes.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar.gz",
            help="One file to send if something fails: report, logs, versions, environment, failing data.",
        ),
    ] = None,
    step_limit_s: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", help="Time limit of each step; the soak's is longer by its length."
        ),
    ] = 1800.0,
    show_steps: Annotated[bool, typer.Option("--list", help="List the steps and exit.")] = False,
) -> None:
    """Verify that the service computes correctly on a node with NPUs: one report, exit code 0 or 1.

    Use an otherwise idle NPU: one step takes all of its memory. Most of the time goes
    to the soak and to the float64 references on the host.
    """
    # Imported late: they take a fifth of a server's total import time.
    from npugrad_server.acceptance.bundle import SUFFIXES
    from npugrad_server.acceptance.command import AcceptanceOptions, accept
    from npugrad_server.acceptance.steps import STEPS, select_steps

    if show_steps:
        for step in STEPS:
            typer.echo(f"{step.number:2}  {step.key:<12} {step.title}\n    {step.about}")
        return
    number = device.removeprefix("npu:")
    if not (number.isascii() and number.isdigit()):
        raise typer.BadParameter(
            f"found {device!r}; expected a number such as 0, or npu:0", param_hint="'--device'"
        )
    if product not in ("auto", *Product):
        raise typer.BadParameter(
            f"found {product!r}; expected auto, {', '.join(Product)}", param_hint="'--product'"
        )
    if bundle is not None and not bundle.name.endswith(SUFFIXES):
        raise typer.BadParameter(
            f"found {bundle.name!r}; expected a name that ends with {' or '.join(SUFFIXES)}",
            param_hint="'--bundle'",
        )
    try:
        plan = select_steps(steps, quick=quick, soak_s=soak_s)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--steps'") from None
    options = AcceptanceOptions(
        int(number),
        report,
        plan.steps,
        plan.soak_s,
        product,
        streams,
        step_limit_s,
        quick,
        bundle,
        plan.left_out,
    )
    try:
        code = 0 if accept(options) else FAILED
    except (OSError, KeyboardInterrupt) as error:
        code = FAILED
        typer.echo(f"npugrad-server: {error}", err=True)
    raise typer.Exit(code)


def _announce(settings: ServerSettings, address: Address) -> None:
    if settings.tls != "off":
        signed = f"a certificate signed by an authority in {settings.tls_client_ca}"
        ask = signed if settings.tls == "mutual" else "no certificate"
        print(f"TLS is on; callers need {ask}")
    print(f"listening on {address}", flush=True)


def _loaded(flags: dict[str, Any], config: str | None) -> LoadedSettings:
    try:
        return load_settings(flags, config)
    except SettingsError as error:
        for problem in error.problems:
            typer.echo(f"npugrad-server: {problem}", err=True)
        raise typer.Exit(USAGE) from None


def _dtype_rows(record: OpRecord, product: Product) -> Iterator[tuple[str, str, str]]:
    """Rows of product, dtypes and the inputs that take them; only the first row names the product."""
    if product not in record.products:
        yield str(product), "not available", ""
        return
    groups: dict[str, list[str]] = {}
    for param in record.inputs:
        groups.setdefault(", ".join(map(str, param.dtypes[product])), []).append(param.name)
    for index, (dtypes, names) in enumerate(groups.items()):
        inputs = "all inputs" if len(groups) == 1 else ", ".join(names)
        yield "" if index else str(product), dtypes, inputs
