"""Train the built-in model: a Llama of 3 M parameters on the standard library's prose.

    python scripts/train_tiny_model.py --output compressor/data/tiny --threads 2

It sees only the ``train`` split of :mod:`compressor.sources.builtin_text`; the weights with the lowest
loss on a slice of ``calibration`` are kept, and ``test`` is scored once at the end. Seeded: the same
Python, torch, thread count and processor give the same bytes. About 17 minutes of two cores; more steps only
overfit the half million tokens there are.

Width 192 divides by 64 but not by 128, so a group size of 128 has to fall back; two key/value heads for
six query heads and a tied embedding exercise what larger Llamas have.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compressor.sources.builtin_text import builtin_text

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
WINDOW, LONG_WINDOW = 256, 1024
BATCH_TOKENS = 2048
PEAK_RATE, WARM_UP, DECAY = 3e-3, 100, 0.1

# Each turn is opened by its role and closed by EOS; the template writes the BOS itself, as most do.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '[' + message['role'] + ']\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4096 tokens that puts BOS in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=LONG_WINDOW,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Randomly initialised, fp32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=LONG_WINDOW,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            initializer_range=192**-0.5 / 2,
        )
    )


class Muon:
    """Momentum whose update is orthogonalised (Jordan et al. 2024), scaled to the size of AdamW's (Liu et al. 2025).

    torch.optim.Muon iterates in bfloat16, which costs five times the rest of a step on a processor without
    bfloat16 arithmetic; this one iterates in fp32.
    """

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95) -> None:
        self._parameters, self._momentum = parameters, momentum
        self._buffers = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
            assert parameter.grad is not None
            buffer.lerp_(parameter.grad, 1 - self._momentum)
            update = orthogonalise(parameter.grad.lerp(buffer, self._momentum))
            parameter.mul_(1 - rate * DECAY)
            parameter.sub_(update, alpha=rate * 0.2 * max(parameter.shape) ** 0.5)
            parameter.grad = None


def orthogonalise(update: Tensor) -> Tensor:
    """The nearest matrix with singular values near 1: five quintic Newton-Schulz steps."""
    wide = update if update.shape[0] <= update.shape[1] else update.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide is update else x.T


class Windows:
    """Endless windows of the documents, cut elsewhere in every epoch and shuffled.

    A batch must mix documents: eight windows in a row from one module make a poor gradient.
    """

    def __init__(self, documents: list[Tensor], bos: int, eos: int, generator: torch.Generator) -> None:
        self._documents, self._bos, self._eos, self._generator = documents, bos, eos, generator
        self._left = torch.empty(0, 0, dtype=torch.long)

    def next(self, batch: int, length: int) -> Tensor:
        """[batch, length]; the first place of a window is BOS."""
        if len(self._left) < batch or self._left.shape[1] != length:
            self._left = self._epoch(length)
        taken, self._left = self._left[:batch], self._left[batch:]
        return taken

    def _epoch(self, length: int) -> Tensor:
        eos = torch.tensor([self._eos])
        order = torch.randperm(len(self._documents), generator=self._generator).tolist()
        stream = torch.cat([part for index in order for part in (self._documents[index], eos)])
        stream = stream[int(torch.randint(length, (), generator=self._generator)) :]
        body = length - 1
        windows = stream[: len(stream) // body * body].view(-1, body)
        windows = windows[torch.randperm(len(windows), generator=self._generator)]
        return torch.cat([torch.full((len(windows), 1), self._bos), windows], dim=1)


def fixed_windows(text: str, tokenizer: PreTrainedTokenizerFast, length: int, count: int | None) -> Tensor:
    """The first ``count`` windows [n, length] of ``text``, each with BOS in front."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    body = length - 1
    windows = ids[: len(ids) // body * body].view(-1, body)[:count]
    return torch.cat([torch.full((len(windows), 1), tokenizer.bos_token_id), windows], dim=1)


@torch.no_grad()
def mean_nll(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Nats per predicted token."""
    model.eval()
    losses = [loss_of(model, batch).item() * len(batch) for batch in windows.split(16)]
    model.train()
    return sum(losses) / len(windows)


def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(model: LlamaForCausalLM, windows: Windows, held_out: Tensor, steps: int) -> float:
    """Fit ``model``, leave the best weights in it, return their held-out loss."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [
            {"params": [model.model.embed_tokens.weight], "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=PEAK_RATE,
        betas=(0.9, 0.95),
    )
    best, best_weights, since_best = math.inf, {}, 0
    start = time.monotonic()
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARM_UP)
        rate = PEAK_RATE * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in adam.param_groups:
            group["lr"] = rate
        # The last sixth is read in long windows, so that every position the config allows was trained.
        length = LONG_WINDOW if step >= steps * 5 // 6 else WINDOW
        loss = loss_of(model, windows.next(BATCH_TOKENS // length, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(rate)
        adam.step()
        adam.zero_grad()
        if (step + 1) % 100 and step + 1 != steps:
            continue
        nll = mean_nll(model, held_out)
        print(
            f"step {step + 1}/{steps}  train {loss.item():.3f}  held out {nll:.3f} "
            f"(perplexity {math.exp(nll):.1f})  {time.monotonic() - start:.0f} s",
            flush=True,
        )
        since_best += 1
        if nll < best:
            best, since_best = nll, 0
            best_weights = {name: value.clone() for name, value in model.state_dict().items()}
        elif since_best == 4:
            break
    model.load_state_dict(best_weights)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    texts = [document.text for document in builtin_text("train")]
    tokenizer = train_tokenizer(texts)
    documents = [torch.tensor(tokenizer.encode(t, add_special_tokens=False, verbose=False)) for t in texts]
    generator = torch.Generator().manual_seed(options.seed)
    windows = Windows(documents, tokenizer.bos_token_id, tokenizer.eos_token_id, generator)
    calibration = "\n\n".join(document.text for document in builtin_text("calibration"))
    held_out = fixed_windows(calibration, tokenizer, WINDOW, 64)
    model = new_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{sum(map(len, documents))} training tokens, {parameters} parameters", flush=True)

    train(model, windows, held_out, options.steps)

    model = model.to(torch.bfloat16)
    model.save_pretrained(options.output)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(options.output)
    save_tokenizer(tokenizer, options.output)

    model = model.float()  # scores what was saved: bfloat16 weights, fp32 arithmetic
    test = "\n\n".join(document.text for document in builtin_text("test"))
    for length in (WINDOW, LONG_WINDOW):
        scored = fixed_windows(test, tokenizer, length, None)
        print(f"test, windows of {length}: perplexity {math.exp(mean_nll(model, scored)):.2f}", flush=True)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write it so that older transformers (and engines built on them) read it as well."""
    tokenizer.save_pretrained(output)
    file = output / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    (output / "chat_template.jinja").unlink(missing_ok=True)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    for key in ("backend", "is_local"):
        config.pop(key, None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
