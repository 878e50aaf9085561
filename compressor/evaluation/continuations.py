"""A few prompts continued greedily by both models, for a person to read side by side."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from compressor.evaluation.pair import evaluation_mode, memory_errors
from compressor.sources.text import TokenSet

PROMPT_TOKENS = 32
NEW_TOKENS = 32


@dataclass(frozen=True)
class Generation:
    """One prompt and its continuations; ``same_tokens`` new ones agree before the first that does not."""

    prompt: str
    compressed: str
    baseline: str | None
    same_tokens: int | None
    new_tokens: int


def continuations(
    baseline: nn.Module | None,
    compressed: nn.Module,
    tokens: TokenSet,
    tokenizer: Any,
    *,
    count: int,
    device: torch.device | str,
) -> tuple[Generation, ...]:
    """Continue the beginnings of the first ``count`` sequences, at most half of each, by up to 32 tokens.

    Sequences of fewer than four tokens are left out. Prompts go one at a time, so that no padding takes part.
    """
    found = []
    with torch.inference_mode(), memory_errors(1), evaluation_mode(compressed):
        for ids, mask in zip(tokens.input_ids[:count], tokens.attention_mask[:count], strict=True):
            length = min(PROMPT_TOKENS, int(mask.sum()) // 2)
            if length < 2:
                continue
            prompt = ids[:length].tolist()
            ours = _continued(compressed, prompt, tokenizer, device)
            theirs = None
            if baseline is not None:
                with evaluation_mode(baseline):
                    theirs = _continued(baseline, prompt, tokenizer, device)
            found.append(
                Generation(
                    prompt=tokenizer.decode(prompt, skip_special_tokens=True),
                    compressed=tokenizer.decode(ours, skip_special_tokens=True),
                    baseline=None if theirs is None else tokenizer.decode(theirs, skip_special_tokens=True),
                    same_tokens=None if theirs is None else _same(theirs, ours),
                    new_tokens=NEW_TOKENS if theirs is None else max(len(theirs), len(ours)),
                )
            )
    return tuple(found)


def _continued(model: Any, prompt: list[int], tokenizer: Any, device: torch.device | str) -> list[int]:
    # A configuration of its own: the model's may ask for sampling, penalties or beams.
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        eos_token_id=model.config.get_text_config().eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        bos_token_id=tokenizer.bos_token_id,
    )
    ids = torch.tensor([prompt], device=device)
    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return answer[0, len(prompt) :].tolist()


def _same(first: list[int], second: list[int]) -> int:
    """How many tokens agree from the beginning on: [5, 6, 7] and [5, 6, 8] agree in two."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
