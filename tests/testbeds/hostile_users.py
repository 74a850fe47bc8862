"""Users of one folder of runs, and what a hostile one types there, for any scheduler."""

from pathlib import Path

USERS = {"alice": 61001, "bob": 61002, "carol": 61003}
"""Users by their numbers, which no machine gives to its users."""
LAB = 61000
"""Group of all of them."""
UMASKS = (0o022, 0o077)
ROOTS = {"1777": ("alice", 0o1777), "2775": ("alice", 0o2775), "0700": ("bob", 0o700)}
"""Owner and mode of folders of runs. Its owner may rename what is in a folder, whatever the sticky bit."""


def plant_supervisor(own: Path, address: str, witness: Path) -> str:
    """Put a supervisor in the place of another user's; it writes the number of the user that runs it to a file.

    Args:
        own: the folder of code of the other user.
        address: name of the folder of the code that a waiting job starts.
        witness: file that anybody may write to.
    """
    place = own / "code" / address / "supervisor"
    return f"""
        mv {own} {own}.away && mkdir -p {place} || exit 1
        echo 'import os; open("{witness}", "a").write(str(os.getuid()))' > {place}/__main__.py
        touch {witness} && chmod 0666 {witness} && chmod -R 0755 {own}
    """


def put_back(path: Path) -> str:
    """Put the folder back that was moved away."""
    return f"rm -r {path} && mv {path}.away {path}"


def swap_run(hers: Path, his: Path) -> str:
    """Put a copy of the attacker's run, open to everybody, in the place of another user's."""
    return f"""
        mv {his} {his}.away && cp -r {hers} {his} || exit 1
        sed -i s/{hers.name}/{his.name}/ {his}/run.json && chmod -R 0755 {his}
    """
