"""Files, commands and processes on the machine of a cluster: this machine, or hosts behind ssh."""
