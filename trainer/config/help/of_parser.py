"""The help page of an argparse parser."""

from __future__ import annotations

import argparse

from trainer.config.help.page import HelpPage, Row, Section, join_sections, with_help_row

WITHOUT_EFFECT = "Without effect"
"""Title of the groups whose flags a page only names, in its last paragraph."""
_NOTE = "Flags of Megatron-LM that are accepted and have no effect: {flags}. docs/guide/data.md says why."


def page_of(parser: argparse.ArgumentParser) -> HelpPage:
    """Page of a parser."""
    return HelpPage(
        usage_of(parser),
        (parser.description or "",),
        with_help_row(sections_of(parser)),
        notes_of(parser),
    )


def usage_of(parser: argparse.ArgumentParser) -> str:
    """Command line: options that are required by name, arguments last."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    required = [_name_of(action, every=False) for action in shown if action.option_strings and action.required]
    # Each argument is needed; argparse calls optional those that another flag may give.
    # While argparse parses intermixed arguments, nargs is SUPPRESS.
    arguments = [
        _name_of(action) + ("" if action.nargs in (None, "?") else "...")
        for action in shown
        if not action.option_strings
    ]
    return " ".join([parser.prog, "[OPTIONS]", *required, *arguments])


def sections_of(parser: argparse.ArgumentParser) -> tuple[Section, ...]:
    """Sections of a parser's flags, without --help."""
    return join_sections(
        [
            Section(_title_of(parser, group), tuple(Row(_name_of(one), one.help or "") for one in _shown(group)))
            for group in parser._action_groups
            if group.title != WITHOUT_EFFECT
        ]
    )


def notes_of(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Paragraph that names the flags without effect, if there are any."""
    groups = [group for group in parser._action_groups if group.title == WITHOUT_EFFECT]
    flags = ", ".join(action.option_strings[0] for group in groups for action in _shown(group))
    return (_NOTE.format(flags=flags),) if flags else ()


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [
        action
        for action in group._group_actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]


def _title_of(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> str:
    # argparse's own titles differ between versions of Python.
    if group is parser._positionals:
        return "Arguments"
    return "Options" if group is parser._optionals else str(group.title)


def _name_of(action: argparse.Action, *, every: bool = True) -> str:
    """Names and value of a flag, or an argument's name."""
    value = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return value
    names = ", ".join(action.option_strings if every else action.option_strings[:1])
    return names if action.nargs == 0 else f"{names} {value}"
