"""Choose experts from router logits, in fp32; ties always go to the lower expert id."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.contract import Routing
from moekit.errors import InvalidInput, InvalidProblem
from moekit.layer.routes import LayerLog
from moekit.runtime.checks import ID_DTYPES, check_ids, check_tensor
from moekit.untrusted.arguments import shown

_SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}

# Elementwise operations of fewer elements run in one loop on the CPU, and every vector divides
# this many.
_GRAIN, _VECTORS = 32768, 64


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    custom: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
    hash_table: Tensor | None = None,
    token_ids: Tensor | None = None,
    is_padding: Tensor | None = None,
    checked: bool | None = None,
    batch_invariant: bool = False,
    log: LayerLog | None = None,
) -> Routing:
    """Choose ``top_k`` experts for each token.

    A logit of -infinity masks its expert. If fewer than K experts are left, masked ones are chosen
    with weight 0. A correction_bias masks by its own -infinity instead; it needs K unmasked
    experts, and cannot mask any with groups.

    Llama-4 uses ``scoring="sigmoid", top_k=1`` with ``apply_router_weight_on_input`` in the
    problem, gpt-oss ``renormalize=True``.

    Args:
        logits: (T, E), any float dtype.
        top_k: K, experts of each token.
        scoring: "softmax", "sigmoid" or "sqrtsoftplus" over the E experts.
        renormalize: Scale each token's weights to a sum of one. With softmax this equals a
            softmax over the K chosen logits.
        correction_bias: (E,), added to the scores for the choice only (DeepSeek-V3's
            e_score_correction_bias).
        num_expert_group: Number of groups of consecutive experts.
        topk_group: Number of best groups that a token's experts may come from. A group's score is
            its best expert's or, with a bias, the sum of its two best.
        routed_scaling_factor: Multiplies the weights at the end.
        custom: ``(logits_TE fp32, top_k) -> (weights_TK, ids_TK)`` in place of all options above.
        hash_table: (V, K) ids of the experts of each of the vocabulary's tokens, int32 or int64
            (DeepSeek-V4's hash routing). The scores of these experts weigh them; nothing else
            chooses.
        token_ids: (T,) int32 or int64, each token's row of ``hash_table``.
        is_padding: (T,) bool; marked tokens get ids -1 and weights 0.
        checked: Refuse NaN and +infinity, and ids of ``custom`` that name no expert or one twice.
            This synchronizes with the device. Default: on the CPU only.
        batch_invariant: Give a token the same bits at every T and position. ``custom`` must do so
            itself.
        log: This layer's part of a `moekit.RoutingLog`. ``custom`` must then use `torch.topk`.

    Returns:
        Weights (T, K) fp32 and ids (T, K) int64.

    Raises:
        InvalidInput: A tensor does not fit.
        InvalidProblem: An option does not fit.
    """
    check_tensor("logits", logits)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidInput(f"logits must be (T, E) of a float dtype (got {shown(logits)})")
    (T, E), device = logits.shape, logits.device
    if correction_bias is not None:
        _expect("correction_bias", correction_bias, (E,), *_FLOAT, device)
    if is_padding is not None:
        _expect("is_padding", is_padding, (T,), *_BOOL, device)
    if log is not None and log.num_experts != E:
        raise InvalidInput(f"log {log.name!r} is for {log.num_experts} experts, the logits for {E}")
    if checked is None:
        checked = device.type == "cpu"
    _check_options(E, top_k, scoring, num_expert_group, topk_group)
    hashed = None
    if hash_table is not None or token_ids is not None:
        if correction_bias is not None or num_expert_group is not None or custom is not None:
            raise InvalidProblem(
                "hash_table chooses the experts alone: leave correction_bias, groups and custom out"
            )
        hashed = _hashed(hash_table, token_ids, is_padding, logits, top_k, checked)
    scores_TE = logits.float()
    if checked:
        grouped = num_expert_group is not None
        _check_values(scores_TE, top_k, correction_bias, grouped, is_padding)
    if custom is not None:
        run = custom if log is None else partial(log.run, custom)
        weights, ids = _custom(run, scores_TE, top_k, checked)
    else:
        # A softmax keeps the order of logits, so a renormalized one needs the chosen logits only.
        late = scoring == "softmax" and renormalize and correction_bias is None
        late = late and num_expert_group is None
        if not late:
            score = _SCORING[scoring]
            by_rows = batch_invariant and scores_TE.device.type == "cpu"
            scores_TE = _by_rows(score, scores_TE) if by_rows else score(scores_TE)
        choice_TE = scores_TE if correction_bias is None else scores_TE + correction_bias.float()
        if num_expert_group is not None and topk_group is not None:
            choice_TE = _keep_best_groups(
                choice_TE, num_expert_group, topk_group, biased=correction_bias is not None
            )
        if hashed is not None:
            weights, ids = scores_TE.gather(1, hashed), hashed
        else:
            weights, ids = _top(choice_TE, top_k)
        ids = ids if log is None else log.choose(ids)
        if choice_TE is not scores_TE or log is not None:
            weights = scores_TE.gather(1, ids)
        if late:
            weights = weights.softmax(dim=1)
        elif renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
        if routed_scaling_factor != 1.0:
            weights = weights * float(routed_scaling_factor)
    if is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], -1)
        weights = weights.masked_fill(is_padding[:, None], 0.0)
    return Routing(weights.contiguous(), ids.contiguous())


def check_hash_table(table: Tensor, num_experts: int, top_k: int) -> None:
    """Raise InvalidInput unless each row names ``top_k`` different experts; reads the values."""
    _expect("hash_table", table, (None, top_k), *_IDS, table.device)
    if table.is_meta:
        return
    low, high = (int(v) for v in torch.aminmax(table))
    ordered = table.sort(dim=1).values
    if low < 0 or high >= num_experts or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InvalidInput(
            f"hash_table must name {top_k} different experts of 0..{num_experts - 1} in each row "
            f"(it spans {low} to {high}, or names one twice)"
        )


def _hashed(
    table: Tensor | None,
    token_ids: Tensor | None,
    is_padding: Tensor | None,
    logits: Tensor,
    top_k: int,
    checked: bool,
) -> Tensor:
    """Return the experts (T, K) int64 of the tokens."""
    if table is None or token_ids is None:
        raise InvalidInput(
            "hash_table and token_ids (vLLM's input_ids) go together: give both or none"
        )
    T, E = logits.shape
    _expect("hash_table", table, (None, top_k), *_IDS, logits.device)
    _expect("token_ids", token_ids, (T,), *_IDS, logits.device)
    if is_padding is not None:
        token_ids = token_ids.masked_fill(is_padding, 0)
    if checked and T and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < len(table):
        low, high = (int(v) for v in torch.aminmax(token_ids))
        raise InvalidInput(
            f"token_ids span {low} to {high}, but hash_table has rows 0 to {len(table) - 1}"
        )
    ids = table[token_ids.long()].long()
    if checked:
        check_ids(ids, E)
    return ids


def _by_rows(score: Callable[[Tensor], Tensor], logits_TE: Tensor) -> Tensor:
    """Return the scores of contiguous rows, each computed in the same way.

    torch computes the last elements of a loop, which fill no vector, by other functions, and
    threads divide large loops anywhere. So all loops here are small, and consist of whole vectors
    or of one row.
    """
    T, E = logits_TE.shape
    least = _VECTORS // math.gcd(_VECTORS, E)  # rows of whole vectors
    most = (_GRAIN - 1) // (least * E) * least
    if not most:
        return torch.cat([score(row[None]) for row in logits_TE]) if T else logits_TE
    parts: Sequence[Tensor] = torch.split(F.pad(logits_TE, (0, 0, 0, -T % least)), most)
    return torch.cat([score(rows) for rows in parts])[:T]


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores and their ids. torch.topk does not specify ties."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def _keep_best_groups(choice_TE: Tensor, groups: int, keep: int, biased: bool) -> Tensor:
    """Set every expert outside the ``keep`` best groups to -inf."""
    grouped = torch.unflatten(choice_TE, 1, (groups, -1))
    best = min(2, grouped.shape[-1]) if biased else 1
    group_scores = grouped.topk(best, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, _top(group_scores, keep)[1], True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


def _check_values(
    logits_TE: Tensor,
    top_k: int,
    correction_bias: Tensor | None,
    grouped: bool,
    is_padding: Tensor | None,
) -> None:
    """Raise InvalidInput for logits or a bias that choose no ``top_k`` experts."""
    if correction_bias is not None:
        if bool((correction_bias.isnan() | correction_bias.isposinf()).any()):
            raise InvalidInput(
                "correction_bias must be finite, or -infinity to mask an expert (it holds NaN or "
                "infinity, which would give every token to one expert): fill it with its values"
            )
        left = int((~correction_bias.isneginf()).sum())
        if left < (len(correction_bias) if grouped else top_k):
            raise InvalidInput(
                f"correction_bias masks all but {left} experts with -infinity: top_k={top_k} needs "
                "as many unmasked experts, and grouped top-k cannot have masked ones"
            )
        _refuse(
            logits_TE.isneginf().any(dim=1),
            is_padding,
            "-infinity although there is a correction_bias",
            "the bias could still choose that expert; set the bias to -infinity",
        )
    finite = torch.isfinite(logits_TE.amax(dim=1))
    what = "NaN or infinity, or only -infinity"
    _refuse(~finite, is_padding, what, "check the layer that computes them")


def _refuse(wrong_T: Tensor, is_padding: Tensor | None, what: str, todo: str) -> None:
    """Raise InvalidInput if a token that is no padding is ``wrong``."""
    rows = wrong_T if is_padding is None else wrong_T & ~is_padding
    if bool(rows.any()):
        raise InvalidInput(
            f"router logits of {int(rows.sum())} token(s) hold {what}, first token "
            f"{int(rows.nonzero()[0])}: {todo}"
        )


def _custom(
    custom: Callable[[Tensor, int], Any], logits_TE: Tensor, top_k: int, checked: bool
) -> tuple[Tensor, Tensor]:
    """Return the weights and ids from ``custom``; raise InvalidInput if they do not fit."""
    weights, ids = custom(logits_TE, top_k)
    wanted, device = (logits_TE.shape[0], top_k), logits_TE.device
    _expect("the first result of custom routing", weights, wanted, *_FLOAT, device)
    _expect("the second result of custom routing", ids, wanted, *_INTEGER, device)
    ids = ids.long()
    if checked:
        check_ids(ids, logits_TE.shape[1])
    return weights.float(), ids


# The dtypes of a tensor: their name in an error, and whether a tensor has one of them.
_FLOAT = "a float dtype", Tensor.is_floating_point
_BOOL = "bool", lambda t: t.dtype is torch.bool
_IDS = "int32 or int64", lambda t: t.dtype in ID_DTYPES
_INTEGER = (
    "an integer dtype",
    lambda t: not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool),
)


def _expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: str,
    accepts: Callable[[Tensor], bool],
    device: torch.device,
) -> None:
    """Raise InvalidInput for a tensor of another shape (None: any size but 0), dtype or device."""
    check_tensor(name, tensor)
    fits = tensor.dim() == len(shape) and all(
        n == m or (m is None and n) for n, m in zip(tensor.shape, shape, strict=True)
    )
    if not (fits and accepts(tensor) and tensor.device == device):
        wanted = str(shape).replace("None", "V")
        raise InvalidInput(f"{name} must be {wanted} of {dtypes} on {device} (got {shown(tensor)})")


def _check_options(E: int, top_k: int, scoring: str, groups: int | None, kept: int | None) -> None:
    """Raise InvalidProblem for options that do not fit each other or the number of experts."""
    if not 1 <= top_k <= E:
        raise InvalidProblem(f"top_k must be in 1..{E}, the number of experts (got {shown(top_k)})")
    if scoring not in _SCORING:
        raise InvalidProblem(f"scoring={shown(scoring)}: it must be one of {', '.join(_SCORING)}")
    if groups is None and kept is None:
        return
    if groups is None or kept is None:
        raise InvalidProblem("num_expert_group and topk_group go together: give both or none")
    if not 1 <= kept <= groups or E % groups:
        raise InvalidProblem(
            f"num_expert_group must divide the {E} experts, and topk_group must be in "
            f"1..num_expert_group (got num_expert_group={groups}, topk_group={kept})"
        )
    if top_k > kept * (E // groups):
        raise InvalidProblem(
            f"top_k={top_k} exceeds the {kept * (E // groups)} experts of {kept} groups: raise "
            "topk_group"
        )
