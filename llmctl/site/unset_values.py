"""Values of a site that the user has not set: a folder for the runs, and placeholders for a dry run.

A dry run needs no set-up. It shows each missing value as a word that begins with YOUR-, and names its cure.
"""

import re

from llmctl.errors import ProfileError
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile

HOME_FOLDER = "~/llmctl-runs"
"""Folder of the runs at a site whose profile names no work area."""
GROUP, HOME, HOST, ENVIRONMENT = "YOUR-GROUP", "/YOUR-HOME", "YOUR-HOST", "/YOUR-ENVIRONMENT"
_OF_A_VARIABLE = re.compile(r"/YOUR-([A-Za-z_]\w*)")
_CURES = {
    GROUP: "--group G",
    HOME: "your home directory there, which a dry run does not ask for",
    HOST: "hosts in the profile",
    ENVIRONMENT: "the environment with torch",
}
"""Placeholder -> what to set, or what it stands for."""


def work_area(profile: ClusterProfile, *, group: str | None, user: str) -> str | None:
    """The site's folder for runs, from the profile's work_area; None without a work_area or group.

    Args:
        profile: the cluster's profile.
        group: group, project or account to bill.
        user: the user's name on the cluster.

    Raises:
        ProfileError: work_area has another field than group and user.
    """
    area = profile.work_area
    if area is None or ("{group}" in area and not group):
        return None
    try:
        return area.format(group=group, user=user)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ProfileError(
            f"clusters/{profile.name}.yaml: work_area: {area!r} is not valid: {{group}} and {{user}} can be filled in"
        ) from None


def with_placeholders(
    profile: ClusterProfile, spec: JobSpec, *, starts_on_hosts: bool, is_remote: bool
) -> ClusterProfile:
    """The profile for a dry run: placeholders where the job needs a value that is not set.

    Args:
        profile: of the cluster.
        spec: the user's job.
        starts_on_hosts: jobs start on the hosts of the profile.
        is_remote: the cluster is another machine, so that our own Python means nothing there.
    """
    more: dict[str, object] = {}
    if profile.group_required and not (spec.group or profile.group):
        more["group"] = GROUP
    if starts_on_hosts and not profile.hosts:
        more["hosts"] = tuple(f"{HOST}-{number}" for number in range(1, spec.nodes + 1))
    software = profile.environment
    if is_remote and not spec.command and software.path is None and software.python is None and not spec.container:
        more["environment"] = software.model_copy(update={"python": f"{ENVIRONMENT}/bin/python"})
    return profile.model_copy(update=more)


def runs_root_note(profile: ClusterProfile, group: str | None) -> str:
    """One line about the folder that was taken for the runs.

    Args:
        profile: of the cluster, with the folder as its runs_root.
        group: group, project or account to bill.
    """
    is_home = work_area(profile, group=group, user="user") is None
    place = "in your home directory, which may have a small quota" if is_home else f"the work area of {profile.name}"
    return (
        f"runs_root is unset: the run goes to {profile.runs_root}, {place}; "
        f"`llmctl clusters setup {profile.name}` sets another folder"
    )


def placeholder_note(name: str, shown: str) -> str:
    """One line about the placeholders of a dry run; empty without placeholders.

    Args:
        name: of the cluster.
        shown: the script, its submit commands and the config.
    """
    found = [f"{text.strip('/')} ({cure})" for text, cure in _CURES.items() if text in shown]
    named = dict.fromkeys(_OF_A_VARIABLE.findall(shown))
    found += [
        f"YOUR-{one} (${one} there, which a dry run does not ask for)" for one in named if f"/YOUR-{one}" not in _CURES
    ]
    if not found:
        return ""
    return f"placeholders for values that are not set: {', '.join(found)}; `llmctl clusters setup {name}` stores them"
