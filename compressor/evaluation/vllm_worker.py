"""One model in vLLM, which runs inferences when asked; run by an interpreter that has vLLM, not compressor.

    python vllm_worker.py '{"model": …, "batch": …, …}'

Requests come as lines of JSON on standard input, answers go as lines of JSON to standard output. The engine runs in this
process (not in a child of its own), so that memory is seen and every step can be timed.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    # What vLLM prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")
        answers.flush()

    try:
        _serve(json.loads(sys.argv[1]), answer)
    except Exception as error:
        answer("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    os._exit(0)  # an engine's shutdown may hang


def _serve(request: dict[str, Any], answer: Any) -> None:
    import torch
    import vllm
    from alive import collect, peak_memory, reset_peak  # lies beside this file when it runs
    from vllm.inputs import TokensPrompt

    llm = vllm.LLM(
        model=request["model"],
        trust_remote_code=request["trust_remote_code"],
        enforce_eager=request["compile"] == "none",
        max_model_len=request["prompt_length"] + request["new_tokens"],
        max_num_seqs=request["batch"],
        # A prompt in one step, and none from a cache: its time is what is measured.
        max_num_batched_tokens=request["batch"] * (request["prompt_length"] + request["new_tokens"]),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9 / request["models"],
        seed=0,
    )
    engine, model = llm.llm_engine, llm.llm_engine.model_config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(request["seed"])
    shape = (request["batch"], request["prompt_length"])
    prompts = torch.randint(0, model.get_vocab_size(), shape, generator=generator).tolist()
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
    number = 0

    def infer() -> dict[str, Any]:
        nonlocal number
        number += 1
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{number}-{index}", TokensPrompt(prompt_token_ids=prompt), sampling)
        begun: set[str] = set()
        start = last = time.perf_counter()
        prefill, steps = 0.0, []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            if prefill:
                steps.append(now - last)
            else:
                begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
                if len(begun) == len(prompts):
                    prefill = now - start
            last = now
        return {"prefill": prefill, "steps": steps}

    reset_peak(device)
    dtype = str(model.dtype).removeprefix("torch.")
    answer("ready", {"name": f"vllm {vllm.__version__}", "dtype": dtype, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        wanted, argument = json.loads(line)
        if wanted == "infer":
            answer("done", infer())
        elif wanted == "memory":
            answer("done", peak_memory(device))
        else:
            answer("done", collect(infer, argument, device))


if __name__ == "__main__":
    main()
