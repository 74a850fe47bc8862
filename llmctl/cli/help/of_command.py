"""The help page of a command, with that of the trainer's parser where a command passes its flags on."""

from typing import Any

from trainer.config.help.page import HelpPage, Row, Section, join_sections, with_help_row


def page_of(ctx: Any) -> HelpPage:
    """Page of the command of a click context."""
    command = ctx.command
    sections = join_sections(_commands(ctx), _parameters(command))
    parser = command.trainer_parser() if hasattr(command, "trainer_parser") else None
    if parser is not None:
        from trainer.config.help.of_parser import notes_of, sections_of, usage_of

        sections = join_sections(sections_of(parser), sections)
        return HelpPage(usage_of(parser), (parser.description,), with_help_row(sections), notes_of(parser))
    return HelpPage(
        " ".join([ctx.command_path, *_usage(command)]),
        _paragraphs(command.help),
        with_help_row(sections),
        _paragraphs(command.epilog),
    )


def _usage(command: Any) -> list[str]:
    words = ["[OPTIONS]"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar.removesuffix("...") + ("..." if parameter.nargs == -1 else "")
            words.append(name if parameter.required else f"[{name}]")
        elif parameter.required:
            words.insert(1, _name_of(parameter))
    return [*words, "COMMAND [ARGS]..."] if hasattr(command, "commands") else words


def _commands(ctx: Any) -> list[Section]:
    """Commands of a group, in its panels or in one section."""
    group = ctx.command
    if not hasattr(group, "commands"):
        return []
    panels = getattr(group, "panels", None) or {"Commands": group.list_commands(ctx)}
    return [
        Section(
            title, tuple(Row(name, _first_sentence(group.get_command(ctx, name))) for name in names), is_commands=True
        )
        for title, names in panels.items()
    ]


def _parameters(command: Any) -> list[Section]:
    arguments: list[Section] = []
    options: list[Section] = []
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        if parameter.hidden:
            continue
        title = parameter.rich_help_panel or ("Arguments" if is_argument else "Options")
        row = Row(parameter.metavar.removesuffix("...") if is_argument else _name_of(parameter), _text_of(parameter))
        (arguments if is_argument else options).append(Section(title, (row,)))
    return [*arguments, *options]


def _name_of(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    return names if option.is_flag else f"{names} {option.metavar}"


def _text_of(parameter: Any) -> str:
    text, default = parameter.help or "", parameter.default
    is_said = "Default:" in text or not parameter.show_default or callable(default)
    if is_said or default in (None, "") or isinstance(default, bool | list | tuple):
        return text
    return f"{text} Default: {default:g}." if isinstance(default, float) else f"{text} Default: {default}."


def _first_sentence(command: Any) -> str:
    sentence, end, _ = next(iter(_paragraphs(command.help)), "").partition(". ")
    return sentence + end.strip()


def _paragraphs(text: str | None) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in (text or "").split("\n\n") if part.strip())
