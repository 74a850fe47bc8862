"""Shell on a node under Grid Engine: qrsh with a script and a terminal. Pure.

A server-side check of submissions (JSV) reads the command line by line, and shells on the way parse it again or not at
all. Every text that could hold a quote or a newline is therefore base64, one word that all shells read alike.
"""

import base64
import os
import shlex
from collections.abc import Sequence

_ALLOCATE = r"""announcement=$1 words=$2
shift 2
echo "$announcement" >&2
pty=no
if [[ -t 0 && -t 1 ]]; then pty=yes; fi
here=$(printf %s "$PWD" | base64 -w0)
# Jobs find the queue's shell in SHELL (queue_conf(5)), not the user's.
shell=/bin/bash
if [[ ${SHELL-} =~ ^/[A-Za-z0-9/._-]+$ ]]; then shell=$SHELL; fi
place="export SHELL=$shell; cd \"\$(echo $here | base64 -d)\" 2>/dev/null"
exec qrsh -now yes -pty "$pty" "$@" "bash -c '$place; eval \"exec \$(echo $words | base64 -d)\"'"
"""
"""Run on the login node with ANNOUNCEMENT, WORDS and the options of qrsh."""

_ENTER = r"""words=$1 size=$2
export TERM=$3 SHELL=$4
# Without our own standard error: a shell prints the whole text of a killed command.
exec 3>&2 2>/dev/null
if [[ $size == none ]] || ! command -v script >/dev/null; then
    eval "$(echo "$words" | base64 -d) 2>&3 3>&-"
    exit "$?"
fi
SHELL=/bin/bash script -qec "export SHELL=$SHELL
    bash -c 'stty rows ${size%,*} cols ${size#*,}; eval \"exec \$(echo $words | base64 -d)\"'" /dev/null 2>&3 3>&-
exit "$?"
"""
"""Run on the node of the attached job. Never execs the command: Grid Engine ends the whole job if one of its tasks dies
by a signal ("tightly integrated parallel task failed - killing job")."""

_ATTACH = r"""host=$1 enter=$2 words=$3
export JOB_ID=$4 SGE_TASK_ID=undefined
# If qrsh died, with this terminal or by Ctrl-C, Grid Engine would end the whole job.
trap '' HUP INT TERM
size=none shell=/bin/bash
if [[ -t 0 && -t 1 ]] && read -r rows columns < <(stty size); then
    size=$((rows ? rows : 24)),$((columns ? columns : 80))
fi
if [[ ${SHELL-} =~ ^/[A-Za-z0-9/._-]+$ ]]; then shell=$SHELL; fi
enter="bash -c 'eval \"\$(echo $enter | base64 -d)\"' bash $words"
# Jobs without a parallel environment, such as those on a part of a node, accept no tasks from outside.
if ! qrsh -inherit -nostdin "$host" true 2>/dev/null; then
    trap - HUP INT TERM
    tty=-t
    if [[ $size == none ]]; then tty=-T; fi
    exec ssh "$tty" "$host" "$enter none ${TERM:-dumb} $shell"
fi
if [[ $size == none ]]; then exec qrsh -inherit "$host" "$enter none ${TERM:-dumb} $shell"; fi
# Tasks get no terminal of their own: the node creates one, and ours passes on every key.
saved=$(stty -g)
stty raw -echo
qrsh -inherit "$host" "$enter $size ${TERM:-dumb} $shell"
code=$?
stty "$saved"
exit "$code"
"""
"""Run on the login node with HOST, ENTER, WORDS and the job's id."""


def allocate_argv(announcement: str, options: Sequence[str], script: str, command: Sequence[str]) -> list[str]:
    """Command that runs a script in a new allocation, in the folder with our own folder's name.

    The command fails at once if no node is free.

    Args:
        announcement: line to print first.
        options: of qrsh: the request.
        script: text for bash.
        command: its arguments.
    """
    return ["bash", "-c", _ALLOCATE, "bash", announcement, _words(script, command), *options]


def attach_argv(job_id: str, host: str, script: str, command: Sequence[str]) -> list[str]:
    """Command that runs a script as a task of a running job, on one of its hosts.

    The login node must be a submit host.
    """
    return ["bash", "-c", _ATTACH, "bash", host, _base64(_ENTER), _words(script, command), job_id]


def _words(script: str, command: Sequence[str]) -> str:
    return _base64(shlex.join(["bash", "-c", script, "bash", *command]))


def _base64(text: str) -> str:
    return base64.b64encode(os.fsencode(text)).decode()
