"""Section ``training``: batches, length, precision, recompute, evaluation and op backends."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from trainer.config.kernel_names import BackendChoice
from trainer.config.sections.section import Section

LOSS_CHUNK_SIZE = 1024
"""Enough rows for a matrix product at full speed; 256 MiB of bfloat16 logits with a vocabulary of 128 Ki."""
_RENAMED = {"own": "native", "eager": "reference"}
"""Names of release 0.1.0."""
_REMOVED = {
    "nvrtc": "NVRTC builds the GPU code of native where there is no nvcc; use native or auto",
    **dict.fromkeys(("compile", "triton"), "this backend was removed; use auto, native, torch or reference"),
}
"""Backends of earlier releases, with what to use instead."""


def _current_name(name: Any) -> Any:
    """The present name of a backend. Refuses removed backends with their replacement."""
    if not isinstance(name, str):
        return name
    if name in _REMOVED:
        raise ValueError(_REMOVED[name])
    return _RENAMED.get(name, name)


def replace_removed_backends(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A stored config with ``auto`` for removed backends, and one sentence for each.

    A run that an earlier release began goes on, while a new config that names such a backend is refused.

    Args:
        stored: all sections, as a run's record or a checkpoint has them.
    """
    training = stored.get("training")
    if not isinstance(training, Mapping):
        return dict(stored), []
    changed, named = dict(training), training.get("kernel_backends")
    found = {"kernel_backend": training.get("kernel_backend")}
    found |= {f"kernel_backends.{op}": name for op, name in named.items()} if isinstance(named, Mapping) else {}
    removed = {key: name for key, name in found.items() if isinstance(name, str) and name in _REMOVED}
    if "kernel_backend" in removed:
        changed["kernel_backend"] = "auto"
    if isinstance(named, Mapping):
        changed["kernel_backends"] = {
            op: "auto" if f"kernel_backends.{op}" in removed else name for op, name in named.items()
        }
    notes = [f"training.{key}: {name}, of an earlier release, is taken as auto" for key, name in removed.items()]
    return {**stored, "training": changed}, notes


BackendKey = Annotated[BackendChoice, BeforeValidator(_current_name)]
"""Name of a backend."""


class TrainingConfig(Section):
    """Batch sizes, training length, precision, recompute, evaluation and op backends."""

    train_iters: NonNegativeInt
    """Iterations of the whole run."""
    seq_length: PositiveInt
    """Tokens of a sample; with model.architecture t5 those of the encoder."""
    decoder_seq_length: PositiveInt = 128
    """With model.architecture t5: tokens of the decoder."""
    micro_batch_size: PositiveInt = 1
    """Samples that a replica computes at a time."""
    global_batch_size: PositiveInt | None = None
    """Samples per iteration. Unset: micro_batch_size x dp, which fits any number of nodes."""
    rampup_batch_size: list[int] = []
    """START, INCREMENT and SAMPLES: the batch grows from START samples to global_batch_size, by INCREMENT at a time, in
    equal parts of the first SAMPLES samples. The learning rate and the weight decay then follow the samples: an
    iteration of their schedules is global_batch_size samples. Unset: every batch is full."""
    step_batch_size_schedule: str | None = None
    """Batch sizes in steps, instead of global_batch_size: TOKENS:SIZE for each, such as 0:768 250B:1536. A step begins
    with the first batch after that many tokens, in whole samples of seq_length, and may be smaller than the one before.
    As with rampup_batch_size, schedules follow the samples; one of their iterations, and each batch of an evaluation,
    is the last size."""
    bf16: bool = False
    """Train in bfloat16, with float32 masters. Without bf16 and fp16, in float32."""
    fp16: bool = False
    """Train in float16, with float32 masters and a loss scale."""
    loss_scale: PositiveFloat | None = None
    """Constant fp16 loss scale. Unset: dynamic loss scaling."""
    initial_loss_scale: PositiveFloat = 2.0**32
    """With fp16 and a dynamic loss scale: the scale at the start."""
    min_loss_scale: PositiveFloat = 1.0
    """With fp16 and a dynamic loss scale: the smallest scale."""
    loss_scale_window: PositiveInt = 1000
    """Steps in a row without an overflow after which the loss scale is doubled."""
    hysteresis: PositiveInt = 2
    """Overflows until the loss scale is halved. Each further one halves it too, until loss_scale_window steps in a row
    have none."""
    max_skipped_steps: NonNegativeInt = 10
    """End the run as failed after this many steps in a row whose gradients were not finite. 0: no limit. With fp16 a
    step counts only when the loss scale cannot fall any more. Until a step is finite again, nothing is saved."""
    skipped_steps_window: NonNegativeInt | None = None
    """End the run too when more than max_skipped_steps of this many last steps were skipped. Unset: twice
    max_skipped_steps, so more than half. 0: only steps in a row count."""
    replay_skipped_steps: bool = True
    """Compute a step whose gradients were not finite again, the first of several in a row, and tell the first rank,
    module and direction in which a number was not finite. If the second result differs, a machine has computed wrongly.
    It costs the time of one step."""
    on_loss_spike: Literal["nothing", "tell", "skip", "stop", "roll_back"] = "tell"
    """The consequence of a loss far above those before it. skip: no step is made of its samples, at the
    cost of a small message before every step; stop: the run ends as failed; roll_back: so does the attempt, and the
    next one begins at the newest checkpoint and passes over all samples up to the spike. See job.max_restarts."""
    loss_spike_factor: PositiveFloat = 6.0
    """A loss is a spike if it lies above the median of those before it by more than this number of standard deviations,
    which are estimated by the median of the distances from the median, at the least 1% of it."""
    loss_spike_window: int = Field(128, ge=8)
    """Number of losses by which a spike is judged, once half of them are there."""
    iterations_to_skip: list[PositiveInt] = []
    """Numbers of iterations whose samples are passed over: they count, and no step is made."""
    check_weight_hash_across_dp_replicas_interval: PositiveInt | None = None
    """Iterations between comparisons of the weights that data-parallel ranks hold copies of, by hashes of their bits.
    If they differ, the run ends as failed, and names the ranks, their machines and the first such weight. Unset:
    nothing is compared."""
    seed: int = Field(1234, ge=0, le=2**63 - 1)
    """Seed of weights, dropout and the order of the data."""
    eval_interval: PositiveInt = 1000
    """Iterations between evaluations on the validation data."""
    eval_iters: NonNegativeInt = 100
    """Iterations per evaluation; 0 disables evaluation."""
    manual_gc: bool = False
    """Collect Python's garbage only at manual_gc_interval and manual_gc_eval, on all ranks at the same time, and not
    when Python's thresholds are passed. Either way, objects that exist before the first step are not searched."""
    manual_gc_interval: NonNegativeInt = 0
    """With manual_gc: iterations between collections. 0: none between iterations."""
    manual_gc_eval: bool = True
    """With manual_gc: collect before and after each evaluation too."""
    exit_interval: PositiveInt | None = None
    """Save a checkpoint and exit when the iteration is a multiple of this number."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save a checkpoint and exit after the first iteration that ends this long after the training began."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations to recompute in backward. selective: the modules in recompute_modules; full: whole layers."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full. uniform: all layers, in groups of recompute_num_layers; block: the first recompute_num_layers layers
    of each virtual stage."""
    recompute_num_layers: PositiveInt | None = None
    """Layers per group or stage, see recompute_method."""
    recompute_modules: list[str] = []
    """With selective: any of core_attn, mlp, layernorm, moe, moe_act, and mlp_act, the dense layers' moe_act: backward
    recomputes only the activation, such as SwiGLU, whose input is kept. Unset: core_attn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto: a GPU where torch finds one, else the CPU."""
    deterministic_mode: bool = False
    """Use deterministic kernels of PyTorch only; an operation that has none ends the run."""
    disable_bf16_reduced_precision_matmul: bool = False
    """On GPUs, products in bf16 add the parts of a sum in float32 only. Off: PyTorch's default, which allows bf16."""
    kernel_backend: BackendKey = "auto"
    """Backend of the memory-bound ops: native (csrc, compiled for this machine), torch (its fused functions), or
    reference (plain PyTorch). auto: the first available backend that passes its self-test, in this order."""
    kernel_backends: dict[str, BackendKey] = {}
    """Backend per op, as in ``rope: reference``. trainer.planning.kernel_choice lists the ops."""
    no_masked_softmax_fusion: bool = False
    """Compute the softmax of attention by plain PyTorch. Affects speed only."""
    no_bias_gelu_fusion: bool = False
    """Affects speed only: activation_func and openai_gelu select the GeLU. (Megatron-LM's fused GeLU is the tanh
    approximation, which an imported script asks for by activation_func.)"""
    no_bias_swiglu_fusion: bool = False
    """Compute the activation of gated feed-forward layers by plain PyTorch. Affects speed only."""
    no_bias_dropout_fusion: bool = False
    """Compute bias, dropout and residual add by plain PyTorch. Affects speed only."""
    no_rope_fusion: bool = False
    """Compute rope by plain PyTorch. Affects speed only."""
    cross_entropy_loss_fusion: bool = True
    """Compute the loss by a fused kernel. Affects speed and memory only."""
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = "native"
    """native, te: the loss of a micro-batch at once, from its logits. linear: output layer and loss in chunks of
    loss_chunk_size tokens; backward computes the logits of each chunk again, so that those of a whole micro-batch are
    never held. The gradient of the output table is then summed chunk by chunk, which rounds it in another way."""
    loss_chunk_size: PositiveInt | None = None
    """With cross_entropy_fusion_impl linear: tokens whose logits are held at once. Unset: 1024."""
    moe_permute_fusion: bool = True
    """Sort tokens by expert with a fused kernel. Affects speed only."""

    @property
    def chunk_of_loss(self) -> int | None:
        """Tokens whose logits the loss holds at once; None: those of the whole micro-batch."""
        return (self.loss_chunk_size or LOSS_CHUNK_SIZE) if self.cross_entropy_fusion_impl == "linear" else None
