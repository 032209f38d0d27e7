"""Makes the folders of `old_torch`: small files of older torches, on two ranks of gloo, and the tensors of the run.

    python tests/data/make_old_torch.py FOLDER

with the torch to be kept. A torch without a build for the CPU alone needs the libraries of CUDA, or empty ones of their names, to be imported.
It saves, after two steps of AdamW on a tiny model:

* `ranks`: each rank's state dicts, named as verl names them, with DTensors;
* `dcp`: the same state by `torch.distributed.checkpoint`;
* `expected.json`: whole tensors by kind and parameter, and the versions.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # up to 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor
try:
    from torch.distributed.device_mesh import DeviceMesh
except ImportError:  # up to 2.1
    from torch.distributed._tensor import DeviceMesh
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    try:
        from torch.distributed._composable.fsdp import fully_shard
    except ImportError:  # up to 2.3
        fully_shard = None

WORLD = 2


class Tiny(nn.Module):
    """Rows that two ranks share unevenly, a matrix, and biases."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(4, 5)
        self.head = nn.Linear(5, 2, bias=False)

def sharded(model, mesh):
    """The model under FSDP2, or with its parameters as DTensors where there is no FSDP2; and the name of what was done."""
    if fully_shard is not None:
        fully_shard(model.rows, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, "fully_shard"
    for module in (model.rows, model.head):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model, "distribute_tensor"


def whole(tensor):
    """The tensor, gathered."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()]).to_local().clone()  # waits where it is on its way


def run(rank, port, out):
    """One rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model, how = sharded(Tiny(), DeviceMesh("cpu", list(range(WORLD))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(2):
        torch.manual_seed(step)
        # By hand: up to torch 2.6 a pass through FSDP2 asks for CUDA's streams.
        for parameter in model.parameters():
            parameter.grad = distribute_tensor(torch.randn(parameter.shape), parameter.device_mesh, [Shard(0)])
        optimizer.step()
    ranks = out / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    tail = f"world_size_{WORLD}_rank_{rank}.pt"
    torch.save(model.state_dict(), ranks / f"model_{tail}")
    try:
        torch.save(optimizer.state_dict(), ranks / f"optim_{tail}")
    except TypeError as error:  # torch 2.1 cannot pickle the meshes of states
        print("no optimizer in the ranks' files:", error)
        (ranks / f"optim_{tail}").unlink()
    torch.save({"lr_scheduler": None, "rng": None}, ranks / f"extra_state_{tail}")
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    states = {name: state["state"][i] for i, name in enumerate(names)}
    groups = [{**state["param_groups"][0], "params": names}]
    whole_state = {"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}}
    try:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        whole_state = {
            "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)
        }
    except Exception as error:
        print("own keys:", type(error).__name__, str(error)[:200])
    if hasattr(dcp, "save"):
        dcp.save(whole_state, checkpoint_id=str(out / "dcp"))
    else:
        dcp.save_state_dict(whole_state, dcp.FileSystemWriter(str(out / "dcp")))
    truth = {"fp32": {n: whole(p).tolist() for n, p in model.named_parameters()}}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        truth[kind] = {name: whole(states[name][kind]).tolist() for name in names}
    if rank == 0:
        (ranks / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
        said = {"torch": torch.__version__, "python": sys.version.split()[0], "sharded_by": how, "tensors": truth}
        (out / "expected.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        free = server.getsockname()[1]
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    torch.multiprocessing.spawn(run, (free, target), nprocs=WORLD)
