"""Peer: AutoRound, run by an interpreter that has auto-round (see scripts/bench_peers.py).

    python autoround.py MODEL TOKENS.json OUTPUT BITS GROUP_SIZE [ITERATIONS]

The result is saved with its weights dequantized, so that it is evaluated as AutoRound computes it.
"""

import json
import sys
import time
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path, tokens_path, output, bits, group_size = sys.argv[1:6]
iterations = int(sys.argv[6]) if len(sys.argv) > 6 else 50
tokens = [torch.tensor([row]) for row in json.loads(Path(tokens_path).read_text())]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(model_path)
rounding = AutoRound(
    model,
    tokenizer,
    bits=int(bits),
    group_size=int(group_size),
    sym=True,
    iters=iterations,
    nsamples=len(tokens),
    seqlen=tokens[0].shape[1],
    batch_size=8,
    dataset=tokens,
    device_map="cpu",
    amp=False,
)
start = time.monotonic()
rounding.quantize()
seconds = time.monotonic() - start
model.save_pretrained(output)
tokenizer.save_pretrained(output)
print(json.dumps({"calibration_seconds": seconds}))
