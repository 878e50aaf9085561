"""Load a checkpoint in vLLM and generate greedily; run by an interpreter that has vLLM, not compressor.

    python engine_vllm.py REQUEST.json REPORT.json

The request holds ``model``, ``prompts`` (lists of token ids), ``max_tokens``, and perhaps ``options`` of vLLM's. The report says how far it
got: ``stage`` is load, run or done; ``error`` what stopped it; ``no_kernel`` whether that was only a missing
kernel for this processor; ``tokens`` what was generated; ``int8_error`` how far INT8 products are off here.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

# In this process, so that an error arrives with its cause instead of as "engine core failed".
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def serve(request: dict[str, Any], report: dict[str, Any]) -> None:
    import vllm
    from vllm.inputs import TokensPrompt

    report["engine"] = f"vllm {vllm.__version__}"
    longest = max(len(prompt) for prompt in request["prompts"]) + request["max_tokens"]
    options = {"enforce_eager": True, "max_model_len": longest, "seed": 0, **request.get("options", {})}
    engine = vllm.LLM(model=request["model"], **options)
    report["stage"] = "run"
    report["dtype"] = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    report["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    report["stage"] = "done"
    report["int8_error"] = int8_error()


def int8_error() -> float | None:
    """Relative error of the processor's INT8 matrix product on full-size codes; None on a GPU or if unknown.

    oneDNN's kernels for x86 without VNNI add pairs of products in 16 bits, which saturate
    (2 · 255 · 127 > 32767).
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    try:
        a = torch.full((4, 64), 127, dtype=torch.int8)
        b = torch.full((64, 64), 127, dtype=torch.int8)
        ones = torch.ones(64, 1)
        handler = ops.create_onednn_scaled_mm(b.t(), ones, torch.float32, True, False, 1)
        out = ops.onednn_scaled_mm(handler, a, torch.empty(4, 64), torch.ones(4, 1), None, None, None)
        exact = 64.0 * 127 * 127
        return float((out - exact).abs().max()) / exact
    except Exception:  # internals of vLLM: another version may have others
        return None


def answer(
    how: Callable[[dict[str, Any], dict[str, Any]], None], request: dict[str, Any], report: dict[str, Any]
) -> None:
    """Call ``how`` and put into ``report`` what stopped it."""
    try:
        how(request, report)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # An engine may warm up while it starts: by then the weights were loaded.
        if any(
            frame.name in ("profile_run", "_dummy_run") for frame in traceback.extract_tb(error.__traceback__)
        ):
            report["stage"] = "run"
        # vLLM calls kernels as torch operators, which a build for another processor does not register.
        missing = isinstance(error, AttributeError) and "_OpNamespace" in str(error)
        report["no_kernel"] = missing or isinstance(error, NotImplementedError)
        traceback.print_exc()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as stream:
        request = json.load(stream)
    report: dict[str, Any] = {"stage": "load", "no_kernel": False}
    answer(serve, request, report)
    with open(sys.argv[2], "w", encoding="utf-8") as stream:
        json.dump(report, stream)
    sys.stdout.flush()
    os._exit(0)  # the report is written; an engine's shutdown may hang


if __name__ == "__main__":
    main()
