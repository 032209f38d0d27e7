"""Real megatron-core on CPUs: a small model trains, saves and goes on; runs inside the ranks.

`GPTModel`, `DistributedDataParallel`, the optimizers, the scheduler, `dist_checkpointing` and the functions of legacy
files are Megatron-core's. What stands in for GPUs is in `megatron_cpu`. Megatron-LM's training script is not here: what
it saves around them is made as its `training/checkpointing.py` does (`generate_state_dict`, `get_rng_state`, names of
directories).

Each step takes the same samples at every layout, so that losses are those of one run.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from oracle import megatron_cpu
from oracle.dcp_models import start_world

SEED = {True: 99, False: 7}
"""By whether the run loads a checkpoint: what its loader leaves out shows."""
HIDDEN, SEQUENCE, SAMPLES, HEADS = 32, 16, 4, 4
STEPS = 3
VERSION = 3.0
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STATES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Run:
    """A model and its parallelism."""

    model: str = "llama"
    """`gpt`: tied, learned positions, LayerNorm, biases. `llama`, `moe`: grouped queries, SwiGLU, RMSNorm, rotary."""
    dtype: str = "fp32"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel ranks of experts; None for those of all else."""
    instances: int = 1
    """Instances of the distributed optimizer, which share the data-parallel ranks."""
    layers: int = 4
    vocab: int = 96
    """Tokens; the vocabulary is padded to a multiple of 8 * tp."""
    experts: int = 4
    plain: bool = False
    """True for an optimizer that is not distributed."""
    positions: int = SEQUENCE
    """Rows of learned positions."""
    bucket: int | None = None
    """Elements after which a bucket closes, which come with `overlap_grad_reduce`; None for one bucket."""
    lr: float = 2e-3
    min_lr: float = 1e-4
    """0.19 loads param groups of these rates alone."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of `TransformerConfig`, such as `qk_layernorm`."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel ranks of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def padded(self) -> int:
        """Rows of the vocabulary."""
        return -(-self.vocab // (8 * self.tp)) * 8 * self.tp


class Training:
    """A model, its optimizer and its scheduler on this rank."""

    def __init__(self, run: Run, *, resumed: bool) -> None:
        """Build everything as Megatron-LM does."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        self.run, self.ps = run, parallel_state
        moe = run.model == "moe"
        parallel_state.initialize_model_parallel(
            run.tp,
            run.pp,
            virtual_pipeline_model_parallel_size=run.vpp,
            expert_model_parallel_size=run.ep,
            expert_tensor_parallel_size=run.expert_tensor if moe else None,
            **({"num_distributed_optimizer_instances": run.instances} if run.instances > 1 else {}),
        )
        seed = SEED[resumed]
        random.seed(seed)
        np.random.mtrand.seed(seed)
        torch.manual_seed(seed + parallel_state.get_pipeline_model_parallel_rank())
        model_parallel_cuda_manual_seed(seed)
        self.config = config = self._config()
        spec = get_gpt_layer_local_spec(
            num_experts=run.experts if moe else None,
            moe_grouped_gemm=False,
            normalization=config.normalization,
            qk_layernorm=config.qk_layernorm,
        )
        self.models: list[Any] = []
        for chunk in range(run.vpp or 1):
            stage = {"vp_stage": chunk} if run.vpp else {}
            whole = {"ignore_virtual": False, **stage} if run.vpp else {}
            gpt = run.model == "gpt"
            model: Any = GPTModel(
                config,
                spec,
                run.padded,
                run.positions,
                pre_process=parallel_state.is_pipeline_first_stage(**whole),
                post_process=parallel_state.is_pipeline_last_stage(**whole),
                share_embeddings_and_output_weights=gpt,
                position_embedding_type="learned_absolute" if gpt else "rope",
                **stage,
            ).to(_TYPES[run.dtype])
            if moe and run.tp > 1:
                # Megatron refuses to train experts of tensor-parallel ranks without sequence parallelism, which torch's
                # norms do not have. There is no dropout.
                model.eval()
            for p in model.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(p)
            self.models.append(model)
        stages = [(i,) if run.vpp else () for i in range(len(self.models))]
        self.offsets = [get_transformer_layer_offset(config, *stage) for stage in stages]
        wrapped = [_wrapper(run)(config, model) for model in self.models]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=run.bucket is not None,
            use_distributed_optimizer=not run.plain,
            bucket_size=run.bucket,
            num_distributed_optimizer_instances=run.instances,
        )
        self.wrapped: list[Any] = wrapped
        self.ddp: list[Any] = [
            DistributedDataParallel(config, settings, model, disable_bucketing=at > 0)
            for at, model in enumerate(wrapped)
        ]
        for one in self.ddp:
            one.broadcast_params()
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=run.lr,
                min_lr=run.min_lr,
                weight_decay=0.1,
                adam_beta2=0.98,
                bf16=run.dtype == "bf16",
                fp16=run.dtype == "fp16",
                params_dtype=_TYPES[run.dtype],
                initial_loss_scale=1024.0,
                use_distributed_optimizer=not run.plain,
                clip_grad=1.0,
            ),
            self.ddp,
        )
        self.scheduler: Any = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=run.lr,
            min_lr=run.min_lr,
            lr_warmup_steps=2 * SAMPLES,
            lr_decay_steps=20 * SAMPLES,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=20 * SAMPLES,
            wd_incr_style="constant",
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if run.bucket is not None and run.pp > 1:
            # 0.14 asserts that gradients of a micro-batch are not reduced before the last one.
            syncs = [one.no_sync for one in self.ddp]
            config.no_sync_func = syncs if run.vpp else syncs[0]
        self.iteration = 0

    def _config(self) -> Any:
        import torch.nn.functional as F
        from megatron.core.transformer.transformer_config import TransformerConfig

        run, dtype = self.run, _TYPES[self.run.dtype]
        gpt, moe = run.model == "gpt", run.model == "moe"
        options: dict[str, Any] = {
            "num_layers": run.layers, "hidden_size": HIDDEN, "ffn_hidden_size": 128 if gpt else 48,
            "num_attention_heads": HEADS, "num_query_groups": HEADS if gpt else 2, "use_cpu_initialization": True,
            "pipeline_dtype": dtype, "params_dtype": dtype, "bf16": run.dtype == "bf16", "fp16": run.dtype == "fp16",
            "tensor_model_parallel_size": run.tp, "pipeline_model_parallel_size": run.pp,
            "virtual_pipeline_model_parallel_size": run.vpp, "expert_model_parallel_size": run.ep,
            "expert_tensor_parallel_size": run.expert_tensor, "add_bias_linear": gpt, "gated_linear_unit": not gpt,
            "activation_func": F.gelu if gpt else F.silu, "normalization": "LayerNorm" if gpt else "RMSNorm",
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
            "apply_rope_fusion": False, "persist_layer_norm": False, "batch_p2p_comm": False,
        }  # fmt: skip
        if moe:
            options |= {
                "num_moe_experts": run.experts, "moe_ffn_hidden_size": 24, "moe_router_topk": 2,
                "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
            }  # fmt: skip
        return TransformerConfig(**options | dict(run.more))

    # Training.

    def step(self, number: int) -> float:
        """Train on the samples of one step; returns the mean loss of all of them."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        run, rank = self.run, self.ps.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(1000 + number)
        tokens = torch.randint(0, run.vocab, (SAMPLES, SEQUENCE), generator=generator)
        mine = [tokens[i : i + 1] for i in range(rank * SAMPLES // run.dp, (rank + 1) * SAMPLES // run.dp)]
        for one in self.ddp:
            one.zero_grad_buffer()
        self.optimizer.zero_grad()
        feeds: list[Iterator[torch.Tensor]] = [iter(list(mine)) for _ in self.ddp]
        found = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=feeds if run.vpp else feeds[0],
            model=self.ddp if run.vpp else self.ddp[0],
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=SAMPLES)
        self.iteration = number
        held = torch.tensor([sum(float(one["loss"]) for one in found), float(len(found))], dtype=torch.float64)
        dist.all_reduce(held)
        return float(held[0] / held[1])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of these samples, without padding, of a run on one rank or of tensor-parallel ranks."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        positions = torch.arange(tokens.shape[1]).unsqueeze(0).expand(tokens.shape[0], -1)
        with torch.no_grad():
            found: Any = self.models[0](tokens, positions, _mask(tokens.shape[1]))
        return gather_from_tensor_model_parallel_region(found)[..., : self.run.vocab].float()

    # The state, as everybody names it.

    def dump(self, stem: Path) -> None:
        """Write the live state of all ranks: STEM.safetensors has `NAME/KIND`, STEM.json groups and scheduler."""
        run, ps = self.run, self.ps
        states = self._states()
        mine: list[tuple[str, bool, int, int, dict[str, torch.Tensor]]] = []
        experts = run.experts // run.ep
        for offset, model in zip(self.offsets, self.models, strict=True):
            for name, p in model.named_parameters():
                known = re.sub(r"^decoder\.layers\.(\d+)", lambda m, o=offset: f"decoder.layers.{int(m[1]) + o}", name)
                shift = ps.get_expert_model_parallel_rank() * experts
                known = re.sub(r"experts\.(\d+)\.", lambda m, s=shift: f"experts.{int(m[1]) + s}.", known)
                expert = ".local_experts." in name
                ranks = run.expert_tensor if expert else run.tp
                cut = bool(getattr(p, "tensor_model_parallel", False)) and ranks > 1
                rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
                held = {"weight": p.detach().clone(), **states.get(p, {})}
                mine.append((known, cut, getattr(p, "partition_dim", -1), rank, held))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        if dist.get_rank() != 0:
            return
        tensors: dict[str, torch.Tensor] = {}
        parts: dict[str, dict[int, Any]] = {}
        for entries in gathered:
            for name, cut, dim, rank, held in entries:
                if not (run.model == "gpt" and name == "output_layer.weight"):
                    parts.setdefault(name, {}).setdefault(rank, (cut, dim, held))
        for name, ranks in parts.items():
            cut, dim, first = ranks[0]
            for kind in first:
                pieces = [ranks[rank][2][kind] for rank in sorted(ranks)] if cut else [first[kind]]
                if cut and "linear_fc1" in name and self.config.gated_linear_unit:
                    halves = [piece.chunk(2) for piece in pieces]
                    pieces = [half[at] for at in range(2) for half in halves]
                whole = torch.cat(pieces, dim=dim) if cut else pieces[0]
                padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
                tensors[f"{name}/{kind}"] = (whole[: run.vocab] if padded else whole).contiguous()
        save_file(tensors, str(stem) + ".safetensors")
        meta = {"groups": groups, "scheduler": self.scheduler.state_dict(), "iteration": self.iteration}
        first = getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]
        scaler = getattr(first, "grad_scaler", None)
        meta["scaler"] = {k: float(v) for k, v in ({} if scaler is None else scaler.state_dict()).items()}
        Path(f"{stem}.json").write_text(json.dumps(meta))

    def _states(self) -> dict[Any, dict[str, torch.Tensor]]:
        found: dict[Any, dict[str, torch.Tensor]] = {}
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if hasattr(one, "gbuf_ranges"):
                state = _gathered(one)
                if state is None:
                    continue
                for number, buffer in enumerate(one.buffers):
                    vectors = state[number][buffer.param_dtype, buffer.grad_dtype]
                    # What was gathered has no padding at the ends of buckets.
                    begins, at = [], 0
                    for bucket in buffer.buckets:
                        begins.append(at)
                        at += bucket.numel_unpadded
                    for p, (begin, end, bucket) in buffer.param_index_map.items():
                        place = begin - buffer.bucket_indices[bucket][0] + begins[bucket]
                        found[p] = {
                            kind: vectors[state_name][place : place + end - begin].view(p.shape).clone()
                            for state_name, kind in _STATES.items()
                        }
            else:
                masters = zip(
                    getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []), strict=True
                )
                pairs = [(p, master) for ours, theirs in masters for p, master in zip(ours, theirs, strict=True)]
                inner = one.optimizer.state
                for p, master in pairs or [(p, p) for group in one.param_groups for p in group["params"]]:
                    moments = {k: inner[master][k].clone() for k in ("exp_avg", "exp_avg_sq")}
                    found[p] = moments | ({"fp32": master.detach().clone()} if pairs else {})
        return found

    # Saving and loading.

    def _args(self, form: str) -> Namespace:
        run, config = self.run, self.config
        gpt, moe = run.model == "gpt", run.model == "moe"
        return Namespace(
            num_layers=run.layers, hidden_size=config.hidden_size, ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=HEADS, num_query_groups=config.num_query_groups, group_query_attention=not gpt,
            kv_channels=config.kv_channels,
            swiglu=not gpt, add_bias_linear=gpt, add_qkv_bias=config.add_qkv_bias, qk_layernorm=config.qk_layernorm,
            untie_embeddings_and_output_weights=not gpt, normalization=config.normalization,
            norm_epsilon=config.layernorm_epsilon, position_embedding_type="learned_absolute" if gpt else "rope",
            add_position_embedding=True, max_position_embeddings=run.positions, seq_length=SEQUENCE,
            padded_vocab_size=run.padded, vocab_size=run.vocab, make_vocab_size_divisible_by=8,
            tensor_model_parallel_size=run.tp, pipeline_model_parallel_size=run.pp,
            virtual_pipeline_model_parallel_size=run.vpp, num_layers_per_virtual_pipeline_stage=None,
            expert_model_parallel_size=run.ep, expert_tensor_parallel_size=run.expert_tensor, context_parallel_size=1,
            num_experts=run.experts if moe else None,
            moe_ffn_hidden_size=config.moe_ffn_hidden_size if moe else None, moe_router_topk=2,
            moe_layer_freq=1, moe_grouped_gemm=False,
            hetereogenous_dist_checkpoint=getattr(config, "hetereogenous_dist_checkpoint", False),
            decoder_first_pipeline_num_layers=config.num_layers_in_first_pipeline_stage,
            decoder_last_pipeline_num_layers=config.num_layers_in_last_pipeline_stage,
            account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
            pipeline_model_parallel_layout=None,
            overlap_grad_reduce=run.bucket is not None, ddp_bucket_size=run.bucket, ddp_num_buckets=None,
            ddp_pad_buckets_for_high_nccl_busbw=False, num_distributed_optimizer_instances=run.instances,
            use_distributed_optimizer=not run.plain,
            accumulate_allreduce_grads_in_fp32=True, bf16=run.dtype == "bf16", fp16=run.dtype == "fp16",
            loss_scale=None, initial_loss_scale=1024.0, loss_scale_window=1000, hysteresis=2, min_loss_scale=1.0,
            params_dtype=_TYPES[run.dtype], transformer_impl="local", rotary_base=10000, rotary_percent=1.0,
            optimizer="adam", ckpt_format=form, data_parallel_size=run.dp, iteration=self.iteration,
            consumed_train_samples=self.iteration * SAMPLES, world_size=run.world, rank=dist.get_rank(), save="/ckpt",
        )  # fmt: skip

    def _random(self) -> list[dict[str, Any]]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.mtrand.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.cuda.get_rng_state(),
                "rng_tracker_states": get_cuda_rng_tracker().get_states(),
            }
        ]

    def _set_random(self, states: list[dict[str, Any]]) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        state = states[0]
        random.setstate(state["random_rng_state"])
        np.random.mtrand.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        get_cuda_rng_tracker().set_states(state["rng_tracker_states"])

    def _models_by_name(self) -> dict[str, Any]:
        return {f"model{at}" if self.run.vpp else "model": model for at, model in enumerate(self.wrapped)}

    def _sharded_random(self) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        ps, run = self.ps, self.run
        place = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
        copy = ps.get_data_parallel_rank(with_context_parallel=True)
        return ShardedObject("rng_state", self._random(), (run.pp, run.tp), place, replica_id=copy)

    def save_distributed(
        self, root: Path, sharding: str, *, corrected: bool = False, content: Mapping[str, bool] | None = None
    ) -> None:
        """Save with `dist_checkpointing.save`, as `--ckpt-format torch_dist` does; or as a corrected Megatron would.

        `content` changes entries of the content metadata, which decide the keys.
        """
        from megatron.core import dist_checkpointing

        metadata = {
            "singleton_local_shards": False, "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": sharding, "distrib_optim_fully_reshardable_mem_efficient": True,
            **(content or {}),
        }  # fmt: skip
        ranks = {"dp_cp_group": self.ps.get_data_parallel_group(with_context_parallel=True)}
        models = {name: m.sharded_state_dict(metadata=metadata | ranks) for name, m in self._models_by_name().items()}
        folder = root / f"iter_{self.iteration:07d}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        with _corrected(self.optimizer) if corrected else nullcontext():
            # 0.12 has no metadata.
            how = {"sharding_type": sharding} if _is_0_12() else {"metadata": metadata | ranks}
            optimizer = self.optimizer.sharded_state_dict(models, **how)
        state = {
            "args": self._args("torch_dist"), "checkpoint_version": VERSION, "iteration": self.iteration, **models,
            "optimizer": optimizer,
            "opt_param_scheduler": self.scheduler.state_dict(), "rng_state": self._sharded_random(),
            "num_floating_point_operations_so_far": 12345,
        }  # fmt: skip
        dist_checkpointing.save(state, str(folder), **({} if _is_0_12() else {"content_metadata": metadata}))
        dist.barrier()
        self._track(root)

    def load_distributed(self, folder: Path) -> None:
        """Load with `dist_checkpointing.load`, in the order of Megatron-LM's `load_checkpoint`."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        common = load_common_state_dict(str(folder))
        said = common["content_metadata"]
        run, args = self.run, common["args"]
        metadata = {**said, "dp_cp_group": self.ps.get_data_parallel_group(with_context_parallel=True)}
        models = {name: m.sharded_state_dict(metadata=metadata) for name, m in self._models_by_name().items()}
        state: dict[str, Any] = {
            **models,
            "optimizer": self.optimizer.sharded_state_dict(models, is_loading=True, metadata=metadata),
        }
        same = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (run.tp, run.pp)
        if same:
            state["rng_state"] = self._sharded_random()
        loaded = dist_checkpointing.load(state, str(folder))
        self._take(loaded, [loaded[name] for name in models])
        self.optimizer.load_state_dict(loaded["optimizer"])
        if same:
            self._set_random(loaded["rng_state"])

    def _rank_folder(self, folder: Path) -> Path:
        ps, run = self.ps, self.run
        tensor, stage = ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if run.pp > 1 else "")
        return folder / (name + (f"_{ps.get_expert_model_parallel_rank():03d}" if run.ep > 1 else ""))

    def save_legacy(self, root: Path) -> None:
        """Save directories of ranks, as `--ckpt-format torch` does."""
        folder = self._rank_folder(root / f"iter_{self.iteration:07d}")
        folder.mkdir(parents=True, exist_ok=True)
        if not self.run.plain:
            self.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
        models = {name: m.state_dict_for_save_checkpoint() for name, m in self._models_by_name().items()}
        state = {
            "args": self._args("torch"), "checkpoint_version": VERSION, "iteration": self.iteration, **models,
            "optimizer": self.optimizer.state_dict(), "opt_param_scheduler": self.scheduler.state_dict(),
            "rng_state": self._random(), "num_floating_point_operations_so_far": 12345,
        }  # fmt: skip
        first = self.ps.get_expert_data_parallel_rank() if self.run.ep > 1 else self.ps.get_data_parallel_rank()
        if first == 0:
            torch.save(state, folder / "model_optim_rng.pt")
        dist.barrier()
        self._track(root)

    def load_legacy(self, folder: Path) -> None:
        """Load directories of ranks."""
        mine = self._rank_folder(folder)
        state = torch.load(mine / "model_optim_rng.pt", weights_only=False)
        self._take(state, [state[name] for name in self._models_by_name()])
        self.optimizer.load_state_dict(state["optimizer"])
        if not self.run.plain:
            self.optimizer.load_parameter_state(str(mine / "distrib_optim.pt"))
        self._set_random(state["rng_state"])

    def _take(self, state: dict[str, Any], models: list[Any]) -> None:
        for model, held in zip(self.wrapped, models, strict=True):
            model.load_state_dict(held, strict=True)
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.iteration = state["iteration"]

    def _track(self, root: Path) -> None:
        if dist.get_rank() == 0:
            (root / _TRACKER).write_text(str(self.iteration))
        dist.barrier()


def _wrapper(run: Run) -> Callable[[Any, Any], Any]:
    """The wrapper of a model: Megatron's own of 16 bits, else one that does nothing."""
    from megatron.core.transformer.module import Float16Module, MegatronModule

    class Whole(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, module: Any) -> None:
            super().__init__(config)
            self.module = module

        def shared_embedding_or_output_weight(self) -> Any:
            return self.module.shared_embedding_or_output_weight()

        def set_input_tensor(self, tensor: Any) -> Any:
            return self.module.set_input_tensor(tensor)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.load_state_dict(*args, **kwargs)

        def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.state_dict_for_save_checkpoint(*args, **kwargs)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.sharded_state_dict(*args, **kwargs)

    return Whole if run.dtype == "fp32" else Float16Module  # type: ignore[no-any-return]


def _is_0_12() -> bool:
    from megatron.core import __version__

    return str(__version__).startswith("0.12.")


def _gathered(optimizer: Any) -> Any:
    """The states of a distributed optimizer as vectors; up to 0.14 data-parallel ranks but the first have None."""
    if "return_on_all_ranks" in inspect.signature(optimizer.get_parameter_state_dp_zero).parameters:
        return optimizer.get_parameter_state_dp_zero(use_gloo_comm=True, return_on_all_ranks=True)
    state = optimizer.get_parameter_state_dp_zero()
    return state if optimizer.data_parallel_group.rank() == 0 else None


@contextmanager
def _corrected(optimizer: Any) -> Iterator[None]:
    """While it is open, `fully_reshardable` cuts states at offsets without buckets' padding (Megatron-LM#5077)."""
    held: list[tuple[Any, dict[Any, tuple[int, int, int]]]] = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for buffer in one.buffers:
            held.append((buffer, buffer.param_index_map))
            shift = [0]
            for bucket, (begin, end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
                shift.append(shift[-1] + end - begin - bucket.numel_unpadded)
            buffer.param_index_map = {p: (a - shift[b], z - shift[b], b) for p, (a, z, b) in held[-1][1].items()}
    try:
        yield
    finally:
        for buffer, places in held:
            buffer.param_index_map = places


def _mask(length: int) -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}


def _forward(feed: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(feed)
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    found = model(tokens, positions, _mask(tokens.shape[1]), labels=tokens.roll(-1, 1))
    return found, partial(_loss)


def _folder(root: Path) -> Path:
    """The directory that the tracker names, if there is one."""
    with suppress(FileNotFoundError):
        return root / f"iter_{int((root / _TRACKER).read_text()):07d}"
    return root


def train(
    run: dict[str, Any],
    out: str,
    *,
    load: list[str] | None = None,
    save: list[list[str]] | None = None,
    content: dict[str, bool] | None = None,
    megatron: str | None = None,
) -> dict[str, Any]:
    """Train or go on; returns the losses of the steps before the save (none for a run that loads) and after it.

    Args:
        run: The fields of `Run`.
        out: Directory for the live state: `loaded` or `saved`, each `.safetensors` and `.json`.
        load: Form and directory of a checkpoint: `torch_dist` or `torch`.
        save: Form and directory of each save; a form is that of an optimizer (`fully_reshardable`, `dp_reshardable`,
            `dp_zero_gather_scatter`, up to 0.14 `fully_sharded_model_space`), `torch`, or `corrected`:
            `fully_reshardable` as Megatron-LM#5077 corrects it. A plain optimizer is saved as it is.
        content: Entries of the content metadata of distributed saves, such as `singleton_local_shards`.
        megatron: Where another version of Megatron-core is than the one of all tests.
    """
    start_world()
    megatron_cpu.prepare(megatron)
    training = Training(Run(**run), resumed=load is not None)
    where = Path(out)
    where.mkdir(parents=True, exist_ok=True)
    before: list[float] = []
    if load is None:
        before = [training.step(number) for number in range(1, STEPS + 1)]
    else:
        take = training.load_legacy if load[0] == "torch" else training.load_distributed
        with torch.no_grad():  # of a model of fp32, masters are its own parameters, and Megatron writes into them
            take(_folder(Path(load[1])))
    training.dump(where / ("saved" if load is None else "loaded"))
    for form, place in save or ():
        if form == "torch":
            training.save_legacy(Path(place))
        elif form == "corrected":
            training.save_distributed(Path(place), "fully_reshardable", corrected=True, content=content)
        else:
            training.save_distributed(Path(place), form, content=content)
    after = [training.step(training.iteration + 1) for _ in range(STEPS)]
    return {"before": before, "after": after}
