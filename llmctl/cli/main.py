"""The entry point ``llmctl``. Reads argv, environment and working directory, and maps errors to exit codes.

Commands are a table of names, which --help prints. A command imports only its own module.
"""

import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from llmctl import __version__
from llmctl.context import Context
from llmctl.errors import BUG, INTERRUPTED, LlmctlError, UsageError, system_error
from llmctl.paths import import_own_trainer
from llmctl.terminal_text import printable

# Panel of --help -> command -> (module, help line). The line fits beside the name in 80 columns. The module has
# ``app``: a Typer with one command, or with several and a callback.
PANELS = {
    "Start": {
        "submit": ("llmctl.cli.submit", "Start a training run, or any command, on a cluster."),
        "init": ("llmctl.cli.init", "Write a complete config for a model or a script."),
        "examples": ("llmctl.cli.reference.examples", "List the configs that come with llmctl, or copy one."),
        "explain": ("llmctl.cli.reference.explain", "Explain a key of a config or profile, or a Megatron-LM flag."),
        "docs": ("llmctl.cli.reference.docs", "Show a page of the documentation in the terminal."),
        "schema": ("llmctl.cli.reference.schema", "Print a JSON schema, for editors and programs."),
        "import-script": ("llmctl.cli.import_script", "Turn a Megatron-LM training script into a config."),
        "plan": ("llmctl.cli.planning.plan", "Predict memory, speed and cost of a training run."),
        "scale": ("llmctl.cli.planning.scale", "Measure how a training scales over numbers of nodes."),
        "tune": ("llmctl.cli.planning.tune", "Try the fastest layouts in short runs, and keep the fastest."),
        "resume": ("llmctl.cli.resume", "Resume a run from its latest checkpoint."),
        "interactive": ("llmctl.cli.interactive", "Open a shell, or run a command, in a job's environment."),
    },
    "Watch": {
        "status": ("llmctl.cli.status", "Show runs: state, iteration, loss, tokens/s."),
        "watch": ("llmctl.cli.viewing.watch", "Watch runs on a live screen: curves, ranks, nodes, log."),
        "list": ("llmctl.cli.history.list_runs", "List past and present runs, with filters and cost."),
        "runs": ("llmctl.cli.history.runs", "Free the disk space of runs that have ended."),
        "plot": ("llmctl.cli.viewing.plot", "Plot numbers of runs in the terminal, or into a file."),
        "report": ("llmctl.cli.viewing.report", "Write one HTML page about runs: curves, faults, cost."),
        "logs": ("llmctl.cli.logs", "Show or follow the output of a run, rank by rank."),
        "cancel": ("llmctl.cli.cancel", "End runs and all of their processes."),
    },
    "Prepare and use models": {
        "data": ("llmctl.cli.trainer.data", "Turn text into training data; inspect and merge datasets."),
        "checkpoint": ("llmctl.cli.trainer.checkpoint", "Import, export and check models: Hugging Face folders."),
        "generate": ("llmctl.cli.trainer.generate", "Continue prompts with a trained model."),
        "evaluate": ("llmctl.cli.trainer.evaluate", "Measure a trained model: perplexity of a text, or tasks."),
    },
    "Clusters": {
        "clusters": ("llmctl.cli.clusters", "List, show, check and write cluster profiles."),
        "nodes": ("llmctl.cli.nodes", "Show nodes: idle, in use or drained, with reasons."),
        "env": ("llmctl.cli.env", "Build or inspect the fused kernels of jobs."),
        "doctor": ("llmctl.cli.doctor", "Check a cluster, with a remedy for each problem."),
    },
    "For programs": {
        "mcp": ("llmctl.cli.mcp", "Serve tools for coding agents, over the Model Context Protocol."),
    },
}

COMMANDS = {name: entry for commands in PANELS.values() for name, entry in commands.items()}

TAKES_COMMAND = frozenset({"submit", "interactive"})
TAKES_ARGUMENTS = frozenset({"import-script"})
"""Commands whose words after ``--`` are arguments of a script that is read."""

_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException, which typer uses but does not export


class HelpContext(typer.Context):
    """Context of a command whose help is a page of ours. Imports the pages only for help."""

    def get_help(self) -> str:
        """The page, for standard output."""
        from llmctl.cli.help.of_command import page_of
        from llmctl.cli.help.terminal import help_text

        return help_text(page_of(self), self.obj.environment)


class LazyGroup(typer.core.TyperGroup):
    """A group that lists commands from the table. Imports only the command that runs."""

    context_class = HelpContext
    panels = PANELS

    def list_commands(self, ctx: Any) -> list[str]:
        """Command names in table order."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stub with name and help line, for listing. ``resolve_command`` loads the real command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        line = COMMANDS[cmd_name][1]
        return typer.core.TyperCommand(cmd_name, help=line, short_help=line)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command from its module."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from llmctl.cli.other_words import unknown_command

            raise UsageError(unknown_command(args[0], tuple(COMMANDS)))
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import a command's module and build its parser."""
    module, help_line = COMMANDS[name]
    command = typer.main.get_command(importlib.import_module(module).app)
    command.name = name
    command.short_help = help_line
    for one in (command, *getattr(command, "commands", {}).values()):
        one.context_class = HelpContext
    return command


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llmctl {__version__}")
        raise typer.Exit


@app.callback(epilog="llmctl COMMAND --help shows the arguments and options of a command.")
def _llmctl(
    debug: bool = typer.Option(False, "--debug", help="Show a traceback with an error."),
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Submit, launch and follow pretraining of language models on any cluster."""


def run() -> None:
    """Console script ``llmctl``."""
    import_own_trainer()
    _open_output()
    environment = dict(os.environ)
    # In this process alone: pydantic would read the metadata of every installed package to find plug-ins, and there are
    # none for llmctl. 12 ms of `submit --dry-run` with 60 packages (Zen 4).
    # Not for mcp: its jobs take the environment of this process.
    if "mcp" not in sys.argv:
        os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    code = main(sys.argv[1:], environment)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader of our output has left: no error
    except OSError as error:
        code = _report(f"cannot write to standard output: {error.strerror}", code or BUG, debug=False)
    # Not sys.exit: the interpreter's teardown takes a seventh of `submit --dry-run`.
    os._exit(code)


def main(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run one command line and return its exit code (see llmctl.errors). Errors go to standard error.

    Args:
        arguments: argv without the program's name.
        environment: the user's environment variables. Unset: those of the process.
    """
    with ExitStack() as at_end:
        return _run(arguments, environment, at_end)


def _run(arguments: Sequence[str], environment: Mapping[str, str] | None, at_end: ExitStack) -> int:
    words, command = split_command(arguments)
    debug = "--debug" in words
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        _check_text(words)
        context = Context.of(("llmctl", *arguments), command, os.environ if environment is None else environment)
        at_end.callback(context.close)
        if "--" in arguments and not set(words) & (TAKES_COMMAND | TAKES_ARGUMENTS):
            raise UsageError(f"-- COMMAND goes with {' and '.join(sorted(TAKES_COMMAND))} only")
        if "--" in arguments and not command:
            raise UsageError("--: no COMMAND follows; give a COMMAND, or leave -- out")
        result = _call(words or ["--help"], context)
    except LlmctlError as error:
        return _report(error.message, error.exit_code, debug)
    except _CLICK_ERROR as error:
        return _report(_usage_message(error), error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as error:
        # typer raises this when the reader of our output has left; the shell's completion does too.
        return 0 if isinstance(error.__context__, BrokenPipeError) else int(error.code or 0)
    except (OSError, RecursionError) as error:
        return _report(*_system_error(error), debug)
    except Exception as error:
        return _report(_internal(error), BUG, debug)
    return result if isinstance(result, int) else 0


def _call(words: list[str], context: Context) -> Any:
    """Run a command. A flag of a job that its parser does not know may be a scheduler's."""
    try:
        return typer.main.get_command(app).main(words, prog_name="llmctl", standalone_mode=False, obj=context)
    except _CLICK_ERROR as error:
        unknown = getattr(error, "option_name", None)
        if unknown is None or not set(words) & TAKES_COMMAND:
            raise
        from llmctl.cli.scheduler_words import in_our_words

        again = in_our_words(words, unknown)
        if again is None:
            raise
    return _call(again, context)


def _system_error(error: OSError | RecursionError) -> tuple[str, int]:
    """Message and exit code of an error of the operating system, or of a value without an end."""
    known = system_error(error)
    if known is not None:
        return known.message, known.exit_code
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
        return f"cannot write to standard output: {error.strerror}", BUG
    return _internal(error), BUG


def split_command(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split llmctl's own arguments from the COMMAND after the first ``--``."""
    words = list(arguments)
    if "--" not in words:
        return words, ()
    cut = words.index("--")
    return words[:cut], tuple(words[cut + 1 :])


def _open_output() -> None:
    """Make standard streams accept any text: closed ones discard it, narrow encodings show escapes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _check_text(words: Sequence[str]) -> None:
    wrong = next((word for word in words if not word.isascii() and _is_broken(word)), None)
    if wrong is not None:
        raise UsageError(
            f"{ascii(wrong)}: is not UTF-8; only a COMMAND, or the value of a --secret, may contain arbitrary bytes"
        )


def _is_broken(text: str) -> bool:
    # Bytes that are not UTF-8 reach Python as lone surrogates (PEP 383).
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _internal(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {error}; --debug shows where"


def _usage_message(error: Any) -> str:
    message = " ".join(error.format_message().split())
    path = error.ctx.command_path if getattr(error, "ctx", None) else "llmctl"
    return f"{message}\nsee {path} --help" if message else ""


def _report(message: str, exit_code: int, debug: bool) -> int:
    if debug:
        import traceback

        print(printable(traceback.format_exc()), end="", file=sys.stderr)
    if message:
        print(f"llmctl: {printable(message)}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    run()
