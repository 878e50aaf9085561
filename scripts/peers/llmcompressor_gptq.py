"""Peer: llm-compressor's GPTQ, run by an interpreter that has llmcompressor (see scripts/bench_peers.py).

python llmcompressor_gptq.py MODEL TOKENS.json OUTPUT BITS GROUP_SIZE
"""

import json
import sys
import time
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, tokens_path, output, bits, group_size = sys.argv[1:6]
tokens = json.loads(Path(tokens_path).read_text())
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(model_path)
weights = QuantizationArgs(
    num_bits=int(bits), type="int", symmetric=True, strategy="group", group_size=int(group_size)
)
recipe = GPTQModifier(
    config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
)
dataset = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]})
start = time.monotonic()
oneshot(
    model=model,
    processor=tokenizer,
    dataset=dataset,
    recipe=recipe,
    max_seq_length=len(tokens[0]),
    num_calibration_samples=len(tokens),
)
seconds = time.monotonic() - start
model.save_pretrained(output, save_compressed=True)
tokenizer.save_pretrained(output)
print(json.dumps({"calibration_seconds": seconds}))
