"""The command line `npugrad`. Exit status: 0 all is well, 1 failed, 2 wrong usage."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

import npugrad
from npugrad import OPERATORS, NpugradError, TensorMeta, layout
from npugrad_client import Client
from npugrad_client._cli import files, show
from npugrad_client._cli.explain import UnknownSubject
from npugrad_client._cli.explain import explain as print_explanation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.spec import OpSpec

app = typer.Typer(
    name="npugrad",
    help="Ascend backward operators as a service: call, validate, explain, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Target = Annotated[
    str, typer.Option(envvar="NPUGRAD_TARGET", help="Server: host:port, unix:path or dns:///name:port.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Deadline of the call in seconds.")]
Attr = Annotated[
    list[str] | None, typer.Option("--attr", help="NAME=VALUE; lists as true,false; may be repeated.")
]
OperatorName = Annotated[str, typer.Argument(metavar="OPERATOR", help="Such as group_norm_backward.")]

DEFAULT_TARGET = "127.0.0.1:50051"


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"npugrad {npugrad.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def _fail(message: str, status: int = 1) -> NoReturn:
    err.print(message, soft_wrap=True, markup=False)
    raise typer.Exit(status)


@contextmanager
def _reporting() -> Iterator[None]:
    """Turns errors that a user can act on into one line and a status."""
    try:
        yield
    except (files.FileError, UnknownSubject) as error:
        _fail(str(error), 2)
    except NpugradError as error:
        number = f" {getattr(error, 'code', None) or ''}".rstrip()
        request = f" (request {error.request_id})" if error.request_id else ""
        _fail(f"{error.reason}{number}: {error}{request}")
    except TypeError as error:
        _fail(str(error), 2)


def _spec(name: str) -> OpSpec:
    return npugrad.get_operator(name)


@app.command()
def info(target: Target = DEFAULT_TARGET, timeout: Timeout = 10.0, as_json: Json = False) -> None:
    """Show a server: version, product, devices, limits."""
    with _reporting(), Client(target, timeout_s=timeout) as client:
        found = client.server_info()
        if as_json:
            out.print_json(json.dumps(asdict(found)))
        else:
            show.server(out, target, found)


@app.command()
def ops(
    target: Target = DEFAULT_TARGET,
    product: Annotated[
        str | None, typer.Option(help="Product to describe; the server's own by default.")
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the operators of a server."""
    with _reporting(), Client(target, timeout_s=timeout) as client:
        listed = client.list_operators(product)
        if as_json:
            out.print_json(json.dumps([asdict(o) for o in listed]))
        else:
            show.operators(out, listed)


_META = re.compile(r"(?P<dtype>[a-z0-9_]+)\[(?P<shape>[-0-9, ]*)\]")


def _metas(texts: list[str]) -> dict[str, TensorMeta | None]:
    metas: dict[str, TensorMeta | None] = {}
    for text in texts:
        name, _, value = text.partition("=")
        match = _META.fullmatch(value.strip())
        if value.strip() == "null":
            metas[name] = None
        elif match:
            try:
                metas[name] = TensorMeta(
                    match["dtype"], [int(s) for s in match["shape"].split(",") if s.strip()]
                )
            except ValueError as error:
                raise files.FileError(f"{name}: {error}") from None
        else:
            raise files.FileError(
                f"found {text!r}; expected NAME=DTYPE[SIZES], such as grad_out=float32[2,3,4]"
            )
    return metas


@app.command()
def validate(
    operator: OperatorName,
    file: Annotated[Path | None, typer.Argument(help=".npz file with operands and attributes.")] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", help="NAME=DTYPE[SIZES] or NAME=null, instead of or above a file."),
    ] = None,
    output: Annotated[list[str] | None, typer.Option("--output", help="Declared output, as --meta.")] = None,
    attr: Attr = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="NAME=bfloat16 for raw 2-byte arrays.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Validate here, without a server.")] = False,
    product: Annotated[
        str | None, typer.Option(help="Product; the server's own, or atlas-a2 with --local.")
    ] = None,
    target: Target = DEFAULT_TARGET,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Tell every documented constraint that a call breaks; no data travels."""
    with _reporting():
        spec = _spec(operator)
        inputs: dict[str, TensorMeta | None] = {}
        attrs: dict[str, Any] = {}
        if file is not None:
            operands, attrs = files.read_call(spec, file, dtypes=dtype or ())
            inputs = {n: None if a is None else layout.content(a)[0] for n, a in operands.items()}
        attrs |= files.parse_attrs(spec, attr or [])
        call: dict[str, Any] = {
            "inputs": inputs | _metas(meta or []),
            "attrs": attrs,
            "outputs": _metas(output or []),
        }
        if local:
            verdict = npugrad.validate(operator, **call, product=product or "atlas-a2")
        else:
            with Client(target, timeout_s=timeout) as client:
                verdict = client.validate(operator, **call, product=product)
        if as_json:
            outputs = {n: None if m is None else str(m) for n, m in verdict.outputs.items()}
            violations = [asdict(v) for v in verdict.violations]
            out.print_json(
                json.dumps({"status": verdict.status, "violations": violations, "outputs": outputs})
            )
        else:
            show.verdict(out, spec.name, verdict)
    raise typer.Exit(1 if verdict.status else 0)


@app.command()
def call(
    operator: OperatorName,
    file: Annotated[Path, typer.Argument(help=".npz file with operands and attributes.")],
    output: Annotated[Path, typer.Option("--output", "-o", help=".npz file for the results.")],
    attr: Attr = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="NAME=bfloat16 for raw 2-byte arrays.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Ask for order-independent results.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Have the server check against the reference.")
    ] = False,
    target: Target = DEFAULT_TARGET,
    timeout: Timeout = 600.0,
) -> None:
    """Run an operator on the operands of a file and write the results to another."""
    with _reporting(), Client(target, timeout_s=timeout) as client:
        spec = _spec(operator)
        operands, attrs = files.read_call(spec, file, attr or (), dtype or ())
        answer = getattr(client, spec.name)(**operands, **attrs, deterministic=deterministic, verify=verify)
        results = {p.name: getattr(answer, p.name) for p in spec.outputs}
        files.write_results(output, results)
        show.results(out, results, answer.info)
        out.print(f"written to {output}", soft_wrap=True)


@app.command()
def explain(
    subject: Annotated[str, typer.Argument(help="An aclnn number, a reason, an operator or a constraint.")],
    constraint: Annotated[str | None, typer.Argument(help="One constraint of the operator.")] = None,
) -> None:
    """Print what the documents say; needs no server."""
    with _reporting():
        print_explanation(out, subject, constraint)


@app.command()
def demo(
    target: Annotated[str | None, typer.Option(help="A running server; by default one is started.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the picture.")] = Path("build/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the largest shapes.")] = False,
) -> None:
    """Run the main job: every operator on real input, checked against the reference."""
    from npugrad_client.demo import run_demo  # here, because it needs the extra `demo`

    with _reporting():
        raise typer.Exit(run_demo(target, folder, quick))


@app.command()
def bench(
    operator: Annotated[str, typer.Option(help=f"One of {', '.join(OPERATORS)}.")] = "group_norm_backward",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Calls in flight.")] = 1,
    duration: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds to measure.")] = 10.0,
    calls: Annotated[int, typer.Option(min=1, help="Stop after this many calls.")] = 10_000_000,
    size: Annotated[str, typer.Option(help="small, medium or large.")] = "small",
    dtype: Annotated[str, typer.Option(help="Element type.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    target: Target = DEFAULT_TARGET,
    timeout: Timeout = 60.0,
) -> None:
    """Measure a server: closed loop, a fixed number of calls in flight."""
    from npugrad_client._cli import bench as loop  # here, because it needs the extra `bench`

    with _reporting():
        plan = loop.make_plan(operator, dtype, size, concurrency, duration, calls)
        report = loop.measure(plan, target, timeout)
        loop.show(out, report)
        if json_file is not None:
            json_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report.succeeded else 1)


def main() -> None:
    """Entry point of the command `npugrad`."""
    app()


if __name__ == "__main__":
    main()
