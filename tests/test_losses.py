"""Loss formulas against brute force, and what must not change them: chunks, padding, vocabulary padding."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.distillation.fused import Head, Objective, head_loss, logits_loss
from compressor.distillation.losses import (
    DIVERGENCES,
    MASKED,
    Divergence,
    binary_divergence,
    divergence,
    hidden_cosine,
    hidden_mse,
    relation_kl,
    softened,
)
from compressor.distillation.sparse import SparseTargets, random_samples, sparse_forward_kl, top_k


def _kl(p: list[float], q: list[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def _by_hand(kind: str, s: list[float], t: list[float]) -> float:
    def mix(a: list[float], b: list[float], w: float) -> list[float]:
        return [w * x + (1 - w) * y for x, y in zip(a, b, strict=True)]

    match kind:
        case "fkl":
            return _kl(t, s)
        case "rkl":
            return _kl(s, t)
        case "jsd":
            return 0.5 * _kl(t, mix(t, s, 0.5)) + 0.5 * _kl(s, mix(t, s, 0.5))
        case "skl":
            return _kl(t, mix(t, s, 0.1))
        case "srkl":
            return _kl(s, mix(s, t, 0.1))
    raise AssertionError(kind)


logits = st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5)


@given(logits, logits, st.sampled_from(DIVERGENCES), st.sampled_from([0.5, 1.0, 3.0]))
def test_divergences_are_their_definitions(
    s: list[float], t: list[float], kind: Divergence, temperature: float
) -> None:
    student, teacher = torch.tensor([s]), torch.tensor([t])
    value = divergence(kind, softened(student, temperature), softened(teacher, temperature))
    probabilities = [softened(x.double(), temperature).double().exp()[0].tolist() for x in (student, teacher)]
    smallest = min(min(p) for p in probabilities)
    if smallest > 0:
        assert value.item() == pytest.approx(_by_hand(kind, *probabilities), rel=1e-3, abs=2e-5)
    assert (
        divergence(kind, softened(student, temperature), softened(student, temperature)).abs().item() < 1e-6
    )


@given(logits, logits)
def test_multi_label_loss_is_soft_bce_less_its_least_value(s: list[float], t: list[float]) -> None:
    student, teacher = torch.tensor([s]) / 4, torch.tensor([t]) / 4
    target = torch.sigmoid(teacher)
    soft = F.binary_cross_entropy_with_logits(student, target)
    least = F.binary_cross_entropy_with_logits(teacher, target)
    value = binary_divergence("fkl", student, teacher, 1.0).item()
    assert value == pytest.approx((soft - least).item(), abs=2e-5)


def test_masked_classes_carry_no_loss() -> None:
    student, teacher = torch.randn(3, 6), torch.randn(3, 6)
    cut = divergence("fkl", softened(student[:, :4], 2.0), softened(teacher[:, :4], 2.0))
    student[:, 4:] = teacher[:, 4:] = MASKED
    for kind in DIVERGENCES:
        assert divergence(kind, softened(student, 2.0), softened(teacher, 2.0)).isfinite().all()
    torch.testing.assert_close(divergence("fkl", softened(student, 2.0), softened(teacher, 2.0)), cut)


def test_hidden_losses() -> None:
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(
        hidden_mse(a, b), torch.stack([F.mse_loss(x, y) for x, y in zip(a, b, strict=True)])
    )
    assert hidden_mse(a, a).sum() == 0
    assert hidden_cosine(a, 3 * a).abs().max() < 1e-6
    torch.testing.assert_close(hidden_cosine(a, -a), torch.full((4,), 2.0))


@pytest.mark.parametrize("causal", [False, True])
def test_relation_loss_by_hand_and_without_padding(causal: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(1, 4, 6), torch.randn(1, 4, 8)
    mask = torch.ones(1, 4, dtype=torch.bool)
    value = relation_kl(student, teacher, mask, 2, causal)
    for row in range(4):
        seen = row + 1 if causal else 4
        by_hand = 0.0
        for head in range(2):
            distributions = []
            for x in (student, teacher):
                part = x[0].chunk(2, -1)[head]
                scores = part[row] @ part[:seen].T / part.shape[-1] ** 0.5
                distributions.append(scores.softmax(-1).tolist())
            by_hand += _kl(distributions[1], distributions[0]) / 2
        assert value[0, row].item() == pytest.approx(by_hand, abs=1e-5)
    padded = [F.pad(x, (0, 0, 0, 3), value=5.0) for x in (student, teacher)]
    longer = relation_kl(*padded, F.pad(mask, (0, 3)), 2, causal)
    torch.testing.assert_close(longer[:, :4], value)
    assert longer[:, 4:].sum() == 0


# ---- the fused head


def _naive(z: Tensor, labels: Tensor, zt: Tensor, o: Objective) -> Tensor:
    kd = divergence(o.kind, softened(z, o.temperature), softened(zt, o.temperature)).sum()
    ce = F.cross_entropy(z.float(), labels, reduction="sum")
    return (1 - o.alpha) * ce + o.alpha * o.temperature**2 * kd


def _dense(zt: Tensor, temperature: float) -> Callable[[int, int], Tensor]:
    return lambda start, stop: softened(zt[start:stop], temperature)


objectives = st.builds(
    Objective,
    st.sampled_from(DIVERGENCES),
    st.sampled_from([0.7, 1.0, 3.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=60)
@given(
    objectives,
    st.integers(0, 9),
    st.integers(1, 10),
    st.booleans(),
    st.sampled_from([1.0, 0.25]),
    st.sampled_from([None, 3.0]),
    st.integers(0, 1000),
)
def test_fused_head_equals_autograd(
    o: Objective, rows: int, chunk: int, bias: bool, scale: float, softcap: float | None, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=g, requires_grad=True)
    weight = torch.randn(11, 6, generator=g, requires_grad=True)
    b = torch.randn(11, generator=g, requires_grad=True) if bias else None
    zt, labels = torch.randn(rows, 11, generator=g), torch.randint(11, (rows,), generator=g)
    leaves = [x for x in (hidden, weight, b) if x is not None]
    head = Head(weight, b, scale, softcap)

    products = F.linear(hidden, weight, b) * scale
    z = products if softcap is None else softcap * torch.tanh(products / softcap)
    expected = _naive(z, labels, zt, o)
    gradients = torch.autograd.grad(expected, leaves)
    sums = head_loss(hidden, head, labels, _dense(zt, o.temperature), o, chunk=chunk)
    torch.testing.assert_close(sums.total, expected, rtol=1e-4, atol=1e-4)
    for mine, reference in zip(torch.autograd.grad(3 * sums.total, leaves), gradients, strict=True):
        torch.testing.assert_close(mine, 3 * reference, rtol=1e-3, atol=1e-4)

    dense = z.detach().requires_grad_()
    other = logits_loss(dense, labels, _dense(zt, o.temperature), o, chunk=chunk)
    torch.testing.assert_close(other.total, expected, rtol=1e-4, atol=1e-4)
    (mine,) = torch.autograd.grad(other.total, dense)
    (reference,) = torch.autograd.grad(_naive(dense, labels, zt, o), dense)
    torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_identical_models_have_no_loss_and_no_gradient(kind: Divergence) -> None:
    hidden, weight = torch.randn(7, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)
    zt = F.linear(hidden, weight).detach()
    for temperature in (1.0, 2.0):
        sums = head_loss(
            hidden, Head(weight), torch.zeros(7, dtype=torch.long), _dense(zt, temperature),
            Objective(kind, temperature), chunk=3,
        )  # fmt: skip
        assert sums.total.abs().item() < 1e-5
        assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(sums.total, [hidden, weight]))


def test_padding_the_vocabulary_changes_nothing() -> None:
    """The student's extra rows are excluded as if at −inf, not as logits of 0."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(5, 6), torch.randn(20, 6)
    zt, labels = torch.randn(5, 20) - 8, torch.randint(20, (5,))
    o = Objective(alpha=0.5)
    plain = head_loss(hidden, Head(weight), labels, _dense(zt, 1.0), o)
    wider = torch.cat([weight, torch.randn(12, 6)]).requires_grad_()
    padded = head_loss(hidden, Head(wider), labels, _dense(zt, 1.0), o, vocabulary=20)
    torch.testing.assert_close(padded.total, plain.total)
    (gradient,) = torch.autograd.grad(padded.total, wider)
    assert gradient[20:].abs().sum() == 0
    assert gradient[:20].abs().sum() > 0


def test_temperature_changes_the_loss() -> None:
    hidden, weight, zt = torch.randn(5, 6), torch.randn(20, 6), torch.randn(5, 20)
    labels = torch.zeros(5, dtype=torch.long)
    values = {
        head_loss(hidden, Head(weight), labels, _dense(zt, t), Objective("fkl", t)).total.item()
        for t in (1.0, 2.0, 4.0)
    }
    assert len(values) == 3


def test_bf16_head_keeps_fp32_sums() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).bfloat16(), torch.randn(200, 16).bfloat16()
    zt = F.linear(hidden, weight).float() + 0.3 * torch.randn(64, 200)
    labels = torch.randint(200, (64,))
    sums = head_loss(hidden, Head(weight), labels, _dense(zt, 1.0), Objective())
    expected = _naive(F.linear(hidden, weight).float(), labels, zt, Objective())
    assert sums.total.dtype == torch.float32
    torch.testing.assert_close(sums.total, expected, rtol=1e-4, atol=1e-4)


# ---- sparse targets


def test_top_k_with_tail_has_no_bias_and_bounds_the_kl() -> None:
    torch.manual_seed(0)
    log_t = softened(torch.randn(6, 100), 1.0)
    z = torch.randn(6, 100, requires_grad=True)
    values = []
    for k in (1, 8, 64, 100):
        values.append(sparse_forward_kl(softened(z, 1.0), top_k(log_t, k)).sum())
    exact = divergence("fkl", softened(z, 1.0), log_t).sum()
    assert values == sorted(values)
    torch.testing.assert_close(values[-1], exact, rtol=1e-4, atol=1e-4)

    same = log_t.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sparse_forward_kl(softened(same, 1.0), top_k(log_t, 8)).sum(), same)
    assert gradient.abs().max() < 1e-6


def test_random_samples_are_unbiased_and_zero_for_equal_models() -> None:
    g = torch.Generator().manual_seed(0)
    log_t = softened(torch.randn(1, 30, generator=g), 1.0)
    log_s = softened(torch.randn(1, 30, generator=g), 1.0)
    targets = random_samples(log_t.expand(4000, 30), 12, g)
    assert targets.weights is not None
    torch.testing.assert_close(targets.weights.sum(-1), torch.ones(4000))
    estimates = sparse_forward_kl(log_s.expand(4000, 30), targets)
    exact = divergence("fkl", log_s, log_t).item()
    assert abs(estimates.mean().item() - exact) < 4 * estimates.std().item() / 4000**0.5
    assert sparse_forward_kl(log_t.expand(4000, 30), targets).abs().max() < 1e-6


def test_sparse_targets_go_through_the_fused_head() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
    targets = top_k(softened(torch.randn(7, 40), 2.0), 40)
    labels = torch.randint(40, (7,))
    o = Objective("fkl", 2.0, 0.6)

    def part(start: int, stop: int) -> SparseTargets:
        return targets[start:stop]

    sums = head_loss(hidden, Head(weight), labels, part, o, chunk=3)
    dense = torch.zeros(7, 40).scatter_(1, targets.ids, targets.log_probs)
    exact = head_loss(hidden, Head(weight), labels, lambda a, b: dense[a:b], o, chunk=4)
    torch.testing.assert_close(sums.total, exact.total, rtol=1e-4, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(sums.total, [hidden, weight]),
        torch.autograd.grad(exact.total, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


_MEMORY = """
import resource, sys, torch
from compressor.distillation.fused import Head, Objective, head_loss
from compressor.distillation.losses import softened
torch.set_num_threads(1)
V, H, N = 151936, 256, 512
h, ht = torch.randn(N, H, requires_grad=True), torch.randn(N, H)
w, wt = (torch.randn(V, H) * .05).requires_grad_(), torch.randn(V, H) * .05
labels = torch.zeros(N, dtype=torch.long)
warm = torch.randn(64, 64) @ torch.randn(64, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
teacher = Head(wt)
loss = head_loss(h, Head(w), labels, lambda a, b: softened(teacher.logits(ht[a:b]), 2.0), Objective("fkl", 2.0))
loss.total.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_big_vocabulary_takes_little_memory() -> None:
    """Naively this holds 6 to 8 buffers of 311 MB; here the weight's gradient alone is 156 MB."""
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300e6
