"""The protocols of a format, its readers and its writers: objects that answer every question of the engine about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from reshard.choices import ZeroStage
from reshard.errors import RequestError, ReshardError, listed
from reshard.models.jobs import ConvertRequest, PossibleTarget
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard.options import Options, SourceChoices, SourceSpec
from reshard_engine.checkpoint import Checkpoint, ParamGroup, Question
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.layout import KnownFiles, TargetLayout

# The protocol of readers.

NO_CHOICES = SourceChoices()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of reading one checkpoint."""

    ledger: OpaqueLedger
    """The policy for objects of classes that are not on the allow-list."""
    tag: str | None = None
    """The tag that names the directory; None if the directory has no tag."""
    rules: Mapping[str, Any] | None = None
    """How tensor parallelism cut parameters, in place of what the checkpoint says."""
    choices: SourceChoices = NO_CHOICES
    """The user's choices where the files leave several ways to read them."""
    target: str = ""
    """The target that it is read for; a reader may leave out what only other targets hold. Empty if there is none."""
    refuse_keys: Callable[[Location, Iterable[str]], None] | None = None
    """Refuses keys of a distributed checkpoint that only a save of another format has (`Format.refuse_keys`)."""


class Reader(Protocol):
    """Reads one family of checkpoints. It never unpickles, and reads no tensor data except scalars."""

    family: str

    def recognises(self, listing: Listing) -> bool:
        """True if a directory with these children is a checkpoint of this family."""
        ...

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the checkpoint in this directory.

        Raises:
            SourceError: A part of the checkpoint is not understood; the error has the reason and a fix.
        """
        ...


def refuse_choices(choices: SourceChoices, why: str) -> None:
    """Refuse choices for a source that leaves none of them.

    Args:
        choices: The user's choices.
        why: A statement about the source that says why there is nothing to choose.

    Raises:
        RequestError: `request.invalid`.
    """
    if given := choices.given():
        flags = [f"--{name.replace('_', '-')}" for name in given]
        target = [f"--target-{name.replace('_', '-')}" for name in given if name in ("model_key", "optimizer_key")]
        more = f"; {' and '.join(target)} for --to dcp: the place in the target" if target else ""
        raise RequestError("request.invalid", f"{why}, and {listed(flags)} chooses", fix=f"leave it out{more}")


# The protocol of writers.


class Writer(Protocol):
    """Lays out targets of one format. It is pure and deterministic: no I/O, no tensor data."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out every file of the target; `name` is its tag, as `storage.protocol.save_directory` finds it.

        Raises:
            RequestError: `request.unsatisfiable` if the target cannot hold this source.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The state of a run beside the tensors of parameters, by names that are the same in every layout."""

    state: Mapping[str, Node] | None = None
    """Counters, schedulers, client state; None for a checkpoint that holds no run."""
    optimizer: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Values of the optimizer beside its param groups, such as the loss scale."""
    optional: frozenset[str] = frozenset()
    """Names in `optimizer` that only some layouts keep; they are compared if both sides have them."""


class DryRun(Protocol):
    """Conversions of one checkpoint that are laid out by their writers but not run."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        ...

    @property
    def source(self) -> SourceSpec:
        """The source as the user named it."""
        ...

    def refusal(self, to: str, **options: Any) -> ReshardError | None:
        """The reason why a conversion with these fields of `ConvertRequest` is refused; None if it is not refused."""
        ...

    @property
    def lacks_parameters(self) -> bool:
        """True if the checkpoint was saved without some of its parameters."""
        ...

    def possible(self, name: str, detail: str, flags: str) -> PossibleTarget:
        """A target that is possible with these flags of `reshard convert`."""
        ...

    def impossible(self, name: str, refusal: ReshardError) -> PossibleTarget:
        """A target that is refused for this reason."""
        ...


class Discovery:
    """The first part of a format: which directories and files are its checkpoints, and who reads them.

    Whoever asks is `formats.sources`, and what lists the checkpoints of a run. The defaults are those of a format
    without readers.
    """

    readers: ClassVar[tuple[Reader, ...]] = ()
    """The readers of this format, in the order in which they are asked whether they recognise a directory."""
    file_readers: ClassVar[tuple[Reader, ...]] = ()
    """The readers of one file that a user names, or of the only such file of a directory. They recognise its name."""
    named_reader: ClassVar[Reader | None] = None
    """The reader of files whose names the user says (`SourceChoices.rank_files`); it need not recognise any."""
    of_training: ClassVar[bool] = False
    """True if a directory of this format holds a training state. Weights beside it are then taken for a copy."""
    files: ClassVar[KnownFiles] = KnownFiles()
    """The file names by which an existing target is recognised as a checkpoint of this format."""
    takes_choices: ClassVar[bool] = False
    """True if the readers of this format follow `ReadOptions.choices`."""

    def owns(self, location: Location, listing: Listing) -> bool:
        """True if a directory whose names a reader recognises is of this format: some names are of several formats."""
        return True

    def refuse_keys(self, location: Location, keys: Iterable[str]) -> None:
        """Refuse a distributed checkpoint that no format claims, and whose keys only a save of this format has.

        Raises:
            SourceError: `checkpoint.incomplete` for a save that did not end, `source.unsupported` for a kind of save
                that is not read.
        """

    def tracked_tag(self, location: Location, listing: Listing) -> str | None:
        """The directory that a tracker of this format's runs names as the newest checkpoint; None if there is none."""
        return None

    def pointed_directory(self, name: str, text: str) -> str | None:
        """The directory that a pointer of this format's runs names by its text; None if its text is a name."""
        return None

    def holds_shards(self, listing: Listing) -> bool:
        """True for files of ranks, each of which looks like weights of its own."""
        return False

    def names_to_say(self, listing: Listing) -> str:
        """Flags by which a user may say that files are of this format, whose names it does not know; empty for none."""
        return ""


class Completion:
    """The second part of a format: the checkpoint that was read becomes the one that a request means.

    Whoever asks is `operations.requested`. The defaults take a checkpoint as it was read.
    """

    takes_model_files: ClassVar[bool] = False
    """True if a model's configuration and tokenizer files may be written beside the target's files."""

    def reads_model_files(self, request: ConvertRequest) -> bool:
        """True if this format takes facts from a model's configuration, whether or not it lies beside the target."""
        return False

    def read_rules(self, options: Options) -> Mapping[str, Any] | None:
        """The cut rules of the options, for this format's checkpoints; None if the options contain none.

        Raises:
            RequestError: `request.invalid`.
        """
        return None

    def read_for(self, request: ConvertRequest, location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
        """The source, read in the way that this format's writers need; None if they take the checkpoint of any reader.

        Raises:
            SourceError: The source is missing, damaged or not supported.
        """
        return None

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint under the names, and with the rules, that the request gives in the terms of this format.

        Raises:
            RequestError: `request.unsatisfiable`.
        """
        return checkpoint

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """The open questions of a source that do not matter to this format's target."""
        return ()

    def base_model(self, request: ConvertRequest) -> str | None:
        """The URL or path of another model whose weights `completed` needs; None if it needs none."""
        return None

    def completes(self, request: ConvertRequest) -> bool:
        """True if `completed` supplies the parameters that the checkpoint was saved without."""
        return False

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint, completed from other places of the request: a base model, an adapter, a model's files.

        Args:
            checkpoint: The checkpoint that was read.
            request: The request.
            base: The base model, if the request names one.

        Raises:
            SourceError: One of these places is missing, damaged or not supported.
            RequestError: `request.unsatisfiable`.
        """
        return checkpoint


class Presentation:
    """The third part of a format: what people are shown, in inspections, comparisons and pictures.

    The defaults are those of a format without features of its own.
    """

    implied_fields: ClassVar[Mapping[str, bool]] = {}
    """Fields of param groups with the value that says what optimizers without the field do; to `diff` it is absent."""

    def layout_fields(self, group: ParamGroup) -> Set[str]:
        """The fields of a param group whose values follow from the layout of a run: they are no part of its state."""
        return frozenset()

    def left_out(self, checkpoint: Checkpoint) -> str | None:
        """A note about parameters that the checkpoint was saved without; None if there are none."""
        return None

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The label of the rank that owns a file; empty for a file that belongs to no single rank."""
        return ""

    def zero_stage(self, checkpoint: Checkpoint) -> ZeroStage | None:
        """The ZeRO stage that `inspect` and `diff` show; None for formats without stages."""
        return None

    def cautions(self, checkpoint: Checkpoint) -> list[str]:
        """Warnings that `inspect` adds to those of the reader."""
        return []

    def joined_cautions(self, checkpoint: Checkpoint, request: ConvertRequest) -> list[str]:
        """Warnings about tensors that were put together from slices, for a target that holds them whole."""
        return []

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """The targets of this format, each with the reason if the checkpoint cannot be converted to it."""
        return ()

    def settings_kept(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Settings of the source's run that targets of this format follow and no option changes, by name.

        A run that loads such a target needs the same values.
        """
        return {}

    def run_facts(self, checkpoint: Checkpoint) -> RunFacts:
        """The values that `diff` compares beside tensors and param groups."""
        state = checkpoint.facts.run_state(checkpoint)
        return RunFacts({str(k): v for k, v in state.items()} or None)


class Format:
    """A family of checkpoints: three parts that answer for its sources, and its targets.

    The defaults of this class are those of a format that writes nothing.
    """

    name: ClassVar[str]
    """The name that requests and other packages have for it."""
    discovery: ClassVar[Discovery] = Discovery()
    completion: ClassVar[Completion] = Completion()
    presentation: ClassVar[Presentation] = Presentation()
    targets: ClassVar[tuple[str, ...]] = ()
    """The targets that this format's writers write."""
    whole_models: ClassVar[bool] = False
    """True if targets of this format should contain the whole model."""
    model_only: ClassVar[bool] = False
    """True if targets of this format have no place for a run's state beside the model: no value of it is written."""

    def writer(self, target: str) -> Writer:
        """The writer of one of `targets`. It is imported here, so that a command does not wait for the other writers.

        Raises:
            LookupError: The format has no such target.
        """
        raise LookupError(target)

    def check_request(self, request: ConvertRequest) -> None:
        """Refuse options of this format that contradict one another or the target, before anything is read.

        Raises:
            RequestError: `request.invalid`.
        """

    def check_names(self, place: Location, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        """Read the names in a planned target of this format, and refuse a target that its loaders would not take.

        Args:
            place: A store with the target's files, whose tensors are zeros.
            checkpoint: The source, as the request wants it.
            request: The request.

        Raises:
            JobError: `internal.error`: the writer made something else than was asked for.
            RequestError: `request.unsatisfiable` for files of the user that do not go together with the tensors.
        """

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout | None:
        """The checkpoint that a launch loads in place of this one, if its loader is of this format.

        It is asked of the format of the target that the launch names, or else of the checkpoint's own.

        Returns:
            The target and its layout; None if this format's runs are no reason for a target of this format: the launch
            is then taken for one of DeepSpeed.

        Raises:
            RequestError: `request.invalid` for a launch that no run of this format can be.
        """
        return None

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True if a launch loads a checkpoint of this format as it is; `wanted` is what `layout_for` answered."""
        return False

    def replicas_load(self, name: str) -> bool:
        """True for a file that all ranks of a data-parallel group load whole, and in the same order."""
        return False
