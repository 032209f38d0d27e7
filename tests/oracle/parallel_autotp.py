"""DeepSpeed's AutoTP on a tiny Llama of transformers: training and resuming at any size, states joined over its ranks.

Functions named ``*_autotp`` run inside the ranks.  How parameters are cut is stated here from the model, not read from
``universal_checkpoint_info``: AutoTP cuts projections into heads by rows and those back by columns, and whatever is
uneven still is, in rank order, one full tensor (deepspeed 0.19.8, module_inject/layers.py and tp_shard.py).
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from oracle.parallel_cases import AUTOTP_ROWS, AutoTpCase, autotp_config
from oracle.parallel_cuts import COLUMNS, ROWS, WHOLE, Cut
from oracle.parallel_gather import LocalState, local_state
from oracle.parallel_gpt import param_groups
from oracle.parallel_train import load_and_dump, save_with_truth
from oracle.train import RESUME_SEED, SOURCE_SEED, start_world

VOCAB = 37
SEQUENCE = 8
HEAD_WIDTH = 8
INNER = 44

_BY_ROWS = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight")
_BY_COLUMNS = re.compile(r".*\.(o_proj|down_proj)\.weight")
_VOCABULARY = re.compile(r"model\.embed_tokens\.weight|lm_head\.weight")


def _llama(case: AutoTpCase, seed: int) -> LlamaForCausalLM:
    """The whole model; weights follow from seed and name alone."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=case.heads * HEAD_WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=32,
        tie_word_embeddings=case.tied,
        attn_implementation="eager",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        drawn = torch.randn(param.shape, generator=generator)
        with torch.no_grad():
            param.copy_(drawn * 0.2 if param.ndim > 1 else drawn * 0.1 + 1.0)
    return model


def cut_of(name: str, param: Any) -> Cut:
    """How a parameter of this model is cut, given its live shape."""
    if _BY_ROWS.fullmatch(name):
        return ROWS
    if _BY_COLUMNS.fullmatch(name):
        return COLUMNS
    shape = param.ds_shape if hasattr(param, "ds_id") else param.shape
    return ROWS if _VOCABULARY.fullmatch(name) and shape[0] < VOCAB else WHOLE


def build_engine_autotp(case: AutoTpCase, tp: int, *, seed: int, load_universal: bool = False) -> Any:
    """An engine for ``case`` with tensors over ``tp`` ranks and data over the rest."""
    model: nn.Module = _llama(case, seed)
    config = autotp_config(case, tp, dist.get_world_size() // tp)
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=param_groups(model), config=config)
    return engine


def _coordinates(tp: int) -> tuple[int, int]:
    """This rank's tensor- and data-parallel rank."""
    if tp == 1:
        return 0, dist.get_rank()
    return groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()


def state_autotp(engine: Any, tp: int) -> LocalState:
    """This rank's part of the logical state; collective over its data-parallel peers."""
    tensor_rank, replica = _coordinates(tp)
    return local_state(engine, (tensor_rank, 0), replica, cut_of=cut_of)


def _batch(step: int, replica: int, dp: int) -> Tensor:
    generator = torch.Generator().manual_seed(30_001 + step)
    rows = torch.randint(VOCAB, (AUTOTP_ROWS, SEQUENCE), generator=generator)
    rows[:, 1::2] = rows[:, 0::2]
    return rows.chunk(dp)[replica].contiguous()


def train_steps_autotp(engine: Any, tp: int, steps: int) -> list[float]:
    """Global mean losses of the next ``steps`` steps; the data follow ``engine.global_steps``."""
    losses = []
    engine.train()
    world = dist.get_world_size()
    for _ in range(steps):
        rows = _batch(engine.global_steps, _coordinates(tp)[1], world // tp)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().to(torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def train_and_save_autotp(
    case: dict[str, Any], tp: int, save_dir: str, truth_dir: str, steps_after: int
) -> dict[str, Any]:
    """Trains ``case.steps`` steps with tensors over ``tp`` ranks, saves, dumps the truth, trains on.

    Returns:
        See ``save_with_truth``.
    """
    start_world()
    parsed = AutoTpCase(**case)
    engine = build_engine_autotp(parsed, tp, seed=SOURCE_SEED)
    return save_with_truth(
        engine,
        lambda: state_autotp(engine, tp),
        lambda steps: train_steps_autotp(engine, tp, steps),
        save_dir=save_dir,
        truth_dir=truth_dir,
        steps=parsed.steps,
        steps_after=steps_after,
        client_state={},
        notes={"case": case, "tp": tp},
    )


def resume_autotp(
    case: dict[str, Any], tp: int, load_dir: str, tag: str | None, out: str, steps: int, load_universal: bool = False
) -> dict[str, Any]:
    """A new engine with other weights loads, dumps ``out/resumed.*``, trains ``steps`` steps."""
    start_world()
    engine = build_engine_autotp(AutoTpCase(**case), tp, seed=RESUME_SEED, load_universal=load_universal)
    load_and_dump(engine, lambda: state_autotp(engine, tp), load_dir, tag, out)
    return {"losses": train_steps_autotp(engine, tp, steps)}
