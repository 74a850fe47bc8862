"""Text from elsewhere that is safe to print: logs, records of runs, words of schedulers and hosts.

A job's author could otherwise set the reader's window title or clipboard, hide lines, or make the terminal type an
answer (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html).
"""

import re

_SEQUENCE = re.compile(
    # Control strings with their content: OSC (window title, clipboard, links), DCS, SOS, PM, APC.
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: cursor, erasing, colours
    r"|\x1b[ -/]*[0-~]"  # resets, character sets, and the beginning of a string without an end
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without escape sequences; other control characters than tab and newline become U+FFFD."""
    if text.isprintable():
        return text
    return _CONTROL.sub("\ufffd", _SEQUENCE.sub("", text.replace("\r\n", "\n")))
