"""The policy-gradient arithmetic once more, slowly: Python floats, loops, one token at a time.

It is written from the formulas and shares nothing with minirl but the names of the settings.
Gradients come from a number that remembers what it was computed from.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Grid = list[list[float]]
EPS = 1e-8
LARGEST = math.log(sys.float_info.max) / 3
"""The largest exponent in float64: what is beyond counts as overflow."""


class Num:
    """A float with a gradient: parents and local derivatives, played backwards."""

    def __init__(self, value: float, parents: Sequence[tuple["Num", float]] = ()):
        self.value, self.parents, self.grad = float(value), tuple(parents), 0.0

    def __add__(self, other):
        other = num(other)
        return Num(self.value + other.value, [(self, 1.0), (other, 1.0)])

    def __mul__(self, other):
        other = num(other)
        return Num(self.value * other.value, [(self, other.value), (other, self.value)])

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + -num(other)

    def __truediv__(self, other: float):
        return self * (1.0 / other)

    __radd__, __rmul__ = __add__, __mul__

    def backward(self) -> None:
        order: list[Num] = []
        seen: set[int] = set()

        def visit(node: "Num") -> None:
            if id(node) not in seen:
                seen.add(id(node))
                for parent, _ in node.parents:
                    visit(parent)
                order.append(node)

        visit(self)
        self.grad = 1.0
        for node in reversed(order):
            for parent, slope in node.parents:
                parent.grad += node.grad * slope


def num(x: "Num | float") -> Num:
    return x if isinstance(x, Num) else Num(x)


def stop(x: Num) -> Num:
    return Num(x.value)


def exp(x: Num) -> Num:
    y = math.exp(x.value)
    return Num(y, [(x, y)])


def clamp(x: Num, low: float, high: float) -> Num:
    """The gradient passes on the closed interval."""
    return Num(min(max(x.value, low), high), [(x, float(low <= x.value <= high))])


def larger(x: Num, y: Num) -> Num:
    """A tie shares the gradient."""
    a = 0.5 if x.value == y.value else float(x.value > y.value)
    return Num(max(x.value, y.value), [(x, a), (y, 1.0 - a)])


def smaller(x: Num, y: Num) -> Num:
    return -larger(-x, -y)


def sigmoid(x: Num) -> Num:
    y = 1.0 / (1.0 + math.exp(-x.value))
    return Num(y, [(x, y * (1.0 - y))])


def kl(delta: Num, kind: str) -> Num:
    if kind == "k1":
        return -delta
    if kind == "k2":
        return delta * delta / 2.0
    return exp(delta) - 1.0 - delta


def policy_loss(
    case: Mapping[str, Any], cfg: Mapping[str, Any], num_tokens: float, num_sequences: float
) -> tuple[float, Grid, dict[str, float]]:
    """Loss, gradient and metrics of one micro-batch; `case` holds lists, `cfg` every setting."""
    c = [[Num(x) for x in row] for row in case["logprobs"]]
    kept = [
        [t for t, m in enumerate(row) if m and s]
        for row, s in zip(case["token_mask"], case["sample_mask"], strict=True)
    ]
    terms = Terms(case, cfg, c, kept)
    loss = num(0.0)
    kl_total = num(0.0)
    nll = num(0.0)

    def average(per_token: Callable[[int, int], Num]) -> Num:
        total = num(0.0)
        for i, positions in enumerate(kept):
            row = sum((per_token(i, t) for t in positions), num(0.0))
            if cfg["normalization"] == "dr_grpo":
                total += row / (num_sequences * cfg["normalization_length"] + EPS)
            elif cfg["token_level_loss"]:
                total += row / (num_tokens + EPS)
            else:
                total += row / (len(positions) + EPS) / (num_sequences + EPS)
        return total

    weighted = cfg["use_importance_sampling_correction"]
    loss += average(lambda i, t: terms.surrogate(i, t) * (terms.weight(i, t)[1] if weighted else 1))
    if cfg["reference_policy_kl_penalty"] > 0 and not cfg["use_kl_in_reward"]:
        kl_total = average(terms.kl)
        loss += kl_total * cfg["reference_policy_kl_penalty"]
    if cfg["positive_example_nll_weight"] > 0:
        for i, positions in enumerate(kept):
            if case["rewards"][i] > 0:
                nll += sum((-c[i][t] for t in positions), num(0.0)) / (num_tokens + EPS)
        loss += nll * cfg["positive_example_nll_weight"]
    loss.backward()
    grad = [[x.grad for x in row] for row in c]
    metrics = terms.metrics(num_tokens, num_sequences)
    metrics |= {
        "loss": loss.value,
        "kl_penalty": kl_total.value,
        "positive_nll_loss": nll.value,
    }
    return loss.value, grad, metrics


def overflow_tokens(case: Mapping[str, Any], cfg: Mapping[str, Any], largest: float) -> int:
    """How many trained tokens read an exponential of more than `largest`."""
    c = [[Num(x) for x in row] for row in case["logprobs"]]
    kept = [
        [t for t, m in enumerate(row) if m and s]
        for row, s in zip(case["token_mask"], case["sample_mask"], strict=True)
    ]
    terms = Terms(case, cfg, c, kept)
    return sum(terms.overflows(i, t, largest) for i, row in enumerate(kept) for t in row)


class Terms:
    """What each token contributes."""

    def __init__(self, case, cfg, c: list[list[Num]], kept: list[list[int]]):
        self.case, self.cfg, self.c, self.kept = case, cfg, c, kept
        self.p = [[x.value for x in row] for row in c]
        if not cfg["force_on_policy_ratio"]:
            self.p = case["prev_logprobs"]
        self.g, self.a = case["generation_logprobs"], case["advantages"]

    def mean_log_ratio(self, i: int, of: Callable[[Num, int], Num] = lambda x, t: x) -> Num:
        parts = [of(self.c[i][t] - self.p[i][t], t) for t in self.kept[i]]
        return sum(parts, num(0.0)) / (len(parts) + EPS)

    def ratio(self, i: int, t: int) -> tuple[Num, Num]:
        """Before and after clipping."""
        cfg, c = self.cfg, self.c[i][t]
        low, high = 1.0 - cfg["ratio_clip_min"], 1.0 + cfg["ratio_clip_max"]
        if cfg["policy_loss_type"] == "gmpo":
            bounds = (cfg["ratio_clip_min"], cfg["ratio_clip_max"])
            return exp(self.mean_log_ratio(i)), exp(
                self.mean_log_ratio(i, self.gmpo_clip(i, bounds))
            )
        if cfg["policy_loss_type"] in ("dppo_tv", "dppo_kl"):
            r = exp(c - self.p[i][t])
            return r, num(0.0) if any(self.clipped(i, t)) else r
        if cfg["policy_loss_type"] == "sapo":
            r = exp(c - self.p[i][t])
            return r, r
        if cfg["force_on_policy_ratio"]:
            r = exp(c - stop(c))
            return r, r
        if cfg["disable_ppo_ratio"]:
            return c, c
        if cfg["sequence_level_importance_ratios"]:
            r = exp(self.mean_log_ratio(i))
        else:
            r = exp(c - self.p[i][t])
        return r, clamp(r, low, high)

    def gmpo_clip(self, i: int, bounds: tuple[float, float]) -> Callable[[Num, int], Num]:
        def clip(d: Num, t: int) -> Num:
            return (
                clamp(d, -math.inf, bounds[1])
                if self.a[i][t] > 0
                else clamp(d, -bounds[0], math.inf)
            )

        return clip

    def distance(self, i: int, t: int) -> tuple[float, float]:
        """DPPO: the probabilities' difference, and the divergence."""
        p, q = math.exp(self.c[i][t].value), math.exp(self.g[i][t])
        if self.cfg["policy_loss_type"] == "dppo_tv":
            return p - q, abs(p - q)
        return p - q, q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    def clipped(self, i: int, t: int) -> tuple[bool, bool]:
        """At the lower bound, at the upper bound."""
        cfg, a = self.cfg, self.a[i][t]
        if cfg["policy_loss_type"] in ("dppo_tv", "dppo_kl"):
            difference, far = self.distance(i, t)
            far = far > cfg["divergence_threshold"]
            return far and difference < 0 and a < 0, far and difference > 0 and a > 0
        if cfg["policy_loss_type"] == "gmpo":
            d = self.c[i][t].value - self.p[i][t]
            return d < -cfg["ratio_clip_min"] and a < 0, d > cfg["ratio_clip_max"] and a > 0
        before, after = (x.value for x in self.ratio(i, t))
        if cfg["use_cispo"]:
            return before < after, before > after
        dual = cfg["ratio_clip_c"]
        capped = dual is not None and a < 0 and -a * dual < max(-a * before, -a * after)
        return before < after and a < 0, (before > after and a > 0) or capped

    def surrogate(self, i: int, t: int) -> Num:
        cfg, a, c = self.cfg, self.a[i][t], self.c[i][t]
        before, after = self.ratio(i, t)
        if cfg["policy_loss_type"] == "sapo":
            sign = "positive" if a > 0 else "negative"
            tau = cfg[f"sapo_temperature_{sign}"]
            return sigmoid((before - 1.0) * tau) * (-a * 4.0 / tau)
        if cfg["policy_loss_type"] != "clip":
            return after * -a
        if cfg["use_cispo"]:
            return stop(after) * c * -a
        loss = larger(before * -a, after * -a)
        if cfg["ratio_clip_c"] is not None and a < 0:
            loss = smaller(loss, num(-a * cfg["ratio_clip_c"]))
        return loss

    def geometric(self, i: int) -> float:
        gaps = [self.p[i][t] - self.g[i][t] for t in self.kept[i]]
        return math.exp(sum(gaps) / (len(gaps) + EPS))

    def level(self) -> str:
        sequence = self.cfg["sequence_level_importance_ratios"]
        return self.cfg["importance_sampling_level"] or ("sequence" if sequence else "token")

    def weight(self, i: int, t: int) -> tuple[float, float, bool]:
        """Raw, applied, and whether it was out of bounds."""
        if self.level() == "token":
            raw = math.exp(self.p[i][t] - self.g[i][t])
        elif self.level() == "sequence":
            raw = math.exp(sum(self.p[i][u] - self.g[i][u] for u in self.kept[i]))
        else:
            raw = self.geometric(i)
        kind = self.cfg["truncated_importance_sampling_type"]
        high = self.cfg["truncated_importance_sampling_ratio"]
        low = self.cfg["truncated_importance_sampling_ratio_min"] or 0.0
        if kind is None:
            return raw, raw, False
        if kind == "tis":
            return raw, min(max(raw, low), high), raw < low or raw > high
        judged = self.geometric(i) if kind == "seq-mask-tis" else raw
        outside = judged < low or judged > high
        return raw, 0.0 if outside else raw, outside

    def kl(self, i: int, t: int) -> Num:
        cfg, c = self.cfg, self.c[i][t]
        delta = -(c - self.case["reference_logprobs"][i][t])
        over = num(self.g[i][t]) if cfg["use_on_policy_kl_approximation"] else stop(c)
        weight = exp(c - over)
        bound = cfg["kl_input_clamp_value"]
        if bound is not None:
            if not -bound <= delta.value <= bound:
                weight = stop(weight)
            delta = clamp(delta, -bound, bound)
        out = weight * kl(delta, cfg["reference_policy_kl_type"])
        bound = cfg["kl_output_clamp_value"]
        return out if bound is None else clamp(out, -bound, bound)

    def overflows(self, i: int, t: int, largest: float = LARGEST) -> bool:
        """Whether any exponential that this token's loss or metrics read is out of range."""
        c, p, g, cfg = self.c[i][t].value, self.p[i][t], self.g[i][t], self.cfg
        logs = [abs(p - g), c - g]
        ratios = [*(r.value for r in self.ratio(i, t)), self.weight(i, t)[0]]
        logs += [math.log(x) for x in ratios if x > 0]
        if cfg["reference_policy_kl_penalty"] > 0 and not cfg["use_kl_in_reward"]:
            bound = cfg["kl_input_clamp_value"]
            delta = self.case["reference_logprobs"][i][t] - c
            if cfg["reference_policy_kl_type"] == "k3":
                logs.append(delta if bound is None else min(delta, bound))
        return max(logs) > largest

    def metrics(self, num_tokens: float, num_sequences: float) -> dict[str, float]:
        where = [(i, t) for i, row in enumerate(self.kept) for t in row]
        samples = [i for i, s in enumerate(self.case["sample_mask"]) if s]
        p, g, kind = self.p, self.g, self.cfg["reference_policy_kl_type"]

        def over_tokens(of: Callable[[int, int], float]) -> float:
            return sum(of(i, t) for i, t in where) / (num_tokens + EPS)

        def over_samples(of: Callable[[int], float]) -> float:
            return sum(of(i) for i in samples) / (num_sequences + EPS)

        def estimate(x: float, kind: str) -> float:
            return kl(num(x), kind).value

        def js(i: int, t: int) -> float:
            m = math.log(0.5 * math.exp(p[i][t]) + 0.5 * math.exp(g[i][t]))
            return 0.5 * estimate(p[i][t] - m, "k3") + 0.5 * estimate(g[i][t] - m, "k3")

        def error(i: int) -> float:
            row = [math.exp(abs(g[i][t] - p[i][t])) for t in self.kept[i]]
            return sum(row) / (len(row) + EPS)

        ratios = [tuple(x.value for x in self.ratio(i, t)) for i, t in where]
        first = (lambda i: self.weight(i, 0)) if self.level() != "token" else None
        mean = over_tokens if first is None else over_samples
        weigh = self.weight if first is None else first
        raw, applied = mean(lambda *at: weigh(*at)[0]), mean(lambda *at: weigh(*at)[1])
        out = {
            "probs_ratio": over_tokens(lambda i, t: self.ratio(i, t)[0].value),
            "probs_ratio_clamped": over_tokens(lambda i, t: self.ratio(i, t)[1].value),
            "probs_ratio_min": min((r for r, _ in ratios), default=math.inf),
            "probs_ratio_max": max((r for r, _ in ratios), default=-math.inf),
            "probs_ratio_clamped_min": min((r for _, r in ratios), default=math.inf),
            "probs_ratio_clamped_max": max((r for _, r in ratios), default=-math.inf),
            "clipped_low": over_tokens(lambda i, t: float(self.clipped(i, t)[0])),
            "clipped_high": over_tokens(lambda i, t: float(self.clipped(i, t)[1])),
            "token_mult_prob_error": over_tokens(lambda i, t: math.exp(abs(g[i][t] - p[i][t]))),
            "seq_mult_prob_error_max": max(error(i) for i in range(len(self.kept))),
            "gen_kl_error": over_tokens(lambda i, t: estimate(p[i][t] - g[i][t], kind)),
            "policy_kl_error": over_tokens(lambda i, t: estimate(g[i][t] - p[i][t], kind)),
            "js_divergence_error": over_tokens(js),
            "importance_ratio_raw": raw,
            "importance_ratio_applied": applied,
            "sampling_importance_ratio": applied,
            "approx_entropy": -over_tokens(
                lambda i, t: math.exp(self.c[i][t].value - g[i][t]) * self.c[i][t].value
            ),
            "num_valid_samples": float(len(samples)),
            "overflow_tokens": float(sum(self.overflows(i, t) for i, t in where)),
        }
        if self.cfg["truncated_importance_sampling_type"] == "seq-mask-tis":
            out["is_oob_ratio"] = over_samples(lambda i: float(self.weight(i, 0)[2]))
        elif self.cfg["truncated_importance_sampling_type"] is not None:
            out["is_oob_ratio"] = over_tokens(lambda i, t: float(self.weight(i, t)[2]))
        if "entropy" in self.case:
            out["entropy"] = over_tokens(lambda i, t: self.case["entropy"][i][t])
        return out
