"""The universal reader: model states and `zero/`, put together to a checkpoint.

It reads two forms. Our writer, and `ds_to_universal` at stages 1 and 2, write one `mp_rank_00_model_states.pt`, and
atoms with shapes and a `step.pt` each. At stage 3 `ds_to_universal` writes every rank's model states, bare flat atoms,
and counters in `optimizer_state.pt` only.
"""

from __future__ import annotations

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.formats.deepspeed.reader.native.files import RankFiles, sort_files
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, parse_model_states
from reshard_engine.formats.deepspeed.reader.native.optim_states import MAX_WORLD
from reshard_engine.formats.deepspeed.reader.native.parallel import degrees
from reshard_engine.formats.deepspeed.reader.native.rank_opener import RankOpener
from reshard_engine.formats.deepspeed.reader.native.ranks import note_copies, note_models
from reshard_engine.formats.deepspeed.reader.native.reader import missing_rank, refuse_by_config
from reshard_engine.formats.deepspeed.reader.universal.assembly import Assembly
from reshard_engine.formats.deepspeed.reader.universal.atoms import FOLDER, OPTIMIZER_FILE, list_atoms
from reshard_engine.formats.deepspeed.reader.universal.optimizer import parse_optimizer_file
from reshard_engine.formats.not_carried import UNKNOWN, NotCarriedKeys
from reshard_engine.formats.reader import ReadOptions, refuse_choices
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing


class UniversalReader:
    """Reads universal checkpoints, ours and `ds_to_universal`'s."""

    family = "deepspeed-universal"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a `zero` folder beside model states, and no optimizer file of a rank."""
        names = [f.path.rpartition("/")[2] for f in listing.files]
        return (
            FOLDER in listing.directories
            and any(n.endswith("_model_states.pt") for n in names)
            and not any("optim_states.pt" in n for n in names)
        )

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """The checkpoint in a universal directory.

        Raises:
            SourceError: As the modules of this package and of the model states say.
        """
        refuse_choices(options.choices, f"{printable(location.url)} holds one model, and names its parameters")
        files = sort_files(location.store, listing)
        atoms = list_atoms(location)
        if atoms.optimizer is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"{FOLDER}/{OPTIMIZER_FILE} is missing: it is written when all atoms are there",
                fix="convert or copy the checkpoint again",
            )
        opener = RankOpener(options.ledger)
        noted = NotCarriedKeys()
        models = _models(files, opener, noted)
        pp, tp = degrees(models[0], files.model_parallel, 0)
        copies = open_all(
            [_first_of(files, mp) for mp in range(1, pp * tp)], lambda f: opener.states(f, parse_model_states)
        )
        optimizer = parse_optimizer_file(open_torch_file(atoms.optimizer, options.ledger))
        noted.add_all(optimizer.unread, UNKNOWN, file=optimizer.torch_file.file.name)
        states = {state for held in atoms.by_name.values() for state in held}
        noted.add_all(optimizer.unread_states(states), UNKNOWN, file=optimizer.torch_file.file.name)
        note_models([models, *([m] for m in copies)], noted)
        noted.add_all(files.others, "no file of DeepSpeed's")
        found = Assembly(models, atoms, optimizer, options.ledger, options.rules, stages=copies[tp - 1 :: tp])
        return found.checkpoint(url=location.url, tag=options.tag, not_carried=noted.found())


def _first_of(files: RankFiles, mp: int) -> SourceFile:
    """The model states of one model-parallel rank; if each data-parallel rank has a file, the first rank's."""
    found = files.models.get(mp) or files.models_by_rank.get((0, mp))
    if found is None:
        raise SourceError("checkpoint.incomplete", f"the model states of model-parallel rank {mp} are missing")
    return found


def _models(files: RankFiles, opener: RankOpener, noted: NotCarriedKeys) -> list[ModelStates]:
    """The model states of rank 0, and at stage 3 those of all ranks if frozen parameters are spread over them."""
    if 0 in files.models:
        first = opener.states(files.models[0], parse_model_states)
        refuse_by_config(first)
        return [first]
    by_rank = {dp: f for (dp, mp), f in files.models_by_rank.items() if mp == 0}
    if 0 not in by_rank:
        raise SourceError("checkpoint.incomplete", "the model states of rank 0 are missing: they name the parameters")
    first = opener.states(by_rank[0], parse_model_states)
    refuse_by_config(first)
    if not first.frozen_shapes:
        note_copies(first, [f for rank, f in sorted(by_rank.items()) if rank], opener, noted)
        return [first]
    world = first.integer("dp_world_size") or len(by_rank)
    if world > MAX_WORLD:
        raise SourceError("checkpoint.too_large", f"dp_world_size is {world}; the limit is {MAX_WORLD} ranks")
    if missing := [r for r in range(world) if r not in by_rank]:
        raise missing_rank(missing, world, f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt")
    ranks = [by_rank[r] for r in range(1, world)]
    return [first, *open_all(ranks, lambda f: opener.states(f, parse_model_states))]
