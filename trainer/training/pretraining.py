"""One pretraining run on one rank, from its checks to success or failure."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.checkpoint.resume import check_start_point
from trainer.checkpoint.save import CheckpointWriter
from trainer.checkpoint.saved_progress import (
    agree_on_saved_progress,
    await_checkpoints,
    check_start_is_not_missing,
    describe_lack,
)
from trainer.checkpoint.saved_schedule import follow_saved_schedule
from trainer.data.loading.build import build_data
from trainer.data.loading.loader import DEPTH, BatchLoader
from trainer.data.loading.loader_sharing import BatchRole, mapped_role, streaming_role
from trainer.distributed.collectives import any_rank, from_first_rank
from trainer.distributed.flight_record import write_flight_record
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.rendezvous import join_ranks
from trainer.hooks.chosen import Hooks
from trainer.hooks.user_function import HookError
from trainer.ops.attention.backend import check_backend
from trainer.ops.dispatch.flash_attn_agreement import Tried, try_flash_attn, with_flash_attn, with_torch_trial
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model, parameter_dtype
from trainer.planning.estimate.device_peaks import known_peak_tflops
from trainer.planning.flops import count_parameters, flops_per_token
from trainer.preflight.start import choose_sound_device, run_preflight
from trainer.process.device import device_name
from trainer.process.failure import PeerFailedError, record_failure
from trainer.process.heartbeat import KERNEL_BUILD, Heartbeat
from trainer.process.metrics import SpeedScale
from trainer.process.precision import precision_warnings
from trainer.process.progress import TrainingProgress
from trainer.process.run_directory import write_json
from trainer.process.run_lock import RunLock
from trainer.process.stop import StopRequest
from trainer.trackers.tracking import Tracking
from trainer.training.collective_counts import CollectiveCounts
from trainer.training.copying import go_on
from trainer.training.exit_codes import COMPLETED, INTERRUPTED, exit_code_of, is_sentence
from trainer.training.kernel_build import KernelSwitch, prepare_kernels
from trainer.training.loop import Ending, TrainingLoop
from trainer.training.peer_failure import PeerFailure
from trainer.training.profile.step_profile import StepProfile
from trainer.training.row_output import begin_rows
from trainer.training.run_summary import describe_start, summarize_run
from trainer.training.task_evaluation import TaskEvaluation

if TYPE_CHECKING:
    from trainer.config.records.saved_progress import SavedProgress
    from trainer.config.train_config import TrainConfig
    from trainer.data.samples.batches import TrainData
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.dispatch.background_build import BackgroundKernels
    from trainer.ops.dispatch.selection import KernelSelection
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.run_directory import RunDirectory


@dataclass(frozen=True)
class _Attempt:
    """State of one rank before the rendezvous, and the lock that it takes at this point.

    Attributes:
        lock: of the run directory, on rank 0.
        fencing_token: of the lock, on all ranks; 0 without a run directory.
    """

    config: TrainConfig
    launch: LaunchEnvironment
    run: RunDirectory | None
    settings: BuildSettings
    mesh: ParallelMesh
    progress: TrainingProgress
    heartbeat: Heartbeat
    stop: StopRequest
    tracking: Tracking
    lock: RunLock | None = None
    fencing_token: int = 0


def run_pretraining(
    config: TrainConfig, launch: LaunchEnvironment, run: RunDirectory | None, settings: BuildSettings
) -> int:
    """Train, and report the outcome on stderr and in the run directory.

    Collective: all ranks of the job.

    Returns:
        Exit code of the process: 0 completed or stopped as asked, 1 failed, 3 bad config, 130 interrupted. After
        any other code than 0 the process should exit at once: other ranks may be dead, and collectives pending.
    """
    mesh = ParallelMesh.build(config, launch.rank, launch.world_size)
    progress = TrainingProgress(seed=config.training.seed)
    stop_file = run.stop_request if run is not None and launch.rank == 0 else None
    with (
        Heartbeat(run.heartbeat(launch.rank) if run is not None else None, launch.rank) as heartbeat,
        StopRequest(stop_file) as stop,
        Tracking(heartbeat) as tracking,
    ):
        attempt = _Attempt(config, launch, run, settings, mesh, progress, heartbeat, stop, tracking)
        try:
            _train(attempt)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            return _report(attempt, error)
    return COMPLETED


def _report(attempt: _Attempt, error: Exception) -> int:
    """Report this rank's failure; returns the exit code."""
    run, mesh, heartbeat, iteration = attempt.run, attempt.mesh, attempt.heartbeat, attempt.progress.iteration
    who = mesh.describe(mesh.rank)
    # A collective in a user's function may fail because of a peer too.
    origin = error.__cause__ or error if isinstance(error, HookError) else error
    failure = PeerFailure.of(origin, mesh, heartbeat.phase)
    consequence = failure.sentence(mesh, run) if failure is not None else ""
    code = exit_code_of(error)
    record = record_failure(run, mesh.rank, who, iteration, error, exit_code=code, consequence=consequence)
    if isinstance(error, PeerFailedError):
        print(f"trainer: {who}: {error}", file=sys.stderr, flush=True)
        return code
    if failure is None:
        # A rank that has lost a peer keeps the phase in which it waited: it tells who waited for whom.
        heartbeat.beat(iteration, "failed")
    if is_sentence(error):
        print(f"trainer: {who}: {error}", file=sys.stderr, flush=True)
        return code
    if failure is None or record is None:
        print(f"trainer: {who} failed at iteration {iteration}:", file=sys.stderr)
        traceback.print_exc()
        return code
    # The record is written already, with its time; now there is time to find out which ranks are silent.
    record = replace(record, message=failure.sentence(mesh, run, failure.silent_peers(run)))
    record.write(run)
    print(f"trainer: {who} at iteration {iteration}: {record.message}", file=sys.stderr, flush=True)
    # With a run directory the record has the traceback.
    if failure.is_late or run is None:
        traceback.print_exc()
    return code


def _train(attempt: _Attempt) -> None:
    # All checks that one rank can make alone come before the rendezvous.
    config, run, mesh, progress = attempt.config, attempt.run, attempt.mesh, attempt.progress
    device = choose_sound_device(config, attempt.launch)
    check_backend(config.model, parameter_dtype(config.training), device)
    check_start_point(config.checkpoint, _save_root(config, run))
    Hooks.load(config.hooks)
    data = build_data(config, mesh.dp_rank, mesh.dp, run.path if run is not None else None)
    tasks = TaskEvaluation.open(config, data.vocab_size, mesh.rank)
    if mesh.rank == 0:
        attempt.tracking.choose(config.logging)
    if config.training.deterministic_mode:
        # Only then: the call imports torch's compiler, which takes each rank more than a second.
        torch.use_deterministic_algorithms(True)
    tried = try_flash_attn(config, parameter_dtype(config.training), device) if attempt.launch.local_rank == 0 else None
    attempt.heartbeat.beat(0, "rendezvous")
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    attempt.heartbeat.follow(CollectiveCounts().read)
    if run is not None:
        attempt.heartbeat.keep_at_hang(partial(write_flight_record, run.flight_record(mesh.rank)))
    join_ranks(attempt.launch.rank, attempt.launch.world_size, device, timeout)
    if config.job.preflight != "off":
        attempt.heartbeat.beat(0, "preflight")
        parameters = count_parameters(config, data.vocab_size).total
        run_preflight(config, attempt.launch, device, run, _save_root(config, run), parameters, attempt.heartbeat)
    with ExitStack() as resources:
        attempt = _lock(attempt, device, resources)
        saved = _await_saved_progress(attempt, device)
        ending = _run(_build_loop(attempt, device, tried, data, resources, tasks, saved), mesh.rank)
        attempt.heartbeat.beat(progress.iteration, ending)
        attempt.tracking.outcome = ending
        if run is not None and mesh.rank == 0:
            write_json(
                run.outcome, {"reason": ending, "iteration": progress.iteration, "time": time.time()}, durable=True
            )
    # Rank 0 may host the store that other ranks still use.
    if attempt.launch.world_size > 1:
        dist.barrier()
    dist.destroy_process_group()


def _lock(attempt: _Attempt, device: torch.device, resources: ExitStack) -> _Attempt:
    """Lock the run directory on rank 0, until ``resources`` are closed; the attempt with its lock.

    Collective: all ranks.

    Raises:
        LockedRunError: another attempt trains in it.
        PeerFailedError: rank 0 met that.
    """
    problem: Exception | None = None
    lock: RunLock | None = None
    if attempt.run is not None and attempt.mesh.rank == 0:
        lock = resources.enter_context(RunLock(attempt.run.lock))
        try:
            lock.acquire()
        except Exception as error:
            problem = error
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError("the run directory is in use; rank 0 reports by whom")
    (token,) = from_first_rank([lock.token if lock is not None else 0], device)
    return replace(attempt, lock=lock, fencing_token=token)


def _await_saved_progress(attempt: _Attempt, device: torch.device) -> SavedProgress | None:
    """Progress that this run must continue, once all ranks see its checkpoints. Collective: all ranks.

    Raises:
        CheckpointError, ConfigError: this rank sees no checkpoint that the run needs.
        PeerFailedError: another rank met that.
    """
    checkpoint, rank = attempt.config.checkpoint, attempt.mesh.rank
    save = _save_root(attempt.config, attempt.run)
    saved = agree_on_saved_progress(attempt.run, checkpoint.save_interval, rank, device)

    def goes_on() -> bool:
        attempt.heartbeat.beat(0, "waiting for the checkpoints")
        return not attempt.stop.is_made()

    if saved is not None and save is not None:
        await_checkpoints(saved, save, checkpoint.wait_for_folder_s, rank, device, goes_on)
    check_start_is_not_missing(checkpoint, save, rank, device)
    return saved


def _save_root(config: TrainConfig, run: RunDirectory | None) -> Path | None:
    if config.checkpoint.save is not None:
        return Path(config.checkpoint.save).expanduser()
    return run.checkpoints if run is not None else None


def _build_loop(
    attempt: _Attempt,
    device: torch.device,
    tried: Tried | None,
    data: TrainData,
    resources: ExitStack,
    tasks: TaskEvaluation | None,
    saved: SavedProgress | None,
) -> TrainingLoop:
    config, run, mesh, progress = attempt.config, attempt.run, attempt.mesh, attempt.progress
    save = _save_root(config, run)
    selection, following = _choose_kernels(attempt, device, tried, resources, saved)
    attempt.heartbeat.beat(0, "building the model")
    # Ranks reach this collective at different times, because one rank of each node builds the kernels.
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    groups = build_process_groups(mesh, timeout, config.parallel.high_priority_stream_groups)
    loss, size = Hooks.load(config.hooks).token_loss(config), data.vocab_size
    # A run that has saved goes on from a checkpoint of its own, which has every weight, or ends.
    model = build_model(config, size, mesh, groups, device, selection.kernels, draws=saved is None, token_loss=loss)
    optimizer = MixedPrecisionOptimizer(config, model)
    number = run.attempt if run is not None else 1
    labels = selection.labels
    writer = None
    if save is not None:
        writer = _build_writer(attempt, save, number, data.vocab_size, device, labels)
        writer.prepare(mesh.rank, has_saved=saved is not None)
    attempt.heartbeat.beat(0, "loading")
    state = (model, optimizer, progress)
    copies, start = go_on(config, data.vocab_size, attempt.launch, run, state, device, save, labels, saved)
    config, writer = follow_saved_schedule(config, start.checkpoint, save, writer, mesh.rank)
    saved_iteration = start.saved_iteration(save)
    if writer is not None and mesh.rank == 0:
        writer.note_saved(saved_iteration)
    loader = _build_loader(config, mesh, data, progress, device)
    resources.callback(loader.close)
    metrics = None
    if mesh.rank == 0:
        metrics = begin_rows(config, mesh, run, attempt.lock, attempt.tracking, progress, save)
        resources.callback(metrics.close)
        _print_summary(config, mesh, device, data, selection, start.place, progress)
    return TrainingLoop(
        config=config,
        model=model,
        optimizer=optimizer,
        data=loader,
        progress=progress,
        speed=_speed_scale(config, mesh, data.vocab_size, device),
        stop=attempt.stop,
        heartbeat=attempt.heartbeat,
        device=device,
        writer=writer,
        tasks=tasks,
        metrics=metrics,
        lock=attempt.lock,
        attempt=number,
        saved_iteration=saved_iteration,
        switch=KernelSwitch(following, model.kernels) if following is not None else None,
        copies=copies,
        profile=StepProfile.of_run(config.logging, run, mesh.rank, device),
    )


def _choose_kernels(
    attempt: _Attempt, device: torch.device, tried: Tried | None, resources: ExitStack, saved: SavedProgress | None
) -> tuple[KernelSelection, BackgroundKernels | None]:
    """Kernels for the first iterations, flash-attn's among them, and those that follow. Collective: all ranks."""
    config, heartbeat = attempt.config, attempt.heartbeat
    dtype = parameter_dtype(config.training)
    heartbeat.beat(0, KERNEL_BUILD)
    is_new = saved is None and _starts_anew(attempt, device)
    selection, following = prepare_kernels(
        config, attempt.settings, attempt.launch, device, dtype, heartbeat, resources, is_new=is_new
    )
    selected = with_flash_attn(selection, config.model, dtype, device, tried)
    return with_torch_trial(selected, config, dtype, device), following


def _starts_anew(attempt: _Attempt, device: torch.device) -> bool:
    """True if rank 0 sees no checkpoint that the run could continue. Collective: all ranks."""
    config, save = attempt.config, _save_root(attempt.config, attempt.run)
    is_there = attempt.mesh.rank == 0 and save is not None and not describe_lack(save)
    may_start_anew = config.checkpoint.load is None or config.continues_save
    return may_start_anew and not any_rank(is_there, device)


def _speed_scale(config: TrainConfig, mesh: ParallelMesh, vocab_size: int, device: torch.device) -> SpeedScale:
    """The sizes by which the time of an iteration becomes tokens and operations per second."""
    return SpeedScale(
        tokens_per_iteration=config.global_batch_size(mesh.dp) * config.tokens_per_sample,
        flops_per_token=flops_per_token(config, vocab_size),
        devices=mesh.world_size,
        peak_tflops=config.logging.peak_tflops or known_peak_tflops(device_name(device)),
    )


def _build_writer(
    attempt: _Attempt, save: Path, number: int, vocab_size: int, device: torch.device, labels: Mapping[str, str]
) -> CheckpointWriter:
    record = attempt.run.saved if attempt.run is not None else None
    fence = (attempt.fencing_token, attempt.lock)
    writer = CheckpointWriter(save, attempt.config, vocab_size, number, device, labels, record, *fence)
    return writer.beside_training() if attempt.config.checkpoint.async_save else writer


def _build_loader(
    config: TrainConfig, mesh: ParallelMesh, data: TrainData, progress: TrainingProgress, device: torch.device
) -> BatchLoader:
    """The loader of this rank's batches from ``progress`` on. Collective: all ranks."""
    role: BatchRole
    data.restore(progress.data_state, progress.consumed_samples)
    if data.stream is None:
        role = mapped_role(mesh, data.has_documents)
    else:
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        role = streaming_role(mesh, data.has_documents, device, timeout)
    training, sizes = config.training, config.batch_sizes(mesh.dp)
    return BatchLoader(
        data,
        role,
        {"train": sizes.samples_after(training.train_iters), "valid": training.eval_iters * sizes.full},
        DEPTH if config.data.num_workers else 0,
        pinned_for=device if device.type == "cuda" else None,
    )


def _print_summary(
    config: TrainConfig,
    mesh: ParallelMesh,
    device: torch.device,
    data: TrainData,
    selection: KernelSelection,
    restored: Path | None,
    progress: TrainingProgress,
) -> None:
    lines = [*summarize_run(config, mesh, data.vocab_size, device_name(device)), *selection.lines(), *data.notes]
    lines.extend(precision_warnings(config, device))
    print("\n".join([*lines, *describe_start(config, restored, progress.iteration)]), flush=True)


def _run(loop: TrainingLoop, rank: int) -> Ending:
    train_iters = loop.config.training.train_iters
    if loop.progress.iteration >= train_iters:
        if rank == 0:
            print(f"nothing left to train: iteration {loop.progress.iteration} has reached train_iters {train_iters}")
        return "completed"
    ending = loop.run()
    if rank == 0:
        print(f"{ending} at iteration {loop.progress.iteration}", flush=True)
    return ending
