"""Command line of the supervisor, called by job.sh."""

import argparse
import sys
from typing import Dict, Sequence

from . import each_host, images, processes
from .attempt import AttemptError, NotNeededError, tell
from .job import Supervisor
from .node import run_node
from .notices import send
from .settings import JobSettings
from .spares.choice import choose_nodes


def main(arguments: Sequence[str], environ: Dict[str, str]) -> int:
    """Run one act of the command line; returns the exit code.

    Args:
        arguments: the command line without the program.
        environ: of this process.
    """
    options = _parse(arguments)
    try:
        if options.act == "import-image":
            return images.import_image(options.runtime, options.source, options.target, environ)
        if options.act == "notify":
            return send(sys.stdin.read(), environ)
        if options.act == "each-host":
            return each_host.run(options, environ)
        if options.act == "choose-nodes":
            return choose_nodes(options, environ)
        job = JobSettings.read(options.job)
        if options.words[:1] == ["node"]:
            attempt, address, port, *node = options.words[1:]
            number = int(node[0]) if node else None
            guarded = options.end_by == "file"
            return run_node(job, environ, int(attempt), address, port, number, guarded=guarded)
        if options.words[:1] == ["end"]:
            act = processes.kill_node if options.words[3:] == ["now"] else processes.ask_ranks_to_end
            act(job.run_dir, *map(int, options.words[1:3]))
            return 0
        code = Supervisor(job, options, environ).run()
    except AttemptError as error:
        tell(str(error))
        return 0 if isinstance(error, NotNeededError) else 1
    return 1 if str(code) in options.never_exit.split(",") else code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    acts = parser.add_subparsers(dest="act", metavar="ACT")
    job = acts.add_parser("job", help="run an attempt, or one node of it")
    job.add_argument("--job", required=True, metavar="FILE", help="job.json")
    job.add_argument("--job-id", required=True, metavar="ID", help="the scheduler's id, or a process id")
    job.add_argument(
        "--end-by", choices=("signal", "file", "command", "step"), default="signal", help="see end_request.py"
    )
    job.add_argument("--never-exit", default="", metavar="CODES", help="exit codes that mean more to the scheduler")
    job.add_argument(
        "--end-time", default="", metavar="SECONDS", help="time since 1970 at which Slurm ends the job, or: ask"
    )
    job.add_argument(
        "words", nargs="*", help="none | NODE ATTEMPT | node ATTEMPT ADDRESS PORT [NODE] | end ATTEMPT NODE [now]"
    )
    each = acts.add_parser("each-host", help="run a command once per host of LLMCTL_HOSTFILE")
    each.add_argument("--end-by", choices=("signal", "file", "command"), default="signal")
    each.add_argument("--through-shell", action="store_true")
    each.add_argument("--first-here", action="store_true")
    each.add_argument("words", nargs=argparse.REMAINDER, help="%%h: the host; %%n: its number")
    choice = acts.add_parser("choose-nodes", help="print the nodes of an attempt, one a line")
    choice.add_argument("--job", required=True, metavar="FILE", help="job.json")
    probe = choice.add_mutually_exclusive_group()
    probe.add_argument("--probe", action="store_true", help="leave out nodes on which srun starts nothing")
    probe.add_argument("--starter", default="", help="the same by these words for the shell, with %%h for the host")
    choice.add_argument("hosts", nargs="+", help="all nodes of the job, the head first")
    acts.add_parser("notify", help="send the notice that stands on standard input, as JSON")
    image = acts.add_parser("import-image", help="fetch an image once for all nodes")
    for name in ("runtime", "source", "target"):
        image.add_argument(name)
    return parser.parse_args(list(arguments))
