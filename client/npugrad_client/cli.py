"""The command line `npugrad`. Exit status: 0 all is well, 1 failed, 2 wrong usage."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import npugrad
from npugrad.ops import OPERATORS
from npugrad_client._cli import advise, bench, completion
from npugrad_client._cli.connection import (
    AT_ONCE,
    DEFAULT_TARGETS,
    Authority,
    Certificate,
    Encrypted,
    Key,
    Targets,
    addresses,
    connect,
    refuse_tls_without_target,
    tls,
)
from npugrad_client._cli.terminal import (
    CannOption,
    FileError,
    Timeout,
    cann_release,
    fail,
    find_record,
    out,
    product_named,
    reporting,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from npugrad.meta import TensorMeta
    from npugrad.operator import OpRecord

app = typer.Typer(
    name="npugrad",
    help="Ascend backward operators as a service: call, validate, explain, measure.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command(context_settings=advise.CONTEXT)(advise.advise)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Attr = Annotated[
    list[str] | None,
    typer.Option(
        "--attr",
        metavar="NAME=VALUE",
        help="Attribute; overrides the file. Lists as true,false, scalars as float32:0.5.",
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="NAME=bfloat16", help="Operand whose 2-byte elements are bfloat16."),
]
OperatorName = Annotated[
    str,
    typer.Argument(
        metavar="OPERATOR",
        help=f"One of {', '.join(OPERATORS)}.",
        show_default=False,
        autocompletion=completion.operators,
    ),
]
_PROGRESS_FROM_BYTES = 16 * 2**20
_META_FORM = "NAME=DTYPE[SIZES]"


def _version(wanted: bool) -> None:
    if wanted:
        out().print(f"npugrad {npugrad.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def info(
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """Show a server: version, product, devices, limits."""
    how = (encrypted, tls_ca, tls_certificate, tls_key)
    with reporting(), connect(target, timeout, tls(*how), AT_ONCE) as client:
        from npugrad_client._cli import show

        found = client.server_info()
        if as_json:
            out().print_json(json.dumps(asdict(found)))
        else:
            show.server(out(), client.target, found)


@app.command()
def ops(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="[OPERATOR]",
            help="Show only this one, in full.",
            show_default=False,
            autocompletion=completion.operators,
        ),
    ] = "",
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    product: Annotated[
        str | None,
        typer.Option(help="Product to describe. Default: the server's.", autocompletion=completion.products),
    ] = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List the operators of a server, or show one in full."""
    how = (encrypted, tls_ca, tls_certificate, tls_key)
    with reporting(), connect(target, timeout, tls(*how), AT_ONCE) as client:
        from npugrad_client._cli import show

        wanted = find_record(operator).name if operator else ""
        listed = tuple(o for o in client.list_operators(product_named(product)) if wanted in ("", o.name))
        if as_json:
            out().print_json(json.dumps([asdict(o) for o in listed]))
        elif wanted:
            show.operator(out(), listed[0], product or "the server's product")
        else:
            show.operators(out(), listed, product or "the server's product")


@app.command()
def validate(
    operator: OperatorName,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=".npz file with operands and attributes.")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", metavar=_META_FORM, help="Operand; overrides the file. NAME=null for none."),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option("--output", metavar=_META_FORM, help="Declared output. NAME=null for none."),
    ] = None,
    attr: Attr = None,
    dtype: Dtype = None,
    local: Annotated[bool, typer.Option("--local", help="Validate here, without a server.")] = False,
    product: Annotated[
        str | None,
        typer.Option(
            help="Product. Default: the server's, or atlas-a2 with --local.",
            autocompletion=completion.products,
        ),
    ] = None,
    cann: CannOption = None,
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    timeout: Timeout = 10.0,
    as_json: Json = False,
) -> None:
    """List every documented constraint that a call violates; no data is sent.

    Levels of deformable attention in FILE are checked, too, and refused as a call with them is.

    Exit status 0: the call is legal
    Exit status 1: it is not, or the server failed
    Exit status 2: wrong usage
    """
    with reporting():
        record, chosen = find_record(operator), product_named(product)
        from npugrad_client._cli import json_answers, show
        from npugrad_client._info import Validation

        asked = _described(record, file, meta or (), output or (), attr or (), dtype or ())
        if local:
            verdict = Validation(operator, **asked, product=chosen).local(cann_release(cann))
        elif cann is not None:
            raise FileError("--cann: found it without --local; expected both: a server has its own release")
        else:
            how = tls(encrypted, tls_ca, tls_certificate, tls_key)
            with connect(target, timeout, how, AT_ONCE) as client:
                verdict = client.validate(operator, **asked, product=chosen)
        if as_json:
            out().print_json(json.dumps(json_answers.verdict(verdict)))
        else:
            show.verdict(out(), record.name, verdict)
    raise typer.Exit(1 if verdict.status else 0)


def _described(
    record: OpRecord,
    file: Path | None,
    meta: Sequence[str],
    output: Sequence[str],
    attr: Sequence[str],
    dtype: Sequence[str],
) -> dict[str, Any]:
    """Inputs, attributes and outputs of a call to validate, from a file and flags."""
    from npugrad.attributes import KINDS
    from npugrad_client._cli import files

    inputs: dict[str, npt.NDArray[Any] | TensorMeta | None] = {}
    attrs: dict[str, Any] = {p.name: None for p in record.attrs if KINDS[p.type].is_pointer}
    if file is not None:
        operands, found = files.read_call(record, file, dtype)
        inputs |= operands
        attrs |= found
    inputs |= files.parse_metas(meta)
    attrs |= files.parse_attrs(record, attr)
    outputs = files.parse_metas(output)
    files.check_complete(record, attrs)
    return {"inputs": inputs, "attrs": attrs, "outputs": outputs}


@app.command()
def call(
    operator: OperatorName,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help=".npz file with operands and attributes.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=".npz file for the results. Default: only shapes and norms."),
    ] = None,
    attr: Attr = None,
    dtype: Dtype = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Ask for bitwise reproducible results.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Have the server check the results against the reference.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Print where the time of the call went.")
    ] = False,
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    timeout: Timeout = 600.0,
    progress: Annotated[
        bool | None,
        typer.Option(help="Show bytes, rate and time left on a terminal. Default: from 16 MiB on."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run an operator on the operands of a file, show the results' shapes and norms, and write them.

    The keys of a file are names of operands and attributes; a missing operand is null.

    NumPy's files have no bfloat16: a key such as input:bfloat16 holds the bits as uint16.
    """
    how = (encrypted, tls_ca, tls_certificate, tls_key)
    with reporting(), connect(target, timeout, tls(*how)) as client:
        from npugrad_client._cli import files, json_answers, show

        record, path = find_record(operator), files.results_path(output) if output else None
        operands, attrs = files.read_call(record, file, dtype or ())
        attrs |= files.parse_attrs(record, attr or ())
        files.check_complete(record, attrs)
        if progress is None:
            progress = sum(array.nbytes for array in operands.values()) >= _PROGRESS_FROM_BYTES
        answer = getattr(client, record.name)(
            **operands, **attrs, deterministic=deterministic, verify=verify, progress=progress
        )
        results = {p.name: getattr(answer, p.name) for p in record.outputs}
        if path is not None:
            files.write_results(path, results)
        if as_json:
            answered = json_answers.call(path, results, answer.info, with_timeline=timeline)
            out().print_json(json.dumps(answered))
            return
        show.results(out(), results, answer.info)
        if timeline:
            out().print(str(answer.info.timeline), markup=False, highlight=False, soft_wrap=True)
        if path is not None:
            out().print(f"written to {path}", soft_wrap=True)


@app.command()
def explain(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            show_default=False,
            help="A number such as 161002, a reason such as QUEUE_FULL, an operator or a constraint.",
            autocompletion=completion.subjects,
        ),
    ],
    constraint: Annotated[
        str | None,
        typer.Argument(
            metavar="CONSTRAINT", help="One constraint of the operator.", autocompletion=completion.rules
        ),
    ] = None,
    cann: CannOption = None,
    as_json: Json = False,
) -> None:
    """Print what the documents say: codes, operators, constraints; needs no server."""
    from npugrad_client._cli.explain import explain as print_explanation
    from npugrad_client._cli.explain import explanation

    with reporting():
        asked = subject, constraint, cann_release(cann)
        if as_json:
            out().print_json(json.dumps(explanation(*asked)))
        else:
            print_explanation(out(), *asked)


@app.command()
def demo(
    context: typer.Context,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Running servers; repeat it, or use commas. Default: start one here."),
    ] = None,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the picture.")] = Path("build/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the largest shapes.")] = False,
) -> None:
    """Run every operator on real input and check the results against the reference.

    The TLS options are for servers that --target names; a service that is
    started here is never encrypted, whatever the environment says.
    """
    from npugrad_client.demo import (
        ServiceFailed,
        ServiceMissing,
        run_demo,
    )  # here, because no other command needs it

    with reporting():
        if not target:
            refuse_tls_without_target(context)
            try:
                raise typer.Exit(run_demo(None, folder, quick))
            except ServiceMissing as error:
                fail(f"npugrad demo: {error}, or name a running one with --target")
            except ServiceFailed as error:
                fail(f"npugrad demo: {error}")
        how = tls(encrypted, tls_ca, tls_certificate, tls_key)
        connect(target, None, how).close()  # reports a wrong address or file first
        raise typer.Exit(run_demo(addresses(target), folder, quick, how))


def main() -> None:
    """Entry point of the command `npugrad`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # help and tables contain characters that ASCII lacks
    app()


if __name__ == "__main__":
    main()
