"""PyTorch's distributed checkpoints as a format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from reshard.choices import MissingMoments, OpaquePolicy, ParamOrder
from reshard.dcp_options import DcpOptions, Framework
from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard.models.resume import ResumeLayout, RunLaunch, identity_of
from reshard.options import RunLayout
from reshard_engine.checkpoint import Checkpoint, Question
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.dcp.facts import SHARD_FILE, DcpFacts, facts_of, framework_of_source
from reshard_engine.formats.dcp.reader.huggingface_shards import HuggingFaceShardsReader
from reshard_engine.formats.dcp.reader.reader import DcpReader, TrainerReader
from reshard_engine.formats.dcp.state_tree import (
    OF_ONE_FILE,
    TARGET_KEYS,
    StateTree,
    optimizers_of,
    other_keys,
    read_state_tree,
    read_torch_tree,
)
from reshard_engine.formats.dcp.writer.writer import MODEL_FOLDER, DcpWriter, WholeFilesWriter, writes_named_files
from reshard_engine.formats.dcp_files.metadata.model import DATA_FILE, METADATA_FILE, SUFFIX
from reshard_engine.formats.format import Completion, Discovery, DryRun, Format, Presentation, Reader, Writer
from reshard_engine.formats.model_weights import refuse_wrapped, unloadable
from reshard_engine.formats.numbered import entries_of
from reshard_engine.formats.trainer_files import (
    FULL_MODEL,
    META,
    NUMBERED_OPTIMIZER,
    OPTIMIZERS,
    SCRIPTS_FILE,
    framework_of,
    read_companions,
    trainer_facts,
)
from reshard_engine.pickles.nodes import Node, PLiteral, PTensor, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import read_bytes
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import KnownFiles
from reshard_engine.tensors.shard_map import is_packed

_WHOLE_FILES = (
    *(f"{stem}{number}.bin" for stem in (FULL_MODEL, OPTIMIZERS) for number in ("", "_[0-9]", "_[0-9][0-9]")),
    *(NUMBERED_OPTIMIZER, "model-00001-of-00001.bin", "recipe_state.pt"),
)
"""Files of whole tensors: those of Accelerate and the Trainer without shards, and those of torchtune."""
_KEYS = {"framework", *TARGET_KEYS, *OF_ONE_FILE}
"""Options that ask for keys or numbers, as no tree that is kept has them."""


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (TrainerReader(), DcpReader(), HuggingFaceShardsReader())
    of_training = True
    files = KnownFiles(
        entries=(METADATA_FILE, "pytorch_model_fsdp_0"),
        suffixes=(SUFFIX,),
        needed=(METADATA_FILE, META, *_WHOLE_FILES),
    )
    takes_choices = True


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """A file of `torch.save`, or a whole state dict for a target that is such a file.

        Whoever asks for a framework's keys, or says an order, wants the training state, not the tree as it is.
        """
        if request.to not in Dcp.targets:
            return None
        options = request.options.of(DcpOptions)
        place = location if request.source.tag is None else location.child(*request.source.tag.split("/"))
        if request.to == "torch_save":
            if _KEYS & {*options.given()}:
                return None
            state = read_state_tree(place, ledger)
            if state is None and not request.source.given():
                state = _file_as_it_is(place, ledger)
            return None if state is None else replace(state, family=Dcp.name)
        tree = _file_as_it_is(place, ledger)
        asked = other_keys(options) or request.source.given()
        if tree is None or (asked and optimizers_of(tree)):
            return None
        return replace(tree, family=Dcp.name)

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint, unless the request refuses parameters without optimizer states."""
        if (facts := facts_of(checkpoint)) is not None and (request.to == "dcp" or writes_named_files(request)):
            for other in facts.others:
                other.refuse_undecided(Question.GROUPS, *(() if request.exclude_frozen else (Question.BUFFERS,)))
        idle = [p.fqn for p in checkpoint.trained if p.never_updated]
        if idle and request.missing_moments is MissingMoments.REFUSE:
            raise RequestError(
                "request.unsatisfiable",
                f"{len(idle)} trained parameters have no optimizer states, as no gradient ever reached them: "
                f"{listed(idle)}",
                fix="--missing-moments zero writes the states that an optimizer begins with",
            )
        return checkpoint

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with the contents of `--trainer-files`, in place of what the source holds of them."""
        place = request.options.of(DcpOptions).trainer_files
        if place is None or request.to not in Dcp.targets:
            return checkpoint
        location = open_location(place, request.source.profile)
        return with_trainer_files(checkpoint, location, OpaqueLedger(request.opaque))

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """All but the names of numbered parameters, if the target keeps all models where the source has them."""
        facts, options = facts_of(checkpoint), request.options.of(DcpOptions)
        if request.to == "torch_save" and not writes_named_files(request):
            # Its optimizer numbers parameters, so that their order matters; in the model's order, frozen ones count.
            return () if options.target_param_order is ParamOrder.MODEL else (Question.BUFFERS,)
        always = (Question.GROUPS, *(() if request.exclude_frozen else (Question.BUFFERS,)))
        if facts is None or options.framework not in (None, facts.framework):
            return always
        moved = options.target_model_key is not None or options.target_optimizer_key is not None
        if moved:
            return (*always, Question.SCHEDULER)
        return (*always, Question.SCHEDULER, Question.MODEL, Question.OPTIMIZER)


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The rank that wrote the file, by its name."""
        name = file.rpartition("/")[2]
        if (match := DATA_FILE.fullmatch(name)) is not None:
            return f"rank {int(match[1])}"
        return f"rank {int(match[1]) - 1}" if (match := SHARD_FILE.fullmatch(name)) is not None else ""

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """A distributed checkpoint of any source."""
        refusal, read = tried.refusal("dcp"), tried.checkpoint
        if refusal is None:
            # A file keeps its own keys unless a framework is named.
            file = len(read.files) == 1 and read.url == read.files[0].objects[0].path
            flags = f"--to dcp --framework {Framework.STATE_DICT}" if file else "--to dcp"
            return [tried.possible("dcp", "any mesh; keys of --framework", flags)]
        return [tried.impossible("dcp", refusal)]


class Dcp(Format):
    """Checkpoints that `torch.distributed.checkpoint.save` writes, under the keys of several frameworks."""

    name = "dcp"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = ("dcp", "torch_save")

    def writer(self, target: str) -> Writer:
        """The writer of shards, or of files with whole tensors."""
        if target == "torch_save":
            return WholeFilesWriter()
        return DcpWriter()

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse the framework that loads no distributed checkpoint as the loader of one."""
        if request.to == "dcp" and request.options.of(DcpOptions).framework is Framework.TORCHTUNE:
            raise RequestError("request.invalid", "--framework torchtune: for --to torch_save", fix="--to torch_save")

    def check_names(self, place: Location, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        """Refuse files that the framework does not open, names of wrapping modules, and other keys than a script's."""
        if isinstance(checkpoint.facts, StateTree):
            return  # every key is as it was
        options = request.options.of(DcpOptions)
        if request.to == "torch_save":
            if not writes_named_files(request) and options.framework in (None, Framework.STATE_DICT):
                _check_one_file(place, checkpoint, options)
            return
        facts, framework = facts_of(checkpoint), options.framework or framework_of_source(checkpoint)
        # A trainer opens its directory of the model. Whoever else calls `dcp.load` does so with the directory itself.
        folder = f"{MODEL_FOLDER.format(0)}/" if framework in (Framework.ACCELERATE, Framework.TRAINER) else ""
        info = place.store.stat(place.child(*f"{folder}{METADATA_FILE}".split("/")).path)
        if info is None:
            raise unloadable(f"the target would have no {folder}{METADATA_FILE}, which {framework or 'dcp.load'} opens")
        own = facts is not None and facts.framework is framework  # with the names that the source has
        if not own and framework is not Framework.TORCHTITAN:
            key = options.target_model_key or "model"
            refuse_wrapped(_keys_below(read_bytes(place.store, info), key), checkpoint)

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
        """A distributed checkpoint, for any number of ranks, with the keys of the framework that loads it."""
        framework = launch.framework
        if framework is not None and framework not in {*Framework}:
            raise RequestError(
                "request.invalid",
                f"framework is {printable(framework)}",
                fix=f"one of {', '.join(Framework)}",
            )
        return ResumeLayout(
            to="dcp",
            layout=RunLayout(),
            free=tuple(RunLayout.model_fields),
            options={} if framework is None else {self.name: {"framework": framework}},
            dtype=launch.dtype,
            identity=identity_of({"grammar": framework}),
            label="-".join(["dcp", *([framework] if framework else [])]),
        )

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True for a distributed checkpoint of the same framework; of any, if the launch names none."""
        framework = wanted.options.get(self.name, {}).get("framework")
        own = checkpoint.facts.framework if isinstance(checkpoint.facts, DcpFacts) else None
        return wanted.dtype is None and (framework is None or framework == own)


def _file_as_it_is(place: Location, ledger: OpaqueLedger) -> Checkpoint | None:
    """The whole value of one file of `torch.save`; None for a directory."""
    info = place.store.stat(place.path)
    return None if info is None else read_torch_tree(place, info, ledger)


def _keys_below(metadata: bytes, key: str) -> list[str]:
    """The rest of each text below a key in the pickle of our own writer, which gives texts with four bytes of length.

    A parser of whole metadata takes as long as all else that is planned.
    """
    found: list[str] = []
    for match in re.finditer(rb"X(.{4})(?=" + re.escape(f"{key}.".encode()) + rb")", metadata, re.DOTALL):
        text = metadata[match.end() : match.end() + int.from_bytes(match[1], "little")]
        found.append(text.decode("utf-8", "replace").removeprefix(f"{key}."))
    return [*dict.fromkeys(found)]


def _check_one_file(place: Location, checkpoint: Checkpoint, options: DcpOptions) -> None:
    """Compare the keys of a planned file with those of the script's file that is the source.

    Raises:
        JobError: `internal.error`.
    """
    facts = trainer_facts(checkpoint)
    if facts.model_key is None or checkpoint.format != SCRIPTS_FILE:
        return
    info = place.store.stat(place.child(options.torch_file).path)
    root: Node = None
    if info is not None:
        file = SourceFile(place.store, options.torch_file, (info,))
        root = open_torch_file(file, OpaqueLedger(OpaquePolicy.KEEP)).root
    keys = entries_of(root)
    key = options.target_model_key or facts.model_key
    there = entries_of(keys.get(key) if key else root)
    wanted = {facts.saved_names.get(name, name) for name in checkpoint.shapes()}
    optimizer = options.target_optimizer_key or facts.optimizer_key
    lost = [*sorted(wanted - there.keys())]
    lost += [optimizer] if optimizer is not None and checkpoint.optimizer is not None and optimizer not in keys else []
    if lost:
        raise unloadable(f"{options.torch_file} would not have what the source's script loads by name: {listed(lost)}")


# A checkpoint with what a trainer's files hold. Their tensors are small (random states): bytes go into the trees.

_LIMIT_BYTES = 64 << 20


def with_trainer_files(checkpoint: Checkpoint, location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """The checkpoint with schedulers, random states, counters and objects of a trainer's directory.

    Raises:
        SourceError: `source.not_found` if the directory does not exist, and all errors of reading its files.
    """
    listing = location.store.list_directory(location.path)
    if not listing.files:
        where = printable(location.url)
        raise SourceError("source.not_found", f"no files of a trainer are in {where}", fix="name a checkpoint-N")
    found = read_companions(location, listing, ledger)
    schedulers = tuple(_literal(p, node) for p, node in found.schedulers)
    rng = tuple(
        {str(k): v for k, v in mapping_items(_literal(p, p.root), what=printable(p.file.name)).items()}
        for p, _ in found.rng
    )
    held = trainer_facts(checkpoint)
    facts = facts_of(checkpoint) or DcpFacts(
        None,
        texts=held.texts,
        rank_states=held.rank_states,
        other_models=held.other_models,
        saved_by=held.saved_by or framework_of(listing.by_name),
    )
    counters = checkpoint.counters if found.steps is None else replace(checkpoint.counters, steps=found.steps)
    if schedulers:
        checkpoint = replace(checkpoint, schedulers=schedulers, scheduler_keys=(), own_scheduler=0)
    return replace(
        checkpoint,
        counters=counters,
        client_state={**checkpoint.client_state, **{n: _literal(p, node) for p, n, node in found.client_state}},
        facts=replace(facts, texts={**facts.texts, **found.texts}, rank_states=rng or facts.rank_states),
        foreign_globals=tuple(sorted({*checkpoint.foreign_globals, *ledger.foreign})),
    )


def _literal(parsed: TorchFile, node: Node) -> Node:
    """The tree with its tensors as bytes."""

    def literal(tensor: PTensor) -> PLiteral:
        size = tensor.numel * BY_NAME[tensor.dtype].itemsize_bytes
        if size > _LIMIT_BYTES or not is_packed(tensor.shape, tensor.stride):
            raise SourceError(
                "source.unsupported", f"{printable(parsed.file.name)} holds a tensor that is large or not contiguous"
            )
        data = parsed.file.read(parsed.tensor_offset(tensor), size) if size else b""
        return PLiteral(tensor.dtype, tensor.shape, data)

    return rewrite(node, literal, lambda foreign: foreign)
