"""The ranks' part of test_eplb_ranks.py: moving experts, against the oracle and `pack`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import moekit
from moekit import ExpertWeights, ModularKernel, MoEProblem, PackedWeights, ParallelConfig, Routing
from moekit.backends.reference import oracle
from moekit.eplb import MigrationReport, Placement, Rebalancer, migrate
from moekit.errors import MoekitError
from moekit.testing import assert_close
from moekit.testing.calls import bits, same_bits
from moekit.testing.cases import quantized, tp_shard, unquantized_weights, use_seed, whole
from moekit.testing.memory import measure

# The kit tests the backends' schemes; these tests check that the bytes arrive.
STAGING = 4096


@dataclass(frozen=True)
class Layer:
    """A layer on all ranks of the group, of which ``tp`` share each expert."""

    experts: str = "torch"
    quant: str = "none"
    dtype: str = "bfloat16"
    num_experts: int = 6
    replicas: int = 2
    top_k: int = 2
    hidden_size: int = 128
    intermediate_size: int = 128
    bias: bool = False
    tp: int = 1
    dp: int = 0
    device: str = "cpu"
    seed: int = 0

    def problem(self, rank: int, world_size: int) -> MoEProblem:
        return MoEProblem(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            dtype=getattr(torch, self.dtype),
            quant=self.quant,
            has_bias=self.bias,
            num_redundant_experts=self.replicas,
            device=self.device,
            parallel=ParallelConfig(
                ep_size=world_size // self.tp,
                ep_rank=rank // self.tp,
                tp_size=self.tp,
                tp_rank=rank % self.tp,
                dp_size=self.dp or world_size,
            ),
        )


class OnRank:
    """One rank's kernel and weights before anything moved."""

    def __init__(self, rank: int, world_size: int, layer: Layer) -> None:
        self.rank, self.world_size, self.layer = rank, world_size, layer
        use_seed(layer.seed)
        self.problem = layer.problem(rank, world_size)
        self.logical = whole(self.problem).replace(num_redundant_experts=0)
        self.full = unquantized_weights(self.logical)
        self.kernel: ModularKernel = moekit.compose(self.problem, "naive", layer.experts)
        self.now = Placement.default(self.problem)
        self.packed = self.packed_at(self.now)

    def packed_at(self, placement: Placement) -> PackedWeights:
        """Return what `pack` makes of this rank's experts in a placement."""
        held = self.full.select(placement.on_rank(self.problem.parallel.ep_rank))
        return self.kernel.pack(
            tp_shard(held, self.problem)
            if self.layer.tp > 1
            else scaled(quantized(held, self.problem))
        )

    def random_placement(self, draw: torch.Generator) -> Placement:
        """Return a random valid placement, the same on all ranks."""
        held = torch.tensor(self.now.physical_to_logical)
        while True:
            order = torch.randperm(len(held), generator=draw)
            try:
                return replace(self.now, physical_to_logical=tuple(held[order].tolist()))
            except MoekitError:
                pass

    def tokens(self, count: int, key: int) -> tuple[torch.Tensor, Routing]:
        """Return x (T, H) and logical routing, half of it to the last expert; some ids are -1."""
        p, draw = self.problem, torch.Generator().manual_seed(1000 * key + self.source)
        x = torch.randn(count, p.hidden_size, generator=draw).to(p.dtype)
        score = torch.rand(count, p.num_experts, generator=draw)
        score[: count // 2, -1] = 2.0
        ids = score.argsort(dim=1, descending=True)[:, : p.top_k]
        ids[torch.rand(ids.shape, generator=draw) < 0.1] = -1
        weights = 0.3 + torch.rand(ids.shape, generator=draw)
        return x.to(self.layer.device), Routing(
            weights.to(self.layer.device), ids.to(self.layer.device)
        )

    def call(self, x: torch.Tensor, physical: Routing) -> torch.Tensor:
        """Return the kernel's output, summed over ranks that hold the same tokens."""
        out = self.kernel(x, self.packed, physical)
        if not self.problem.parallel.moves_tokens:
            dist.all_reduce(out)
        return out

    def physical(self, routing: Routing) -> Routing:
        table = self.now.logical_to_physical(self.layer.device)
        return moekit.to_physical(routing, table, self.source)

    @property
    def source(self) -> int:
        """Return the number of this rank's token batch."""
        return self.rank * self.problem.parallel.dp_size // self.world_size

    def check(self, x: torch.Tensor, logical: Routing, out: torch.Tensor, what: str) -> None:
        weights = scaled(quantized(self.full, self.logical))
        assert_close(out, oracle(x, weights, logical, self.logical), self.problem, what)


def scaled(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights with the same static activation scales on all ranks, if any."""
    if weights.w13_input_scale is None:
        return weights
    a1, a2 = torch.tensor(0.02), torch.tensor(0.05)
    device = weights.w13.device
    return replace(weights, w13_input_scale=a1.to(device), w2_input_scale=a2.to(device))


def addresses(packed: PackedWeights) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in (*packed.experts.items(), *packed.shared.items())}


def migrations(rank: int, world_size: int, layer: Layer, rounds: int = 3) -> list[MigrationReport]:
    """Migrate to random placements, and check packed bits, addresses and outputs."""
    r = OnRank(rank, world_size, layer)
    draw = torch.Generator().manual_seed(7)
    where, reports = addresses(r.packed), []
    for index in range(rounds):
        x, logical = r.tokens(7 + r.source, index)
        r.check(x, logical, r.call(x, r.physical(logical)), f"call {index}")
        new = r.random_placement(draw)
        report = migrate(r.packed, r.now, new, dist.group.WORLD, staging_bytes=STAGING)
        was, becomes = (torch.tensor(p.physical_to_logical) for p in (r.now, new))
        assert report.received + report.copied == int((was != becomes).sum())
        per_expert = sum(t[0].nbytes for t in r.packed.experts.values())
        assert report.bytes_moved == report.received * per_expert
        r.now, wanted = new, r.packed_at(new)
        assert wanted.experts.keys() == r.packed.experts.keys()
        for name, tensor in r.packed.experts.items():
            assert same_bits(tensor, wanted[name]), f"{name} is not what pack makes of its experts"
        assert addresses(r.packed) == where, "a tensor was replaced"
        r.check(x, logical, r.call(x, r.physical(logical)), f"after move {index}")
        reports.append(report)
    r.kernel.destroy()
    return reports


def equal_bits(rank: int, world_size: int, layer: Layer, within: bool) -> int:
    """Check that a migration keeps the outputs' bits; return how many experts moved.

    within: Experts move on their rank only. Otherwise top_k must be 1, because the sum over ranks
    depends on their order.
    """
    r = OnRank(rank, world_size, layer)
    x, logical = r.tokens(9 + rank, 0)
    before = r.call(x, r.physical(logical)).clone()
    held = r.now.physical_to_logical
    new = tuple(
        e
        for owner in range(r.now.ep_size)
        for e in (reversed(r.now.on_rank(owner)) if within else ())
    )
    new = replace(r.now, physical_to_logical=new or tuple(reversed(held)))
    report = migrate(r.packed, r.now, new, dist.group.WORLD)
    assert (report.received == 0) is within
    physical = moekit.to_physical(logical, new.logical_to_physical(layer.device), rank)
    after = r.call(x, physical)
    assert same_bits(before, after), "outputs differ in bits"
    r.kernel.destroy()
    return report.received + report.copied


def rebalances(rank: int, world_size: int, layer: Layer, **options: object) -> list[object]:
    """Rebalance one of two layers with skewed routing: right outputs and a better load."""
    r = OnRank(rank, world_size, layer)
    other = r.packed_at(r.now)
    untouched = {name: bits(t).clone() for name, t in other.experts.items()}
    balancer = Rebalancer(r.kernel, [other, r.packed], window=4, **options)  # type: ignore[arg-type]
    batches = [r.tokens(30, key) for key in range(3)]
    for x, logical in batches:
        r.check(x, logical, r.call(x, balancer.route(logical, 1)), "before")
        balancer.step()
    wanted = torch.zeros(2, layer.num_experts, dtype=torch.int64)
    count = layer.dp or world_size
    for batch in range(count):
        r.rank = -(-batch * world_size // count)  # the first that has it
        for key in range(3):
            ids = r.tokens(30, key)[1].topk_ids
            wanted[1] += torch.bincount(ids[ids >= 0].cpu(), minlength=layer.num_experts)
    r.rank = rank
    assert torch.equal(balancer.loads(), wanted)
    table, was = balancer.replicas, balancer.replicas.data_ptr()
    reports = balancer.rebalance()
    assert reports[0].migration is None and reports[0].before == reports[0].after == 1.0
    assert reports[1].migration is not None
    assert balancer.placements[0] == r.now != balancer.placements[1]
    assert all(torch.equal(bits(other[name]), before) for name, before in untouched.items())
    assert table is balancer.replicas and table.data_ptr() == was, "graphs would read the old one"
    placed = r.packed_at(balancer.placements[1])
    assert all(same_bits(r.packed[name], t) for name, t in placed.experts.items())
    for x, logical in batches:
        r.check(x, logical, r.call(x, balancer.route(logical, 1)), "after")
    assert [report.migration for report in balancer.rebalance()] == [None, None], "not settled"
    r.kernel.destroy()
    return [reports[1].before, reports[1].after, str(reports[1])]


def fused_layers(rank: int, world_size: int, strategy: str) -> list[object]:
    """Check two rebalanced FusedMoE layers before, after, and when loaded again."""
    use_seed(0)
    draw = torch.Generator().manual_seed(3)
    full = [
        ExpertWeights(
            torch.randn(8, 64, 32, generator=draw) / 6, torch.randn(8, 32, 32, generator=draw) / 6
        )
        for _ in range(2)
    ]
    layers = [
        moekit.FusedMoE(
            8,
            2,
            32,
            32,
            params_dtype=torch.float32,
            dp_size=world_size,
            enable_expert_parallel=True,
            num_redundant_experts=0 if strategy == "round_robin" else 4,
            expert_placement_strategy=strategy,
            dispatcher="naive",
            experts="torch",
            device="cpu",
        )
        for _ in range(2)
    ]
    for layer, weights in zip(layers, full, strict=True):
        layer.load_weights(weights.select(layer.local_experts))
    balancer = Rebalancer.of(layers, window=2)
    mine = torch.Generator().manual_seed(rank)
    x = torch.randn(40, 32, generator=mine)
    logits = torch.randn(40, 8, generator=mine)
    logits[:, layers[0].placement.on_rank(0)[:2]] += 2.0  # whatever the strategy
    problem = whole(layers[0].problem).replace(num_redundant_experts=0)

    def check(what: str) -> None:
        for layer, weights in zip(layers, full, strict=True):
            reference = oracle(x, weights, moekit.route(logits, 2, renormalize=True), problem)
            assert_close(layer(x, logits), reference, problem, f"{what}, rank {rank}")

    check("before")
    balancer.step()
    assert balancer.loads().sum(dim=1).tolist() == [80 * world_size] * 2
    reports = balancer.rebalance()
    assert all(report.migration is not None for report in reports)
    check("after")
    assert [layer.placement for layer in layers] == balancer.placements
    for layer, weights in zip(layers, full, strict=True):
        layer.load_weights(weights.select(layer.local_experts))
    check("loaded anew")
    now = layers[0].placement
    alone = [e for e in now.on_rank(0) if len(now.replicas[e]) == 1]
    logits = torch.randn(40, 8, generator=mine)
    logits[:, alone[:2]] += 2.0
    for _ in range(2):  # the window forgets
        check("other tokens")
        balancer.step()
    assert any(report.migration is not None for report in balancer.rebalance())
    check("after the second migration")
    weights, layers[0].packed = layers[0].packed, None
    try:
        balancer.rebalance()
    except MoekitError as error:
        assert "layer 0 has no weights" in str(error)
    else:
        raise AssertionError("a layer without weights was balanced")
    layers[0].packed = weights
    check("in the end")
    for layer in layers:
        layer.kernel.destroy()
    return [reports[0].before, reports[0].after]


def staging(rank: int, world_size: int, limit: int) -> tuple[int, int]:
    """Return the peak bytes of a migration with that limit, and the packed bytes."""
    r = OnRank(rank, world_size, Layer(hidden_size=512, intermediate_size=256))
    new = r.random_placement(torch.Generator().manual_seed(1))
    group = dist.group.WORLD
    peak, _ = measure(
        torch.device("cpu"), lambda: migrate(r.packed, r.now, new, group, staging_bytes=limit)
    )
    r.kernel.destroy()
    return peak, r.packed.nbytes


class NoRoom(torch.Tensor):
    """A tensor that fails when another one is allocated like it."""

    def __new__(cls, tensor: torch.Tensor) -> NoRoom:
        return torch.Tensor._make_subclass(cls, tensor)

    def new_empty(self, *size: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 8.00 KiB")


def faults(rank: int, world_size: int, fault: str) -> tuple[str, str]:
    """Return (type, message) of a migration's error; check that the weights are unchanged."""
    r = OnRank(rank, world_size, Layer(quant="fp8_tensor_static", experts="torch"))
    culprit = rank == world_size - 1
    group = dist.group.WORLD
    draws = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    new, another = (r.random_placement(draw) for draw in draws)
    assert new != another
    packed, old, wanted, limit = r.packed, r.now, new, 8192
    before = {name: bits(t).clone() for name, t in packed.experts.items()}
    if fault == "new differs":
        wanted = another if culprit else new
    elif fault == "old differs":
        old = another if culprit else old
    elif fault == "shared differs" and culprit:
        packed = replace(packed, shared={**packed.shared, "a1_scale": torch.full((1, 1), 0.5)})
    elif fault == "tensor missing" and culprit:
        packed = replace(packed, experts={k: t for k, t in packed.experts.items() if k != "w2"})
    elif fault == "experts missing" and culprit:
        packed = replace(packed, experts={k: t[1:] for k, t in packed.experts.items()})
    elif fault == "other sizes" and culprit:
        wanted = Placement(tuple(range(old.num_experts)), old.num_experts, old.ep_size)
    elif fault == "expanded" and culprit:
        tensor = packed["w2"]
        packed = replace(packed, experts={**packed.experts, "w2": tensor[:1].expand_as(tensor)})
    elif fault == "staging differs":
        limit = 4096 if culprit else limit
    elif fault == "out of memory" and culprit:
        packed = replace(packed, experts={k: NoRoom(t) for k, t in packed.experts.items()})
    elif fault == "group":
        old = wanted = replace(old, ep_size=world_size + 1)
    try:
        migrate(packed, old, wanted, group, staging_bytes=limit)
    except (MoekitError, torch.OutOfMemoryError) as error:
        caught = (type(error).__name__, str(error))
    else:
        caught = ("", "")
    assert all(torch.equal(bits(r.packed[name]), was) for name, was in before.items())
    migrate(r.packed, r.now, new, group)
    assert same_bits(r.packed["w13"], r.packed_at(new)["w13"])
    r.kernel.destroy()
    return caught


class Fails:
    """A policy that behaves differently on the last rank."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, load_E: torch.Tensor, current: Placement) -> object:
        held = list(current.physical_to_logical)
        last = dist.get_rank() == dist.get_world_size() - 1
        if self.how == "nonsense everywhere" or (self.how == "nonsense on one" and last):
            return held[:-1]
        if self.how == "raises on one" and last:
            raise KeyError("no such model")
        if self.how == "disagrees":
            return held[::-1] if last else held
        return held


def failing_policy(rank: int, world_size: int, how: str) -> tuple[str, str]:
    """Return the error of `rebalance`; check that nothing moved and that the next one works."""
    r = OnRank(rank, world_size, Layer(dtype="float32"))
    # Any valid placement is accepted, so ranks that differ would move experts if allowed.
    balancer = Rebalancer(r.kernel, [r.packed], policy=Fails(how), min_gain=-float("inf"))  # type: ignore[arg-type]
    x, logical = r.tokens(20, 0)
    balancer.route(logical)
    balancer.step()
    before = {name: bits(t).clone() for name, t in r.packed.experts.items()}
    try:
        balancer.rebalance()
    except Exception as error:
        caught = (type(error).__name__, str(error))
    else:
        caught = ("", "")
    assert balancer.placements == [r.now]
    assert all(torch.equal(bits(r.packed[name]), was) for name, was in before.items())
    balancer.policy, balancer.min_gain = moekit.eplb.Balanced(), 0.0
    assert balancer.rebalance()[0].migration is not None
    r.check(x, logical, r.call(x, balancer.route(logical)), "after the good policy")
    r.kernel.destroy()
    return caught


def interrupted(rank: int, world_size: int) -> tuple[str, str]:
    """Return the error of a migration whose transfer fails."""
    r = OnRank(rank, world_size, Layer())
    new = r.random_placement(torch.Generator().manual_seed(1))
    true_all_to_all = dist.all_to_all_single

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("connection reset")

    dist.all_to_all_single = broken
    try:
        migrate(r.packed, r.now, new, dist.group.WORLD)
    except MoekitError as error:
        return type(error).__name__, str(error)
    finally:
        dist.all_to_all_single = true_all_to_all
        r.kernel.destroy()
    return "", ""
