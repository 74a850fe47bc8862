"""The answer to every flag of Megatron-LM, and the page of all answers."""

from pathlib import Path

from trainer.config.counted_flags import COUNTED
from trainer.config.joint.flags import JOINT_FLAGS
from trainer.config.megatron_flags import ALIASES, REFUSED, SQUARE_ROOTS, WITHOUT_EFFECT
from trainer.planning.command_line import flag_keys

RECORDED = Path(__file__).parents[2] / "tests/recorded/megatron_flags.txt"
_HEAD = """# Flags of Megatron-LM

Every flag of Megatron-LM has one of three answers: it sets a key of the [config](config.md), it has no effect for the
stated reason, or it is refused with the stated sentence. [The guide](../guide/megatron-flags.md) is about using them.
`python -m scripts.reference` makes this page. The names are those of NVIDIA/Megatron-LM at commit d98e8a64, and further
ones of older releases, of llm-jp's, GENIAC's and swiss-ai's Megatron-LM and of Microsoft's, Argonne's and
bigscience's Megatron-DeepSpeed. `--use_wandb` and `--use-wandb`
are the same flag.

| flag | answer | meaning |
|---|---|---|
"""


def recorded_flags() -> list[str]:
    """Flags of Megatron-LM, from the recorded list."""
    return [line for line in RECORDED.read_text().split("\n") if line and not line.startswith("#")]


def answer(flag: str) -> tuple[str, str]:
    """The kind of the answer, and its words.

    Raises:
        KeyError: the flag is unknown.
    """
    keys = flag_keys()
    if flag in JOINT_FLAGS:
        return "meant", f"`{JOINT_FLAGS[flag][0]}`, together with other flags"
    if flag in keys:
        return "meant", f"`{keys[flag]}`"
    if flag in ALIASES:
        alias = ALIASES[flag]
        return "meant", f"`{alias.key}`" + (f" = `{alias.value}`" if isinstance(alias.value, (str, int, float)) else "")
    if flag in COUNTED:
        return "meant", f"`{COUNTED[flag]}`, converted to iterations"
    if flag in SQUARE_ROOTS:
        key, of = SQUARE_ROOTS[flag]
        return "meant", f"`{key}`, the square root of `{of}`"
    if flag in WITHOUT_EFFECT:
        return "no effect", WITHOUT_EFFECT[flag].reason
    return "refused", REFUSED[flag]


def flags_page() -> str:
    """The whole page."""
    flags = sorted({*recorded_flags(), *ALIASES, *COUNTED, *SQUARE_ROOTS, *JOINT_FLAGS, *WITHOUT_EFFECT, *REFUSED})
    rows = ("| `--{}` | {} | {} |".format(flag, *answer(flag)) for flag in flags)
    return _HEAD + "\n".join(rows) + "\n"
