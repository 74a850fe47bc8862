"""The user's list of bad nodes on a cluster: entries to show, and a node to take off."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.context import ClusterSession, Context
from llmctl.errors import UsageError
from llmctl.submit.bad_nodes.left_out import COUNTS_S, entries_of
from llmctl.submit.job import BadNodeFacts, bad_node_facts
from llmctl.supervisor.bad_nodes.entries import BadNode, entry_file


@dataclass(frozen=True)
class ExcludedDocument:
    """The document of ``--excluded --json``.

    Attributes:
        cluster: name of the profile.
        excluded: the user's list of bad nodes, the newest failure first.
        remarks: sentences on files of the list that are not believed.
    """

    cluster: str
    excluded: Sequence[BadNodeFacts]
    remarks: Sequence[str]


@dataclass(frozen=True)
class BadNodeList:
    """The list, read.

    Attributes:
        cluster: name of the profile.
        entries: the newest failure first.
        remarks: sentences on files that are not believed.
        now: time on the cluster, in seconds since 1970.
    """

    cluster: str
    entries: tuple[BadNode, ...]
    remarks: tuple[str, ...]
    now: float

    def counts(self, bad: BadNode) -> bool:
        """True for an entry that is new enough to be left out."""
        return self.now - bad.time <= COUNTS_S

    def document(self) -> ExcludedDocument:
        """The list as plain values."""
        return ExcludedDocument(self.cluster, [bad_node_facts(one) for one in self.entries], self.remarks)


def read_bad_nodes(context: Context, session: ClusterSession) -> BadNodeList:
    """The user's list on a cluster.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    entries, remarks = entries_of(session.transport.read_bad_nodes(_root(context, session)))
    ordered = sorted(entries, key=lambda one: (-one.time, one.node))
    return BadNodeList(session.profile.name, tuple(ordered), tuple(remarks), session.transport.now())


def readmit_node(context: Context, session: ClusterSession, node: str) -> None:
    """Take a node off the user's list.

    Raises:
        UsageError: the list does not have the node.
        SchedulerError: the machine cannot be reached.
    """
    found = session.transport.read_bad_nodes(_root(context, session))
    listed = [str(one["node"]) for one in found["entries"]]
    if node not in listed:
        there = f"there are {', '.join(listed)}" if listed else "the list is empty"
        raise UsageError(f"--readmit {node}: is not on the list of bad nodes of {session.profile.name}; {there}")
    session.transport.remove([entry_file(found["folder"], node)])


def _root(context: Context, session: ClusterSession) -> str:
    return context.runs_root(session.profile, machine=session.transport)
