"""Names of the files in ``attempts`` by which the jobs of a chain follow each other.

All jobs of a chain have the number of one submission. Link 1 is the job that llmctl has submitted. A job may claim link
L + 1 only once the owner of link L has passed the run on, and it claims the link as a job claims its submission: by a
symbolic link, which only one job can create. So a scheduler that has accepted the same job twice starts one of them.
"""


def claim_name(submission: int, link: int) -> str:
    """Name of the symbolic link to the id of the job that is this link."""
    return f".submission-{submission}" if link == 1 else f".submission-{submission}-{link}"


def passed_name(submission: int, link: int) -> str:
    """Name of the file that says: this link has ended, and the next one may begin."""
    return f".passed-{submission}-{link}"


def link_name(submission: int, link: int) -> str:
    """Name of the file with the scheduler's answer to the submission of the job that follows this link."""
    return f".link-{submission}-{link}"


def cancelled_name(submission: int) -> str:
    """Name of the file that says: no further job of this submission may begin."""
    return f".cancelled-{submission}"
