"""Settings of generation. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.generation.errors import GenerationError


@dataclass(frozen=True)
class GenerationSettings:
    """Choice of the tokens, and end of a row.

    Attributes:
        max_new_tokens: most tokens that are added to a prompt.
        temperature: divisor of the logits; 0 takes the most likely token each time.
        top_k: draw only from this many most likely tokens; 0 from all. (Fan et al. 2018, arXiv:1805.04833, section
            5.4)
        top_p: draw only from the fewest most likely tokens that have this probability together, after temperature and
            top_k; 1 from all. (Holtzman et al. 2019, arXiv:1904.09751, section 3.1)
        seed: of the draws. Row i of a call has its own random stream, so that the result does not depend on the other
            rows.
        stop_tokens: ids that end a row; not part of the result.
    """

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            GenerationError: names the value and the valid ones.
        """
        if self.max_new_tokens < 0:
            raise GenerationError(f"max_new_tokens: {self.max_new_tokens} is negative; give 0 or more")
        if not 0 <= self.temperature < float("inf"):
            raise GenerationError(f"temperature: {self.temperature:g} is not a finite number of 0 or more")
        if self.top_k < 0:
            raise GenerationError(f"top_k: {self.top_k} is negative; give 0 or more")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p: {self.top_p:g} is not above 0 and at most 1")
