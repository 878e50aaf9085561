"""``compressor distill`` with FSDP2 on CPUs, which accelerate itself only sets up on accelerators.

Run by torch.distributed.run; arguments are those of the command.
"""

import sys
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate import accelerator as library
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


saved = library.save_accelerator_state


def late(*args: Any, **options: Any) -> Any:
    """The second process writes its part of a checkpoint when the first has long been done."""
    if PartialState().process_index == 1:
        time.sleep(0.5)
    return saved(*args, **options)


library.save_accelerator_state = late
run._accelerator = sharded  # type: ignore[assignment]
sys.argv[0] = "compressor"
main()
