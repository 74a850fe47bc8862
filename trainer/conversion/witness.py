"""Logits of a Hugging Face folder by transformers, the witness of a conversion.

Legend: S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.sections.model import ModelConfig
from trainer.conversion.errors import ConversionError

LONGEST_WITH_SCORES = 512
"""Tokens of a text up to which the scores of attention are computed as a whole, in memory."""


def has_witness() -> bool:
    """True if transformers is installed."""
    return find_spec("transformers") is not None


def fault_of_witness(model_type: str, model: ModelConfig) -> str | None:
    """Names what the installed transformers computes wrongly of a model, or None.

    transformers 4.57 computes no other of the families' tiny models otherwise than transformers 5.
    """
    import transformers

    if not is_version_4():
        return None
    name = f"transformers {transformers.__version__}"
    if model_type == "deepseek_v2" and (model.rope_scaling or {}).get("mscale_all_dim"):
        return f"{name} leaves out mscale_all_dim of deepseek_v2"
    if model_type == "qwen2_moe" and len({model.window_of(layer) for layer in range(model.num_layers)}) > 1:
        return f"{name} gives all layers of qwen2_moe the sliding window"
    return None


def is_version_4() -> bool:
    """True if the installed transformers is older than version 5."""
    import transformers

    return transformers.__version__.startswith("4.")


def logits_of_transformers(
    folder: Path, auto_class: str, tokens: Tensor, rows: Tensor, scratch: Path
) -> tuple[str, Tensor]:
    """Name with version, and logits [1, rows, V] in float32.

    With the package accelerate, the layers have weights only while they compute.

    Args:
        folder: in Hugging Face's format.
        auto_class: class of transformers that loads the model with its heads.
        tokens: [1, S].
        rows: the positions whose logits are wanted, ascending.
        scratch: folder on a disk that can hold weights that transformers stores in another form than the files, such
            as those of experts.

    Raises:
        ConversionError: transformers cannot load the folder, or compute its logits.
    """
    import transformers

    what = "load it"
    try:
        with _loaded(
            folder, getattr(transformers, auto_class), tokens.shape[1] <= LONGEST_WITH_SCORES, scratch
        ) as model:
            what = "compute its logits"
            inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
            if len(rows) < tokens.shape[1]:
                model.get_output_embeddings().register_forward_pre_hook(
                    lambda _, hidden: (hidden[0].index_select(1, rows),)
                )
            # In inference mode, modules of accelerate could not exchange weights.
            with torch.no_grad():
                found = model(tokens, **inputs)
            # BERT has logits of tokens and of samples.
            logits: Tensor = (found.prediction_logits if "prediction_logits" in found else found.logits).float()
    except Exception as error:
        raise ConversionError(f"{folder}: transformers cannot {what}: {type(error).__name__}: {error}") from error
    return f"transformers {transformers.__version__}", logits


@contextmanager
def _loaded(folder: Path, auto_class: Any, is_short: bool, scratch: Path) -> Iterator[Any]:
    # No code of the folder is run: trust_remote_code stays off.
    values: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    if not is_version_4():
        # The grouped product of experts, the default, wants widths that divide by 8. Transformers 4 has no such choice.
        values["experts_implementation"] = "eager"
    # The scores of a long text would be the largest tensor.
    values["attn_implementation"] = "eager" if is_short else "sdpa"
    _quieten()
    place = scratch if os.access(scratch, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".witness.") as resaved:
        places = _places(folder, auto_class) if find_spec("accelerate") is not None else {}
        if places:
            values |= {"device_map": places, "offload_folder": resaved}
        yield auto_class.from_pretrained(folder, **values).eval()


def _quieten() -> None:
    """Switch off bars and warnings of weights on the disk, for the rest of this process."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="accelerate")


def _places(folder: Path, auto_class: Any) -> dict[str, str]:
    """Module -> "disk" in layers, "cpu" elsewhere, of all modules that hold weights; empty for a model in one part."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = auto_class.from_config(config)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    # The second names of a shared table too: transformers 4 looks for them.
    found = {
        name: "disk" if any(name.startswith(f"{layers}.") for layers in lists) else "cpu"
        for name, module in model.named_modules(remove_duplicate=False)
        if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    }
    return found if "disk" in found.values() and "cpu" in found.values() else {}
