"""The program behind ``llmctl checkpoint import|export|show|verify``: checkpoints and Hugging Face folders."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.find import all_checkpoints, find_checkpoint, holds_native
from trainer.checkpoint.foreign import foreign_format
from trainer.checkpoint.metadata import load_metadata
from trainer.checkpoint.verification import find_damage
from trainer.commands.model_description import describe_model
from trainer.commands.model_page import render_page
from trainer.config.checkpoint_flags import parse
from trainer.config.command_parser import print_text
from trainer.config.errors import ConfigError
from trainer.config.foreign_formats import ForeignFormat
from trainer.config.records.json_text import json_text
from trainer.conversion.distributed_files import DistributedFiles
from trainer.conversion.errors import ConversionError
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub, total_bytes
from trainer.conversion.import_megatron import MegatronModel, import_megatron, iteration_folder
from trainer.conversion.verify import verify_export
from trainer.conversion.witness import has_witness
from trainer.families.format.errors import FamilyError
from trainer.families.format.quantization import CONFIG_KEY
from trainer.families.gguf.header import is_gguf
from trainer.hub.errors import HubError
from trainer.hub.folder import CONFIG, HubFolder
from trainer.hub.gguf_file import GgufFile
from trainer.hub.published import PublishedModel

_FAILED = 1
_USAGE = 2
_BAD_INPUT = 3


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; returns 3 for input that cannot be used, 1 for damage or logits that differ."""
    command = arguments[0] if arguments else ""
    if command not in _COMMANDS:
        print(f"llmctl checkpoint: the commands are {', '.join(_COMMANDS)}", file=sys.stderr)
        return _USAGE
    options = parse(command, arguments[1:])
    options.source = Path(options.source)
    try:
        return _COMMANDS[command](options)
    except (CheckpointError, ConfigError, ConversionError, FamilyError, HubError) as error:
        print(f"llmctl checkpoint {command}: {error}", file=sys.stderr)
        return _BAD_INPUT


def _import(options: argparse.Namespace) -> int:
    if is_gguf(options.source):
        with GgufFile(options.source) as source:
            _import_published(source, options.output)
        return _say_not_compared("transformers reads no GGUF file as it is", options)
    if not options.source.is_dir():
        raise ConversionError(f"{options.source}: is not a folder; name a folder with a config.json, or a GGUF file")
    found = foreign_format(options.source)
    if found is ForeignFormat.TORCH_DIST:
        return _import_megatron(options)
    if found in (ForeignFormat.TORCH, ForeignFormat.ZARR):
        raise ConversionError(f"{options.source} {found.problem}")
    if found is None and holds_native(options.source):
        raise ConversionError(
            f"{options.source}: is a checkpoint of this trainer already; name it in checkpoint.load, or export it: "
            f"llmctl checkpoint export {options.source} --output HF_DIR"
        )
    with HubFolder(options.source, drops_prediction_layers=options.drop_mtp) as folder:
        if folder.num_dropped:
            print(f"leaving out {folder.num_dropped} tensors of prediction layers")
        checkpoint = _import_published(folder, options.output)
    return 0 if options.no_verify else _verify_import(checkpoint, options)


def _verify_import(checkpoint: Path, options: argparse.Namespace) -> int:
    """Compare the checkpoint with transformers; without a witness say so."""
    if not has_witness():
        return _say_not_compared("transformers is not installed", options)
    if CONFIG_KEY in json.loads((options.source / CONFIG).read_text(encoding="utf-8")):
        return _say_not_compared("transformers computes quantized weights in another way", options)
    try:
        return _verify_pair(checkpoint, options.source)
    except ConversionError as error:
        return _say_not_compared(str(error), options)


def _say_not_compared(reason: str, options: argparse.Namespace) -> int:
    if not options.no_verify:
        print(f"note: the logits were not compared: {reason}", file=sys.stderr)
    return 0


def _import_published(source: PublishedModel, output: Path) -> Path:
    print(f"{source.family.name}, {source.num_tensors} tensors, {total_bytes(source) / 1e9:.2f} GB")
    with _progress("import", total_bytes(source)) as advance:
        checkpoint = import_hub(source, output, advance)
    for note in source.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"wrote {checkpoint}")
    return checkpoint


def _import_megatron(options: argparse.Namespace) -> int:
    with DistributedFiles(iteration_folder(options.source)) as files:
        source = MegatronModel.of(files)
        print(f"GPT of Megatron-core, {len(source.sources)} tensors, {source.total_bytes / 1e9:.2f} GB")
        with _progress("import", source.total_bytes) as advance:
            checkpoint = import_megatron(source, options.output, advance)
    print(f"wrote {checkpoint}")
    return _say_not_compared("transformers does not read torch_dist", options)


def _export(options: argparse.Namespace) -> int:
    checkpoint = find_checkpoint(options.source)
    export = Export.open(checkpoint)
    print(
        f"{checkpoint}: {export.family.name}, iteration {export.metadata.iteration}, {export.total_bytes / 1e9:.2f} GB"
    )
    for note in export.metadata.notes:
        print(f"note: {checkpoint}: {note}", file=sys.stderr)
    with _progress("export", export.total_bytes) as advance:
        count = export_hub(export, options.output, advance, options.max_shard_bytes)
    print(f"wrote {count} tensors to {options.output}")
    return 0 if options.no_verify else _verify_pair(checkpoint, options.output)


def _verify(options: argparse.Namespace) -> int:
    if options.against is not None:
        return _verify_pair(find_checkpoint(options.source), options.against)
    checkpoints = all_checkpoints(options.source) or [find_checkpoint(options.source)]
    damaged = 0
    for checkpoint in checkpoints:
        begin = time.monotonic()
        problem = find_damage(checkpoint)
        if problem is not None:
            damaged += 1
            print(f"{checkpoint} {problem}", flush=True)
            continue
        metadata = load_metadata(checkpoint)
        size = sum(metadata.files.values())
        seconds = max(time.monotonic() - begin, 1e-9)
        what = f"all {size / 1e6:,.1f} MB as written ({size / 1e6 / seconds:,.0f} MB/s)"
        if not metadata.checksums:
            what = "all files and all parts of all tensors are there; an older release wrote no checksums"
        print(f"{checkpoint}: {what}", flush=True)
    if damaged:
        print(f"llmctl checkpoint verify: {damaged} of {len(checkpoints)} checkpoints damaged", file=sys.stderr)
    return _FAILED if damaged else 0


def _verify_pair(checkpoint: Path, folder: Path) -> int:
    found = verify_export(checkpoint, folder)
    verdict = "equal" if found.is_good else f"DIFFERENT, above the bound {found.bound:.1e}"
    print(
        f"{found.tensors} tensors; logits of {found.tokens:,} tokens by {found.witness}: "
        f"largest difference {found.difference:.1e}, {verdict}"
    )
    return 0 if found.is_good else _FAILED


def _show(options: argparse.Namespace) -> int:
    found = describe_model(options.source)
    if options.as_json:
        print_text(json_text(found.as_document(), indent=1))
    else:
        print_text(render_page(found, with_tensors=options.tensors, is_for_people=sys.stdout.isatty()))
    return 0 if found.problem is None else _BAD_INPUT


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; elsewhere one line at the end."""
    begin = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        yield lambda count: None  # noqa: ARG005
    seconds = time.monotonic() - begin
    print(f"{what}: {total / 1e6:.1f} MB in {seconds:.1f} s", file=sys.stderr)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "import": _import,
    "export": _export,
    "show": _show,
    "verify": _verify,
}
