"""The reference of a command line, generated from its parser."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import typer

from npugrad_server.config import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTINGS = {f"--{name.replace('_', '-')}" for name in ServerSettings.model_fields}


def commands(app: typer.Typer, name: str) -> str:
    """A section for each command: its usage, what it does, a table of its arguments and options."""
    top: Any = typer.main.get_command(app)
    return "\n" + "\n".join(
        _section(context) for context in _commands(top.context_class(top, info_name=name))
    )


def _commands(context: Any) -> Iterator[Any]:
    """The context of every command that does something, in the order of the help text."""
    command = context.command
    nested = getattr(command, "commands", {})
    if not nested or (command.invoke_without_command and context.parent):
        yield context
    for name, inner in nested.items():
        if not inner.hidden:
            yield from _commands(inner.context_class(inner, info_name=name, parent=context))


def _section(context: Any) -> str:
    command = context.command
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    settings = [p for p in shown if _SETTINGS.intersection(p.opts)]
    if len(settings) < len(_SETTINGS):  # options of its own that share a name
        settings = []
    rows = [_row(p, context) for p in shown if p not in settings]
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"### {context.command_path}", f"```text\n{usage}\n```", _prose(command.help or "")]
    if settings:
        parts.append("All [settings](settings.md) are options of this command.")
    if rows:
        parts.append("\n".join(["| option | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _prose(text: str) -> str:
    paragraphs = inspect.cleandoc(text).partition("\f")[0].split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs)).strip()


def _paragraph(text: str) -> str:
    """A paragraph; as a block where its lines stand for themselves, which the page would join."""
    lines = text.removeprefix("\b\n")
    is_list = all(line.startswith("Exit status ") for line in lines.splitlines())
    return f"```text\n{lines}\n```" if lines != text or is_list else text


def _row(param: Any, context: Any) -> str:
    name, meaning = param.get_help_record(context) or (param.make_metavar(context), param.help or "")
    return " | ".join(("", f"`{name}`", " ".join(meaning.split()), "")).strip().replace("\\|", "|")
