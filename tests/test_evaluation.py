"""Perplexity, KL and agreement against brute force, their intervals, and what evaluation refuses."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compressor.errors import InputRefused
from compressor.evaluation import pair
from compressor.evaluation.bootstrap import estimate, interval, resample_sums
from compressor.evaluation.embedding import evaluate_embeddings, nearest_neighbour
from compressor.evaluation.metrics import embedding_metrics, language_model_metrics
from compressor.evaluation.pair import Evaluation, evaluate_pair, token_scores
from compressor.evaluation.targets import IGNORED, masked_token_targets, next_token_targets
from compressor.sources.text import TokenSet

VOCABULARY = 23


class Toy(nn.Module):
    """A causal toy: logits at t depend on tokens 0..t through a running mean, and on nothing else."""

    def __init__(self, seed: int, scale: float = 3.0, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocabulary, 8, generator=generator))
        self.head = nn.Parameter(scale * torch.randn(8, vocabulary, generator=generator))
        self.dropout = nn.Dropout(0.5)
        self.shapes: list[tuple[int, ...]] = []
        self.masked: list[bool] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        self.masked.append(attention_mask is not None)
        hidden = self.dropout(self.embedding[input_ids])
        steps = torch.arange(1, input_ids.shape[1] + 1)[None, :, None]
        mean = hidden.cumsum(1) / steps
        return SimpleNamespace(logits=mean @ self.head, last_hidden_state=mean)


def token_set(lengths: list[int], width: int | None = None, seed: int = 0, pad: int = 0) -> TokenSet:
    """Random sequences of the given lengths, right-padded with ``pad`` to ``width``."""
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(VOCABULARY, (length,), generator=generator)
        mask[row, :length] = True
    return TokenSet(ids, mask, None)  # type: ignore[arg-type]


def evaluate(
    baseline: nn.Module | None, compressed: nn.Module, tokens: TokenSet, batch_size: int = 2
) -> Evaluation:
    return evaluate_pair(baseline, compressed, tokens, batch_size=batch_size, device="cpu")


def brute_force(baseline: Toy, compressed: Toy, tokens: TokenSet) -> dict[str, list[float]]:
    """The definitions, one token and one vocabulary entry at a time, in Python floats."""
    result: dict[str, list[float]] = {"nll": [], "baseline_nll": [], "kl": [], "agree": [], "count": []}

    @torch.no_grad()
    def log_probabilities(model: Toy, ids: list[int]) -> list[float]:
        mean = [sum(float(model.embedding[i, d]) for i in ids) / len(ids) for d in range(8)]
        logits = [sum(mean[d] * float(model.head[d, v]) for d in range(8)) for v in range(VOCABULARY)]
        top = max(logits)
        normaliser = top + math.log(sum(math.exp(x - top) for x in logits))
        return [x - normaliser for x in logits]

    for row in range(len(tokens.input_ids)):
        ids = tokens.input_ids[row][tokens.attention_mask[row]].tolist()
        sums = dict.fromkeys(result, 0.0)
        for t in range(1, len(ids)):
            p, q = log_probabilities(baseline, ids[:t]), log_probabilities(compressed, ids[:t])
            sums["nll"] -= q[ids[t]]
            sums["baseline_nll"] -= p[ids[t]]
            sums["kl"] += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
            sums["agree"] += p.index(max(p)) == q.index(max(q))
            sums["count"] += 1
        for name, value in sums.items():
            result[name].append(value)
    return result


def test_sums_equal_brute_force() -> None:
    baseline, compressed = Toy(1), Toy(2)
    tokens = token_set([9, 4, 1, 7, 2])
    result = evaluate(baseline, compressed, tokens)
    for name, expected in brute_force(baseline, compressed, tokens).items():
        np.testing.assert_allclose(getattr(result, name), expected, rtol=2e-5, atol=1e-6, err_msg=name)
    assert result.token_kl is not None
    np.testing.assert_allclose(
        result.token_kl.sum(), sum(brute_force(baseline, compressed, tokens)["kl"]), rtol=2e-5
    )


def test_small_kl_survives_fp32() -> None:
    """A perturbation of 1e-3 at logits around 30: KL about 1e-7, where the plain fp32 formula is all noise."""
    generator = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(64, 5000, generator=generator) + 30
    changed = logits + 1e-3 * torch.randn(64, 5000, generator=generator)
    p, q = logits.double().log_softmax(-1), changed.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    scores = token_scores(changed, logits, torch.zeros(64, dtype=torch.int64))
    assert scores.kl is not None
    error = (scores.kl.double() - exact).abs().max()
    plain = (logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - changed.log_softmax(-1))).sum(-1)
    assert exact.mean() < 1e-6
    assert error < 1e-7
    assert (scores.kl - exact).mean().abs() < 1e-8
    assert (plain.double() - exact).abs().max() > 2 * error


def test_kl_of_opposite_distributions_does_not_overflow() -> None:
    """Logits 400 apart: p underflows where q is one and the other way round; KL is 400."""
    logits = torch.zeros(1, 50)
    logits[0, 0] = 400.0
    scores = token_scores(logits.roll(1, -1), logits, torch.zeros(1, dtype=torch.int64))
    assert scores.kl is not None
    assert float(scores.kl) == pytest.approx(400.0)


lengths_strategy = st.lists(st.integers(1, 12), min_size=1, max_size=7).filter(
    lambda lengths: max(lengths) > 1
)


@settings(max_examples=25, deadline=None)
@given(lengths_strategy, st.integers(0, 99), st.floats(0.1, 30))
def test_kl_is_never_negative_and_zero_for_identical_models(
    lengths: list[int], seed: int, scale: float
) -> None:
    tokens = token_set(lengths, seed=seed)
    different = evaluate(Toy(seed, scale), Toy(seed + 1, scale), tokens)
    same = evaluate(Toy(seed, scale), Toy(seed, scale), tokens)
    assert different.token_kl is not None
    assert (different.token_kl >= 0).all()
    assert same.token_kl is not None
    assert (same.token_kl == 0).all()
    np.testing.assert_array_equal(same.agree, same.count)
    np.testing.assert_array_equal(same.nll, same.baseline_nll)


@settings(max_examples=25, deadline=None)
@given(lengths_strategy, st.integers(1, 8), st.integers(0, 5), st.randoms(use_true_random=False))
def test_padding_batches_and_order_do_not_matter(
    lengths: list[int], batch_size: int, extra: int, random: Any
) -> None:
    baseline, compressed = Toy(1), Toy(2)
    expected = evaluate(baseline, compressed, token_set(lengths), batch_size=1)
    padded = token_set(lengths, width=max(lengths) + extra, pad=5)
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = TokenSet(padded.input_ids[order], padded.attention_mask[order], padded.report)
    result = evaluate(baseline, compressed, shuffled, batch_size=batch_size)
    for name in ("count", "nll", "baseline_nll", "kl", "agree"):
        np.testing.assert_allclose(
            getattr(result, name), getattr(expected, name)[order], rtol=1e-4, atol=1e-5
        )


def test_large_vocabulary_is_chunked_without_changing_results(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = token_set([9, 4, 7])
    whole = evaluate(Toy(1), Toy(2), tokens)
    seen = []

    def watch(logits: Tensor, *rest: Any) -> Any:
        seen.append(len(logits))
        return token_scores(logits, *rest)

    monkeypatch.setitem(pair._CHUNK, "cpu", 3 * VOCABULARY)
    monkeypatch.setattr("compressor.evaluation.pair.token_scores", watch)
    chunked = evaluate(Toy(1), Toy(2), tokens)
    assert max(seen) == 3
    assert sum(seen) == 17
    for name in ("nll", "kl", "agree"):
        np.testing.assert_allclose(getattr(chunked, name), getattr(whole, name), rtol=1e-6)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    metrics = language_model_metrics(evaluate(None, Toy(0, scale=0.0), token_set([9, 5, 7])), seed=0)
    assert set(metrics) == {"perplexity", "nll"}
    perplexity = metrics["perplexity"].compressed
    assert perplexity.value == pytest.approx(VOCABULARY, rel=1e-6)
    assert perplexity.low == pytest.approx(VOCABULARY, rel=1e-6)
    assert perplexity.high == pytest.approx(VOCABULARY, rel=1e-6)


def test_mask_is_given_only_with_padding_and_padding_columns_are_cut() -> None:
    model = Toy(0)
    evaluate(None, model, token_set([6, 6, 4, 6], width=9))
    assert model.shapes == [(2, 6), (2, 6)]
    assert model.masked == [False, True]


def test_dropout_is_off_and_modes_are_restored() -> None:
    model = Toy(0).train()
    model.dropout.eval()
    first, second = evaluate(None, model, token_set([8, 8])), evaluate(None, model, token_set([8, 8]))
    np.testing.assert_array_equal(first.nll, second.nll)
    assert model.training
    assert not model.dropout.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("broken", ["baseline", "compressed"])
def test_non_finite_logits_name_model_and_sequence(value: float, broken: str) -> None:
    class Broken(Toy):
        name_or_path = "models/broken"

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            output = super().forward(input_ids, attention_mask)
            output.logits[input_ids[:, 0] == 22, 3, 4] = value
            return output

    tokens = token_set([6, 6, 6, 6, 6])
    tokens.input_ids[:, 0] = torch.tensor([1, 2, 3, 22, 4])
    pair = (Broken(0), Toy(1)) if broken == "baseline" else (Toy(1), Broken(0))
    with pytest.raises(
        InputRefused, match=r"models/broken: NaN or infinite logits at sequence 3, position 3"
    ):
        evaluate(*pair, tokens)


def test_other_vocabulary_is_refused() -> None:
    with pytest.raises(InputRefused, match=r"vocabularies differ: 23 logits .* and 31"):
        evaluate(Toy(0), Toy(0, vocabulary=31), token_set([5]))


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(InputRefused, match="no token to score"):
        next_token_targets(token_set([1, 1]))


def test_masked_targets_hide_a_seeded_share_of_ordinary_tokens() -> None:
    tokens = token_set([22, 12, 6], seed=3)
    tokens.input_ids[:, 0] = 1
    targets = masked_token_targets(tokens, mask_token_id=2, special_ids=frozenset({1, 2}), seed=0)
    hidden = targets.labels != IGNORED
    assert (targets.input_ids[hidden] == 2).all()
    assert (targets.labels[hidden] == tokens.input_ids[hidden]).all()
    assert (targets.input_ids[~hidden] == tokens.input_ids[~hidden]).all()
    assert not hidden[~tokens.attention_mask].any()
    assert not hidden[torch.isin(tokens.input_ids, torch.tensor([1, 2]))].any()
    ordinary = (tokens.attention_mask & ~torch.isin(tokens.input_ids, torch.tensor([1, 2]))).sum(1)
    assert hidden.sum(1).tolist() == [max(1, round(0.15 * int(n))) for n in ordinary]
    again = masked_token_targets(tokens, mask_token_id=2, special_ids=frozenset({1, 2}), seed=0)
    assert torch.equal(again.labels, targets.labels)
    other = masked_token_targets(tokens, mask_token_id=2, special_ids=frozenset({1, 2}), seed=1)
    assert not torch.equal(other.labels, targets.labels)


def test_masked_scores_equal_the_model_at_hidden_positions() -> None:
    tokens = token_set([9, 7])
    targets = masked_token_targets(tokens, mask_token_id=0, special_ids=frozenset({0}), seed=0)
    model = Toy(0).eval()
    result = evaluate_pair(None, model, tokens, batch_size=2, device="cpu", targets=targets)
    probabilities = model(targets.input_ids).logits.double().log_softmax(-1)
    for row in range(2):
        at = (targets.labels[row] != IGNORED).nonzero().flatten()
        expected = -sum(probabilities[row, t, targets.labels[row, t]].item() for t in at)
        assert result.nll[row] == pytest.approx(expected, rel=1e-5)
        assert result.count[row] == len(at)


# Intervals


def test_bootstrap_totals_match_a_loop_and_are_seeded() -> None:
    columns = {"x": np.array([1.0, 5.0, 2.0]), "n": np.array([1.0, 2.0, 4.0])}
    sums = resample_sums(columns, resamples=400, seed=1)
    again = resample_sums(columns, resamples=400, seed=1)
    other = resample_sums(columns, resamples=400, seed=2)
    np.testing.assert_array_equal(sums["x"], again["x"])
    assert (sums["x"] != other["x"]).any()
    # Every resample is three draws: both columns must come from the same draws.
    draws = {
        (x0 + x1 + x2, n0 + n1 + n2)
        for x0, n0 in zip(*columns.values(), strict=True)
        for x1, n1 in zip(*columns.values(), strict=True)
        for x2, n2 in zip(*columns.values(), strict=True)
    }
    assert set(zip(sums["x"].tolist(), sums["n"].tolist(), strict=True)) == draws


def test_blocks_of_resamples_are_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"x": np.arange(50.0)}
    whole = resample_sums(columns, resamples=101, seed=0)["x"]
    monkeypatch.setattr("compressor.evaluation.bootstrap._BLOCK", 1000)
    np.testing.assert_array_equal(resample_sums(columns, resamples=101, seed=0)["x"], whole)


def test_estimate_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    columns = {"nll": np.array([2.0, 30.0]), "count": np.array([1.0, 10.0])}
    sums = resample_sums(columns, resamples=100, seed=0)
    assert estimate(lambda s: s["nll"] / s["count"], columns, sums).value == pytest.approx(32 / 11)


@pytest.mark.parametrize("n", [8, 32])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    """Ratio of sums with unequal counts, 400 experiments: 95 % coverage within its own sampling error."""
    rng = np.random.default_rng(0)
    truth, covered, trials = 3.0, 0, 400
    for _ in range(trials):
        count = rng.integers(50, 150, n).astype(float)
        nll = count * (truth + rng.normal(0, 0.4, n))
        columns = {"nll": nll, "count": count}
        found = estimate(
            lambda s: s["nll"] / s["count"], columns, resample_sums(columns, resamples=1000, seed=1)
        )
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / trials <= 0.98


def test_pairing_makes_the_difference_tighter_than_either_side() -> None:
    rng = np.random.default_rng(0)
    count, nll = np.full(32, 100.0), 300 + 80 * rng.normal(size=32)
    evaluation = Evaluation(
        count=count,
        nll=nll + 5,
        baseline_nll=nll,
        kl=np.full(32, 4.0),
        agree=np.full(32, 90.0),
        token_kl=np.full(3200, 0.04),
    )
    metrics = language_model_metrics(evaluation, seed=0)
    perplexity = metrics["perplexity"]
    assert perplexity.ratio is not None
    assert perplexity.ratio.value == pytest.approx(math.exp(0.05))
    assert perplexity.ratio.low == pytest.approx(math.exp(0.05))
    assert perplexity.baseline is not None
    assert perplexity.baseline.low is not None
    assert perplexity.baseline.low < 0.97 * perplexity.baseline.value
    assert perplexity.change is not None
    assert perplexity.change.value == pytest.approx(perplexity.compressed.value - perplexity.baseline.value)
    assert metrics["kl"].compressed.value == pytest.approx(0.04)
    assert metrics["kl"].quantiles == pytest.approx({"p50": 0.04, "p95": 0.04, "p99": 0.04, "max": 0.04})
    assert metrics["top1_agreement"].compressed.value == pytest.approx(0.9)


def test_one_sequence_gives_a_value_and_no_interval() -> None:
    metrics = language_model_metrics(evaluate(Toy(0), Toy(1), token_set([9])), seed=0)
    kl = metrics["kl"].compressed
    assert kl.value > 0
    assert kl.low is None
    assert kl.high is None


def test_overflowing_perplexity_is_left_out() -> None:
    sums = np.array([8000.0, 9000.0])
    metrics = language_model_metrics(Evaluation(count=np.array([10.0, 10.0]), nll=sums), seed=0)
    assert set(metrics) == {"nll"}
    assert metrics["nll"].compressed.value == 850


def test_small_samples_widen_the_interval() -> None:
    samples = np.linspace(0, 1, 1001)
    assert interval(samples, 10_000) == pytest.approx((0.025, 0.975), abs=1e-3)
    low, high = interval(samples, 8)
    assert low < 0.01
    assert high > 0.99


# Encoders


def test_embeddings_equal_mean_pooling_by_hand() -> None:
    baseline, compressed = Toy(1).eval(), Toy(2).eval()
    tokens = token_set([5, 3, 8, 2], width=10)
    result = evaluate_embeddings(baseline, compressed, tokens, batch_size=3, device="cpu")

    def pooled(model: Toy, row: int) -> Tensor:
        ids = tokens.input_ids[row][tokens.attention_mask[row]]
        return model(ids[None]).last_hidden_state[0].double().mean(0)

    for row in range(4):
        a, b = pooled(baseline, row), pooled(compressed, row)
        assert result.cosine[row] == pytest.approx((a @ b / a.norm() / b.norm()).item(), abs=1e-6)
    metrics = embedding_metrics(result, seed=0)
    assert metrics["cosine"].compressed.value == pytest.approx(result.cosine.mean())


def test_identical_encoders_agree_fully() -> None:
    result = evaluate_embeddings(Toy(1), Toy(1), token_set([5, 3, 8, 2]), batch_size=2, device="cpu")
    np.testing.assert_allclose(result.cosine, 1)
    np.testing.assert_array_equal(result.same_neighbour, 1)


def test_nearest_neighbour_matches_a_loop_and_its_blocks() -> None:
    vectors = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similarity = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    expected = [
        max((j for j in range(9) if j != i), key=lambda j, i=i: float(similarity[i, j])) for i in range(9)
    ]
    assert nearest_neighbour(vectors).tolist() == expected
    assert nearest_neighbour(vectors, block=2).tolist() == expected
