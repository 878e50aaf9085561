"""Does vLLM load what compressor makes of each family? Quantizes the tests' small models and asks it.

    python scripts/vllm_families.py --engine-python $(scripts/engine_env.sh) [FAMILY…]

Every family goes through the command line in w4g32 and in w8a8, and vLLM then answers prompts: decoders continue them
as ``compressor verify --engine vllm`` checks it, classifiers give probabilities that are compared with transformers'.
One vLLM process serves all checkpoints one after the other, and is started again where one brings it down. Findings go
to ``tests/data/vllm_families.json``, from which the README's column is made; families that are not named stay as they are.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "data" / "vllm_families.json"
SCHEMES = ("w4g32", "w8a8")
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 4, 16, 8
_FAR = 0.05  # of probability
_RATE = 16_000  # Hz

# vLLM has no attention for heads as small as the fixtures'.
_WIDTHS: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "query_pre_attn_scalar": 64, "moe_intermediate_size": 64, "word_embed_proj_dim": 128, "pooler_hidden_size": 128,
    "ffn_hidden_size": 256, "ffn_dim": 256, "n_embd": 128, "n_head": 2, "n_inner": 256, "dim": 128, "n_heads": 2, "hidden_dim": 256,
    "d_model": 128, "d_ff": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 2, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32},
    "falcon": {"ffn_hidden_size": 512},  # vLLM goes by four times the hidden size
    "mamba2": {"num_heads": 32, "head_dim": 8},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 64},
}
# vLLM's vision models import torchvision, which PyPI has for CUDA only. Its compiled operators do not load beside a
# torch for CPUs, but all that is imported of it here does once they are declared.
_DECLARE = """
import re, torch
from importlib.util import find_spec
from pathlib import Path
spec = find_spec("torchvision")
if spec is not None and not torch.cuda.is_available():
    code = (Path(spec.origin).parent / "_meta_registrations.py").read_text("utf-8")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for names in sorted(set(re.findall(r"register_meta..(\\w+)|torchvision::(\\w+)", code))):
        library.define("".join(names) + "(Tensor x) -> Tensor")
"""
_TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}  # the fixtures have no processor
_ROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}


def changes(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a family's fixture needs for vLLM: the same model, wider."""
    found = {key: value for key, value in _WIDTHS.items() if key in settings}
    if "text_config" in settings:
        text = settings["text_config"] | changes(name, settings["text_config"])
        found["text_config"] = text | ({"rope_parameters": _ROPE} if "rope_parameters" in text else {})
        if "out_hidden_size" in (vision := settings["vision_config"]):
            found["vision_config"] = vision | {"out_hidden_size": 128}
        elif name == "qwen2_vl":
            found["vision_config"] = vision | {"hidden_size": 128}
    return found | _CHANGES.get(name, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--packages", type=Path, help="more packages for vLLM, from pip install --target")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from architectures import FAMILIES
    from cli import _engine_here

    from compressor.checkpoint import reload

    reload.run_process = (
        _engine_here  # transformers in this process, which saves starting it for each checkpoint
    )
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"families": {}}
    names = arguments.families or list(FAMILIES)
    with tempfile.TemporaryDirectory(prefix="compressor-") as directory:
        found, engine = ask(names, Path(directory), arguments.engine_python.absolute(), arguments.packages)
    families = known["families"] | found
    document = {**engine, "families": {name: families[name] for name in FAMILIES if name in families}}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def ask(
    names: list[str], directory: Path, python: Path, packages: Path | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What came of each family and scheme, and which vLLM on which processor said so."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    requests = []
    for name in names:
        for scheme in SCHEMES:
            made = quantized(name, scheme, directory)
            if isinstance(made, Path):
                requests.append(request(name, scheme, made))
            else:
                found[name][scheme] = {"outcome": "not quantized", "detail": made}
    engine = {"vllm": "", "processor": ""}
    for asked, report in zip(requests, served(requests, directory, python, packages), strict=True):
        engine = {key: report.get(key, value) for key, value in engine.items()}
        found[asked["family"]][asked["scheme"]] = judged(asked, report)
        print(asked["family"], asked["scheme"], found[asked["family"]][asked["scheme"]], flush=True)
    return found, engine


def quantized(name: str, scheme: str, directory: Path) -> Path | str:
    """A verified checkpoint, or the line with which compressor refuses to make it."""
    import torch
    import transformers
    from architectures import FAMILIES, save_family
    from cli import run_here

    source, target = directory / name, directory / f"{name}-{scheme}"
    if not source.exists():
        save_family(source, name, dtype=torch.bfloat16, **changes(name, FAMILIES[name].settings))
        if FAMILIES[name].kind == "speech":
            frames = {"feature_size": 16, "chunk_length": 1}  # as the fixture's config has them
            transformers.WhisperFeatureExtractor(**frames).save_pretrained(source)
    code, _, err = run_here("quantize", source, "-o", target, "--scheme", scheme, "--method", "rtn")
    if code == 0:
        return target
    return next(line for line in err.splitlines() if line.startswith("error: ")).replace(f"{source}: ", "")


def request(name: str, scheme: str, checkpoint: Path) -> dict[str, Any]:
    from architectures import FAMILIES

    from compressor.checkpoint.artifact import open_artifact
    from compressor.checkpoint.reload import token_sequences

    prompts = token_sequences(open_artifact(checkpoint), False, count=_PROMPTS, length=_PROMPT_TOKENS)
    kind = FAMILIES[name].kind
    return {
        "family": name, "scheme": scheme, "model": str(checkpoint), "prompts": prompts, "max_tokens": _NEW_TOKENS,
        "kind": kind, "options": _TEXT_ONLY if kind == "vision" else {},
    }  # fmt: skip


def served(
    requests: list[dict[str, Any]], directory: Path, python: Path, packages: Path | None
) -> list[dict[str, Any]]:
    """vLLM's report on each request."""
    from compressor.checkpoint import engine_vllm
    from compressor.checkpoint.serve import engine_environment

    # Copied, because Python puts a script's directory first on its path, and the package's has a compressed_tensors.py.
    for script in (Path(engine_vllm.__file__), Path(__file__)):
        shutil.copyfile(script, directory / script.name)
    environment = engine_environment()
    if packages is not None:
        (directory / "sitecustomize.py").write_text(_DECLARE, "utf-8")  # vLLM starts processes of its own
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (directory, packages.resolve())))
    reports: list[dict[str, Any]] = []
    while len(reports) < len(requests):
        (directory / "requests.json").write_text(json.dumps(requests[len(reports) :]), "utf-8")
        (directory / "reports.jsonl").write_text("", "utf-8")
        command = [python, Path(__file__).name, "--serve"]
        with (directory / "log").open("w") as log:
            subprocess.run(command, cwd=directory, env=environment, stdout=log, stderr=log, check=False)
        lines = (directory / "reports.jsonl").read_text("utf-8").splitlines()
        reports += map(json.loads, lines)
        if len(reports) < len(requests):  # the next one took the process down with it
            last = (directory / "log").read_text("utf-8").strip().splitlines()[-1:]
            reports.append({"stage": "load", "error": f"the process ended: {' '.join(last)[:200]}"})
    return reports


def judged(asked: dict[str, Any], report: dict[str, Any]) -> dict[str, str]:
    """``outcome`` is yes, no, or not run; ``detail`` says what was found."""
    from compressor.checkpoint.artifact import open_artifact
    from compressor.checkpoint.file_checks import Failed
    from compressor.checkpoint.reload import load_in_transformers
    from compressor.checkpoint.serve import judge

    if not report.get("known", True):
        return {"outcome": "no", "detail": "not in vLLM"}
    if report.get("no_kernel"):
        return {"outcome": "not run", "detail": report["error"]}
    if report["stage"] != "done":
        return {"outcome": "no", "detail": f"{report['stage']}: {report['error']}"}
    checkpoint = Path(asked["model"])
    try:
        if asked["kind"] == "speech":
            return heard(checkpoint, asked, report)
        if asked["kind"] != "encoder":
            return {
                "outcome": "yes",
                "detail": judge(open_artifact(checkpoint), asked["prompts"], report, False),
            }
        theirs = load_in_transformers(
            checkpoint, asked["prompts"], False, dtype=report["dtype"], upcast=False
        )
    except Failed as reason:
        return {"outcome": "no", "detail": str(reason)}
    import torch

    given = torch.tensor(report["probabilities"])
    far = float((given - torch.cat(theirs.outputs).softmax(-1)).abs().max())
    detail = f"vllm {report['vllm']}, {report['dtype']}: probabilities within {far:.3f} of transformers'"
    return {"outcome": "yes" if far <= _FAR else "no", "detail": detail}


def heard(checkpoint: Path, asked: dict[str, Any], report: dict[str, Any]) -> dict[str, str]:
    """The rule of ``compressor verify --engine vllm``, for text that follows on speech."""
    import torch
    import transformers

    from compressor.evaluation.load import load_for_evaluation

    model = load_for_evaluation(checkpoint, dtype=report["dtype"])
    extract = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
    features = extract(_sound(), sampling_rate=_RATE, return_tensors="pt").input_features.to(model.dtype)
    near = 0
    for prompt, new in zip(asked["prompts"], report["tokens"], strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + new])
            logits = model(input_features=features, decoder_input_ids=ids).logits[0].float()
        logits = logits[len(prompt) - 1 : -1]
        regret = logits.amax(-1) - logits.gather(-1, torch.tensor(new)[:, None])[:, 0]
        near += int((regret <= math.log(2)).sum())
    total = _PROMPTS * _NEW_TOKENS
    detail = f"vllm {report['vllm']}, {report['dtype']}: {near} of {total} greedy tokens on speech are at least half as likely as transformers' first choice"
    return {"outcome": "yes" if near >= 0.9 * total else "no", "detail": detail}


def _sound() -> Any:
    """A second of sound that rises in pitch."""
    import numpy as np

    return np.sin(np.linspace(0, 60, _RATE) ** 2).astype(np.float32)


def serve() -> None:
    """The side of vLLM: answer the requests in this directory."""
    import engine_vllm  # sets the environment that vLLM is imported in
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: (
        ask()
    )  # a fresh interpreter for each architecture takes most of the time

    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in cpu if line.startswith("model name")), "")
    known = vllm.ModelRegistry.get_supported_archs()
    for asked in json.loads(Path("requests.json").read_text("utf-8")):
        (architecture,) = json.loads((Path(asked["model"]) / "config.json").read_text("utf-8"))[
            "architectures"
        ]
        report: dict[str, Any] = {
            "stage": "load",
            "no_kernel": False,
            "vllm": vllm.__version__,
            "processor": processor,
        }
        report["known"] = architecture in known
        if report["known"]:
            how = {"encoder": classify, "speech": hear}.get(asked["kind"], engine_vllm.serve)
            engine_vllm.answer(how, asked, report)
            cleanup_dist_env_and_memory()
        with Path("reports.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # an engine's shutdown may hang


def hear(request: dict[str, Any], report: dict[str, Any]) -> None:
    import vllm

    engine = vllm.LLM(model=request["model"], enforce_eager=True, max_model_len=64, seed=0)
    report["stage"] = "run"
    report["dtype"] = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
    speech = {"prompt": "", "multi_modal_data": {"audio": (_sound(), _RATE)}}
    prompts = [
        {"encoder_prompt": speech, "decoder_prompt": {"prompt_token_ids": ids}} for ids in request["prompts"]
    ]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    report["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    report["stage"] = "done"


def classify(request: dict[str, Any], report: dict[str, Any]) -> None:
    import vllm
    from vllm.inputs import TokensPrompt

    engine = vllm.LLM(model=request["model"], runner="pooling", enforce_eager=True, max_model_len=64, seed=0)
    report["stage"] = "run"
    report["dtype"] = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request["prompts"]]
    report["probabilities"] = [
        list(output.outputs.probs) for output in engine.classify(prompts, use_tqdm=False)
    ]
    report["stage"] = "done"


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
