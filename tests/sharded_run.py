"""``compressor distill`` with FSDP2 on CPUs, which accelerate itself only sets up on accelerators.

Run by torch.distributed.run; arguments are those of the command.
"""

import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, DistributedType

from compressor.cli.main import main
from compressor.distillation import run


def sharded(job: Any, logs: Path | None) -> Accelerator:
    AcceleratorState._reset_state()
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP
    return accelerator


run._accelerator = sharded  # type: ignore[assignment]
sys.argv[0] = "compressor"
main()
