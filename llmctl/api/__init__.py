"""The Python API: what the commands do, as functions that return values. Users import its names from llmctl.

Nothing here prints, asks, exits or handles signals. Environment and working directory are read at each call.
"""

import sys

from llmctl.paths import import_own_trainer

if "trainer" not in sys.modules:
    import_own_trainer()
