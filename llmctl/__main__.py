"""``python -m llmctl``: the command line, where its script is not on PATH."""

from llmctl.cli.main import run

if __name__ == "__main__":
    run()
