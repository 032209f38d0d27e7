"""Wire models of reports: comparisons and fingerprints of checkpoints, and layouts with their pictures."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, PlainSerializer

from reshard.errors import counted
from reshard.installed_formats import OfInstalledFormats
from reshard.models.jobs import CastLoss, FileEntry, NotCarried, VerifyProblem
from reshard.options import Options
from reshard.wire_model import SCHEMA_VERSION, RenderedModel, RequestModel, ShownModel, WireModel


class DiffOptions(WireModel):
    """The options of a comparison of two checkpoints."""

    weights_only: bool = False
    """Compare names, shapes, weights and buffers; no optimizer states and no counters."""
    common: bool = False
    """Do not report tensors and values that only one side has."""
    ignore: tuple[str, ...] = Field(default=(), max_length=256)
    """Shell patterns of the names, or of `NAME/STATE`, to leave out."""
    sample: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the blocks of elements to compare, chosen at random; None compares all."""
    options: Annotated[Options, OfInstalledFormats()] = Field(default_factory=Options)
    """Options of single formats, by format; they apply to both sides."""


class DifferenceKind(StrEnum):
    """The kinds of differences between two checkpoints."""

    SHAPE = "shape"
    MISSING = "missing"
    """Only one side has the tensor or value."""
    UNEXPLAINED = "unexplained"
    """No rule says how the tensor-parallel parts make the tensor, so it is not compared."""
    DTYPE = "dtype"
    """The element types cannot be compared by rounding the more precise side."""
    ROLE = "role"
    """The tensor has another role: trained, frozen or a buffer."""
    TIED = "tied"
    """The tensor is tied to other names."""
    ELEMENTS = "elements"
    """Elements of a tensor differ."""
    SCALAR = "scalar"
    """A number of the parameter, such as `step`, differs."""
    HYPER_PARAMETER = "hyper-parameter"
    """A value of the parameter's optimizer group, such as `lr`, differs."""
    STATE = "state"
    """A counter, or a value of a scheduler or of the client state, differs."""


class Difference(WireModel):
    """One thing that is not the same in two checkpoints."""

    kind: DifferenceKind
    name: str
    """Name of the parameter or buffer, or the path of a value in the non-tensor state."""
    state: str = ""
    """`fp32`, `weight`, `exp_avg`, `step`, `lr`, ...; empty if the name alone identifies the value."""
    a: str | None = None
    """The value on the first side; for tensors, the first element that differs. None if this side has no value."""
    b: str | None = None
    compared_as: str | None = None
    """Element type that the more precise side was rounded to before comparing; None if neither was."""
    elements: int | None = None
    """Number of elements that were compared: all, or those of a sample."""
    differing: int | None = None
    """Number of compared elements whose bits differ, counted exactly: NaNs of equal bits are equal, -0.0 is not 0.0."""
    nonfinite: int = 0
    """Number of differing elements that are infinite or NaN on a side."""
    max_abs: float | None = None
    max_rel: float | None = None
    """Largest |a-b| divided by the larger magnitude of the two."""
    first_index: tuple[int, ...] | None = None
    parameters: int = 1
    """Number of parameters that have this same difference; `name` is the first of them."""


class DiffSide(WireModel):
    """One of two checkpoints that were compared."""

    url: str
    tag: str | None
    format: str
    step: int | None
    zero_stage: int | None
    world: dict[str, int]


_NOUNS = {
    DifferenceKind.SHAPE: ("shape", ""),
    DifferenceKind.MISSING: ("thing on one side only", "things on one side only"),
    DifferenceKind.UNEXPLAINED: ("tensor that cannot be compared", "tensors that cannot be compared"),
    DifferenceKind.DTYPE: ("element type", ""),
    DifferenceKind.ROLE: ("role", ""),
    DifferenceKind.TIED: ("tie", ""),
    DifferenceKind.SCALAR: ("number of a parameter", "numbers of parameters"),
    DifferenceKind.HYPER_PARAMETER: ("hyper-parameter", ""),
    DifferenceKind.STATE: ("counter or other value", "counters and other values"),
}
"""The words for what a kind of difference counts, one and several. Differences of elements are counted in elements."""


class DiffReport(ShownModel):
    """Outcome of comparing two checkpoints by logical tensor."""

    schema_version: int = SCHEMA_VERSION
    a: DiffSide
    b: DiffSide
    equal: bool
    tensors: int
    """Number of pairs of tensors whose elements were compared."""
    identical: int
    """Number of compared pairs without a difference."""
    elements: int
    values: int
    """Number of hyper-parameters, counters and other single values that were compared."""
    read_bytes: int
    sampled: float | None
    differences: tuple[Difference, ...]
    """Worst first."""
    notes: tuple[str, ...] = ()
    """Notes on the comparison: conventions that were used, and findings that neither prove nor disprove equality."""
    seconds: float

    def verdict(self) -> str:
        """The outcome in words: whether the sides are equal, or how many of what differ."""
        if self.equal:
            some = self.sampled is not None
            return f"no difference in a sample of {self.sampled:.3%}; the rest was not read" if some else "equal"
        kinds: dict[DifferenceKind, list[Difference]] = {}
        for found in self.differences:
            kinds.setdefault(found.kind, []).append(found)
        counts: list[str] = []
        for kind, those in kinds.items():
            if kind is not DifferenceKind.ELEMENTS:
                counts.append(counted(len(those), *_NOUNS[kind]))
                continue
            differing, elements = (sum(getattr(d, name) or 0 for d in those) for name in ("differing", "elements"))
            tensors = f"{counted(len(those), 'tensor')} {'differs' if len(those) == 1 else 'differ'}"
            counts.append(f"{tensors} bit by bit, in {differing:,} of {counted(elements, 'element')}")
        return f"different: {', '.join(counts)}"


# Wire models of a fingerprint: digests of a checkpoint's state that do not depend on its layout.


class FingerprintOptions(WireModel):
    """The options of a fingerprint."""

    weights_only: bool = False
    """Digest weights, masters and buffers only, as for a checkpoint without a training state."""
    lines: bool = False
    """Also return the lines that the digests are made of, which name every tensor."""
    options: Annotated[Options, OfInstalledFormats()] = Field(default_factory=Options)
    """Options of single formats, by format."""


class FingerprintReport(WireModel):
    """The digests of a checkpoint's state. docs/formats/fingerprint.md specifies them."""

    schema_version: int = SCHEMA_VERSION
    url: str
    tag: str | None
    format: str
    step: int | None
    weights_only: bool
    digest: str
    """The digest of the whole: of the model, the moments, the counters and the groups. SHA-256 in hex, as all."""
    components: dict[str, str | None]
    """The digest of each component; None for one that the checkpoint lacks, or that was not asked for."""
    lines: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """The lines of each component, each a JSON array; empty unless they were asked for."""
    tensors: int
    """Number of tensors that were read."""
    read_bytes: int
    notes: tuple[str, ...] = ()
    """Notes on what no digest covers, and on what contradicts itself in the checkpoint."""
    not_carried: tuple[NotCarried, ...] = ()
    """Everything that the checkpoint holds and the reader does not read: it is in no digest."""
    seconds: float


# Wire models of signed statements about checkpoints.


class Signing(WireModel):
    """The key that signs, and what the signed statement refers to."""

    key: str
    """URL or path of a private key in PEM, or the URI of a key that a service keeps, such as `awskms:...`."""
    public_key: str | None = None
    """URL or path of the public key, for keys that a service keeps."""
    certificate: str | None = None
    """URL or path of the certificate of a conversion's source; None to seal the source as well."""
    trusted: tuple[str, ...] = ()
    """URLs or paths of public keys that may have signed that certificate, beside this one."""


class PushResult(WireModel):
    """A directory that was uploaded to the Hugging Face hub."""

    schema_version: int = SCHEMA_VERSION
    url: str
    commit: str
    """The commit of the branch that holds the files."""
    files: tuple[FileEntry, ...]
    already_done: bool = False
    """True if the branch held all files already, so that no commit was made."""


class SealReport(WireModel):
    """A signed statement about a checkpoint."""

    schema_version: int = SCHEMA_VERSION
    url: str
    """The sealed directory or file."""
    format: str
    name: str
    contents: str
    """Digest of all files: SHA-256 of their SHA-256s, in the order of their names."""
    fingerprint: str
    statement: str
    """SHA-256 of the statement, by which the statements of targets name it."""
    key: str
    """SHA-256 of the public key as PEM."""
    files: int
    read_bytes: int
    weights_only: bool
    """True if the fingerprint is of the model alone: the files leave open what the optimizer's states mean."""
    not_covered: tuple[str, ...] = ()
    """Files beside the sealed directory, in the one that was named, that no seal covers; at most 8 of them."""
    not_covered_count: int = 0
    """The number of all of them."""
    certificate: str
    """The statement in its envelope and bundle, as JSON text."""
    seconds: float


class SealedStep(WireModel):
    """One statement of a chain."""

    name: str
    format: str
    step: int | None
    tool: str
    key: str
    statement: str
    contents: str
    fingerprint: str
    plan_digest: str | None
    """Digest of the plan by which it was made; None for a checkpoint that was sealed as it was found."""
    dtype: str | None = None
    """Type that its weights were cast to."""
    changed: tuple[str, ...] = ()
    """Parts of the state that are not those of the source, or that it lacks."""
    casts: tuple[CastLoss, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()


class SealCheck(WireModel):
    """The outcome of comparing a checkpoint with its certificate, whose signature and chain are sound."""

    schema_version: int = SCHEMA_VERSION
    target: str
    ok: bool
    files: int
    read_bytes: int
    problems: tuple[VerifyProblem, ...] = ()
    """Files that are not those that were sealed, then tensors."""
    covered: str
    """The directory or file that was compared. It is that of the tag where the target is the directory around it."""
    not_covered: tuple[str, ...] = ()
    """Files beside that directory, in the target, that no seal covers; at most 8 of them."""
    not_covered_count: int = 0
    """The number of all of them."""
    chain: tuple[SealedStep, ...]
    """The statements, from that about the checkpoint to that about the first source."""
    seconds: float


# Wire models of a checkpoint's layout: the file that holds each part of each tensor.


class Region(WireModel):
    """A rectangle of a tensor that is seen as a matrix: the first dimension as rows, all others together as columns."""

    file: str
    rank: str
    """The rank that owns the file, such as `dp 1 tp 0 pp 0`; empty if the file belongs to no single rank."""
    rows: tuple[int, int]
    """The first row, and one past the last."""
    columns: tuple[int, int]

    @property
    def elements(self) -> int:
        """Number of elements of the region."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class TensorPicture(WireModel):
    """One tensor of a checkpoint, with the files that hold its regions."""

    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """A sentence on how tensor parallelism cuts the tensor."""
    regions: tuple[Region, ...]
    """The regions tile the tensor; `left_out` more are not listed."""
    left_out: int = 0


class FileShare(WireModel):
    """The contents of one file, by tensor state."""

    file: str
    rank: str
    size_bytes: int
    bytes_by_state: dict[str, int]


class LayoutPicture(RenderedModel):
    """The layout of a checkpoint: its files, and the tensors that were asked for."""

    schema_version: int = SCHEMA_VERSION
    url: str
    format: str
    world: dict[str, int]
    files: tuple[FileShare, ...]
    tensors: tuple[TensorPicture, ...] = ()


class LayoutPair(RenderedModel):
    """The layouts of a conversion's source, and of its target as it is planned, each with the parts of one tensor."""

    source: LayoutPicture
    target: LayoutPicture


# The steps of a run, and what a policy keeps of them.


EntryName = Annotated[
    str, PlainSerializer(lambda name: name.encode("utf-8", "backslashreplace").decode(), when_used="json")
]
"""The name of a file or directory. Bytes that are not UTF-8, which JSON cannot contain, are escaped in JSON."""


class RunStep(WireModel):
    """One checkpoint in the directory of a run."""

    name: EntryName
    """Its path relative to the run."""
    format: str | None = None
    """The format as `inspect` names it; None if its reader refuses the checkpoint."""
    world: dict[str, int] = Field(default_factory=dict)
    step: int | None = None
    """The step that the checkpoint holds, or else the number of its name, if names and steps of the run agree."""
    files: int
    size_bytes: int
    """Bytes of all files below the path, also of those that no reader needs."""
    complete: bool
    """True if its reader accepts the whole metadata: every rank and every file is there. No tensor is read."""
    code: str = ""
    """The code of the error with which the reader refuses it."""
    detail: str = ""
    named_by: tuple[str, ...] = ()
    """The pointers, trackers and links that name it: what runs resume from."""
    in_use: bool = False
    """True if a conversion into it has not ended, or has left files that `reshard clean` removes."""
    sealed: bool = False
    """True if a certificate of `reshard seal` or `convert --sign` stands beside it. Nothing is verified."""
    of_training: bool = False
    """True if it holds the state of a training, and not weights alone."""
    best: tuple[EntryName, ...] = ()
    """The entries of the run that its `trainer_state.json` or its Lightning callbacks record as the best checkpoint."""


class RunListing(WireModel):
    """The checkpoints in the directory of a run, by step."""

    schema_version: int = SCHEMA_VERSION
    url: str
    steps: tuple[RunStep, ...]
    newest: EntryName | None = None
    """The name of the newest complete checkpoint: the one with the highest step. Weights alone are it only in a run
    without training states."""
    others: tuple[EntryName, ...] = ()
    """Directories that no format recognises as one checkpoint, among them runs of their own, and marks of removals
    that no `prune` wrote."""
    removing: tuple[EntryName, ...] = ()
    """Checkpoints whose removal was begun and has not ended: `reshard prune` ends it."""


class PrunePolicy(RequestModel):
    """The steps of a run to keep."""

    keep_last: int = Field(ge=1)
    """So many of the latest complete steps."""
    keep_every: int | None = Field(default=None, ge=1)
    """Every step that is a multiple of this number."""
    keep_sealed: bool = False
    """Every checkpoint that has a certificate beside it."""
    weights_only: bool = False
    """True to keep the weights of what goes where they are in files of their own."""


class PruneDecision(WireModel):
    """A checkpoint of a run, and why a policy keeps it."""

    name: EntryName
    step: int | None
    files: int
    size_bytes: int
    kept_for: str = ""
    """Why it is kept; empty if it goes."""


class PruneReport(WireModel):
    """The checkpoints that a policy keeps and removes of a run."""

    schema_version: int = SCHEMA_VERSION
    url: str
    removed: bool
    """True if what goes is gone; false if it is only shown."""
    weights_only: bool = False
    """True if the weights of what goes stay: files and sizes are those of the training states."""
    decisions: tuple[PruneDecision, ...]
    finished: tuple[EntryName, ...] = ()
    """Checkpoints whose removal an earlier call had begun, and that go now."""
    others: tuple[EntryName, ...] = ()
    """As in `RunListing`; they are never removed."""
