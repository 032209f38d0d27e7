"""DeepSpeed's AutoTP on a tiny Llama of transformers: training and resuming at any size, states joined over its ranks.

How parameters are cut is stated here from the model, not read from ``universal_checkpoint_info``: AutoTP cuts
projections into heads by rows and those back by columns, and whatever is uneven still is, in rank order, one full
tensor (deepspeed 0.19.8, module_inject/layers.py and tp_shard.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from oracle.parallel_cases import AUTOTP_ROWS, AutoTpCase, Layout, autotp_config
from oracle.parallel_cuts import COLUMNS, ROWS, WHOLE, Cut
from oracle.parallel_gather import local_state
from oracle.parallel_gpt import param_groups
from oracle.parallel_train import Run, draw, initialized
from oracle.train import mean_losses

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
    draw(model, seed, std=0.2)
    return model


def cut_of(name: str, param: Any) -> Cut:
    """How a parameter of this model is cut, given its live shape."""
    if _BY_ROWS.fullmatch(name):
        return ROWS
    if _BY_COLUMNS.fullmatch(name):
        return COLUMNS
    shape = param.ds_shape if hasattr(param, "ds_id") else param.shape
    return ROWS if _VOCABULARY.fullmatch(name) and shape[0] < VOCAB else WHOLE


def _coordinates(tp: int) -> tuple[int, int]:
    """This rank's tensor- and data-parallel rank."""
    if tp == 1:
        return 0, dist.get_rank()
    return groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()


def _batch(step: int, replica: int, dp: int) -> Tensor:
    generator = torch.Generator().manual_seed(30_001 + step)
    rows = torch.randint(VOCAB, (AUTOTP_ROWS, SEQUENCE), generator=generator)
    rows[:, 1::2] = rows[:, 0::2]
    return rows.chunk(dp)[replica].contiguous()


def start(case: AutoTpCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """An engine for ``case`` with tensors over ``layout.tp`` ranks and data over the rest."""
    model: nn.Module = _llama(case, seed)
    engine = initialized(model, param_groups(model), autotp_config(case, layout.tp, layout.dp), load_universal)
    tensor_rank, replica = _coordinates(layout.tp)

    def loss(step: int) -> Tensor:
        rows = _batch(step, replica, layout.dp)
        found: Tensor = engine(input_ids=rows, labels=rows).loss
        return found

    return Run(
        engine,
        lambda: local_state(engine, (tensor_rank, 0), replica, cut_of=cut_of),
        lambda steps: mean_losses(engine, steps, loss),
    )
