"""A complete config for a model that is there: text with comments, for ``llmctl init``."""

from typing import Any

import yaml

from llmctl.errors import UsageError
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters
from trainer.planning.start_model import LocalFiles, StartModel, named_model

_SAMPLE, _SHORT_SAMPLE = 2048, 256
_BATCH = 64
_TEXT = """\
# Training that starts from {source}: {parameters} parameters.
#   llmctl data prepare TEXT --output corpus --append-eod --tokenizer {quoted}
#   llmctl plan {name} --nodes 1
#   llmctl submit {name} --nodes 1
# It is long for a laptop. A first try of minutes:
#   llmctl submit {name} --set training.train_iters=20 --set training.global_batch_size=4 \\
#     --set training.seq_length={short} --set training.bf16=false
checkpoint:
  load: {quoted}
  finetune: true  # only the weights: training starts at iteration 0 with a fresh optimizer
  save_interval: 200  # iterations
  save_hugging_face: true  # beside each checkpoint, a folder that transformers reads
  keep_last: 2
data:
  data_path: [corpus_text_document]  # made by data prepare; or streaming: true, and files of text
{tokenizer}  split: "98,2,0"  # shares of train, valid and test
training:
  train_iters: 1000  # steps of {tokens:,} tokens; 20 for a try
  seq_length: {length}  # tokens of a sample; the model has {positions} positions
  micro_batch_size: 1  # samples that one replica computes at once
  global_batch_size: {batch}  # samples of an iteration, over all replicas; 4 for a try
  bf16: true  # false on CPUs, where it is slow
  eval_interval: 200
  eval_iters: 10
optimizer:
  lr: 2.0e-5  # a tenth of a rate of pretraining, to keep what the weights know
  min_lr: 2.0e-6
  lr_decay_style: cosine
  lr_warmup_fraction: 0.05
  weight_decay: 0.01
parallel:
  tensor_model_parallel_size: 1  # llmctl plan --search ranks the layouts
  pipeline_model_parallel_size: 1
# The model of {where}. A key that makes another model of its weights is refused.
model:
{model}"""


def first_config(source: str, name: str) -> str:
    """Text of a config that trains a model further.

    Args:
        source: a Hugging Face folder, a GGUF file or a folder of checkpoints, absolute.
        name: of the file that it is for.

    Raises:
        UsageError: the path holds no model, or one that is not known here.
    """
    try:
        start = named_model("--from", source, LocalFiles())
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if start is None:
        raise UsageError(
            f"--from: there is no model in {source}; name a Hugging Face folder, a folder of checkpoints or a script"
        )
    text = _text(source, name, start)
    try:
        build_config(yaml.safe_load(text))
    except ConfigError as error:
        raise UsageError(f"--from: {source} makes no config: {error}") from None
    return text


def _text(source: str, name: str, start: StartModel) -> str:
    positions = start.values.get("max_position_embeddings") or _SAMPLE
    length = min(_SAMPLE, positions)
    training = {"train_iters": 1, "seq_length": positions}
    shape = build_config({"model": dict(start.values), "training": training, "optimizer": {"lr": 1.0}})
    tokenizer = "" if start.tokenizer is None else f"  tokenizer_model: {_quoted(start.tokenizer)}\n"
    keys = "".join(f"  {line}\n" for line in yaml.safe_dump(dict(start.values), sort_keys=False).splitlines())
    return _TEXT.format(
        source=source,
        name=name,
        quoted=_quoted(source),
        parameters=f"{count_parameters(shape, start.values['vocab_size']).total:,}",
        tokenizer=tokenizer,
        length=length,
        short=min(_SHORT_SAMPLE, length),
        batch=_BATCH,
        tokens=_BATCH * length,
        positions=f"{positions:,}",
        where=start.where,
        model=keys,
    )


def _quoted(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, width=10_000).removesuffix("\n...\n").strip()
