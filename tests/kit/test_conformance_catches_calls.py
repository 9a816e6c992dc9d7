"""Wrong experts that are right in a single call by itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from conformance_catches import killed_by, wrong
from right_experts import Batched, Plain

from moekit.contract import BufferSpec


@killed_by("test_repeated_calls", says="relative error|exact zeros|NaN", apply=Plain)
def ResultCachedByAddress(self, y, tokens, weights, workspace):
    """Returns an earlier result for tokens at the same address."""
    kept = self.__dict__.setdefault("kept", {})
    key = (tokens.x.data_ptr(), tokens.x.shape)
    if key not in kept:
        Plain.apply(self, y, tokens, weights, workspace)
        kept[key] = y.clone()
    y.copy_(kept[key])


@killed_by("test_repeated_calls", says="relative error|exact zeros|NaN")
def RoutingCachedByAddress(self, tokens):
    """Sorts ids once for each address and shape."""
    kept = self.__dict__.setdefault("kept", {})
    key = (tokens.topk_ids.data_ptr(), tokens.topk_ids.shape)
    ids = kept.setdefault(key, tokens.topk_ids.clone())
    return replace(tokens, topk_ids=ids)


@killed_by("test_two_calls_in_flight", says="relative error")
def RoutingCachedBySum(self, tokens):
    """Sorts ids once for each shape and sum."""
    kept = self.__dict__.setdefault("kept", {})
    key = (tokens.topk_ids.shape, int(tokens.topk_ids.sum()))
    ids = kept.setdefault(key, tokens.topk_ids.clone())
    return replace(tokens, topk_ids=ids)


@killed_by("test_routing", "masked", says="relative error")
def EqualTokensMerged(self, y, tokens, weights):
    """Computes a token that is equal to the one before only once."""
    for row in range(1, len(y)):
        if tokens.topk_ids.shape[1] > 1 and torch.equal(tokens.x[row], tokens.x[row - 1]):
            y[row] = y[row - 1]


@killed_by("test_fewer_columns", says="relative error|exact zeros|NaN|index|size", apply=Plain)
def RowsByTopK(self, y, tokens, weights, workspace):
    """Divides an assignment's number by top_k for its row, whatever columns ids have."""
    ids, router_weights = (t.reshape(-1, 1) for t in (tokens.topk_ids, tokens.topk_weights))
    row_A = torch.arange(len(ids)) // self.problem.top_k
    y_AH = y.new_zeros(len(ids), y.shape[1], dtype=torch.float32)
    each = replace(tokens, x=tokens.x[row_A], topk_ids=ids, topk_weights=router_weights)
    Plain.apply(self, y_AH, each, weights, [torch.empty_like(y_AH)])
    y.copy_(y_AH.new_zeros(y.shape).index_add_(0, row_A, y_AH))


@killed_by("test_fewer_columns", says="relative error|exact zeros", apply=Plain)
def IdsInABufferOfTopK(self, y, tokens, weights, workspace):
    """Copies ids to a buffer with top_k columns, which repeats a single one."""
    shape = len(y), self.problem.top_k
    ids, router_weights = tokens.topk_ids.new_empty(shape), tokens.topk_weights.new_empty(shape)
    copied = replace(
        tokens,
        topk_ids=ids.copy_(tokens.topk_ids),
        topk_weights=router_weights.copy_(tokens.topk_weights),
    )
    Plain.apply(self, y, copied, weights, workspace)


@killed_by("test_many_calls", says="call 17 of one shape")
class Stale20(Plain):
    """Returns the previous output at every 20th call of a shape."""

    EVERY = 20

    def apply(self, y, tokens, weights, workspace):
        counts, kept = self.__dict__.setdefault("counts", ({}, {}))
        counts[y.shape] = counts.get(y.shape, 0) + 1
        if counts[y.shape] % self.EVERY:
            super().apply(y, tokens, weights, workspace)
            kept[y.shape] = y.clone()
        else:
            y.copy_(kept[y.shape])


wrong("Stale60", "Returns the previous output at every 60th call of a shape",
      killed_by("test_many_calls", says="call 57 of one shape"), of=Stale20, EVERY=60)  # fmt: skip


@killed_by("test_nothing_is_kept", says="bytes are left")
def KeepsInputs(self, y, tokens, weights):
    """Keeps the tokens of every call."""
    self.__dict__.setdefault("kept", []).append(tokens)


@killed_by("test_nothing_is_kept", says="bytes are left")
def KeepsWeights(self, weights):
    """Keeps all weights that it has packed."""
    self.__dict__.setdefault("kept", []).append(weights)
    return weights


@killed_by("test_nothing_is_kept", says="bytes are left")
def KeepsOutputs(self, y, tokens, weights):
    """Keeps a copy of every result."""
    self.__dict__.setdefault("kept", []).append(y.clone())


@killed_by("test_layers_in_turn")
class SharedByClass(Plain):
    """Uses the first kernel's activation in all kernels of the same sizes."""

    COMPILED = {}

    def apply(self, y, tokens, weights, workspace):
        asked = self.problem
        key = (asked.num_experts, asked.hidden_size, asked.local_intermediate_size, len(y))
        self.problem = asked.replace(activation=self.COMPILED.setdefault(key, asked.activation))
        super().apply(y, tokens, weights, workspace)
        self.problem = asked


@killed_by("test_dtype", "float32", says="default dtype")
def DefaultDtypeChanged(self, y, tokens, weights):
    """Changes the process's default dtype."""
    torch.set_default_dtype(torch.float64)


@killed_by("test_dtype", "float32", says="random numbers")
def Reseeded(self, tokens):
    """Seeds the process's random numbers."""
    torch.manual_seed(0)
    return tokens


wrong("StopsAtTheFirstMaskedId", "Drops a token's assignments behind its first id of -1",
      lambda self, ids, tokens: (ids >= 0).cumprod(dim=1).bool(),
      killed_by("test_routing", "masked"))  # fmt: skip


@killed_by("test_dtype", "float32")
def IdsAscend(self, tokens):
    """Sorts a token's ids, but not its weights."""
    ids = tokens.topk_ids.sort(dim=1).values
    return replace(tokens, topk_ids=ids)


@killed_by("test_repeated_calls", says="relative error|NaN|exact zeros", counts=Batched)
def CountsOfTheFirstCall(self, tokens):
    """Reads the experts' counts on the host in the first call only."""
    return self.__dict__.setdefault("kept", Batched.counts(self, tokens))


@killed_by("test_rows_per_expert", says="relative error|NaN|exact zeros", counts=Batched)
def First64Rows(self, tokens):
    """Computes an expert's first 64 rows, if its capacity is at least 128."""
    counts = Batched.counts(self, tokens)
    return [min(n, 64) for n in counts] if tokens.x.shape[1] >= 128 else counts


# -- memory around a call's tensors ---------------------------------------------------------------


def from_its_storage(tensor):
    """Return the tensor as it would be if it began where its storage does."""
    return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0) if tensor.dim() else tensor


def in_whole_tiles(rows):
    """Write zeros behind ``rows`` (N, columns) until N is a multiple of 16, if there is memory."""
    N, columns = rows.shape
    room = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
    whole = min(-(-N // 16) * 16, room // columns)
    torch.as_strided(rows, (whole, columns), (columns, 1), rows.storage_offset())[N:] = 0


@killed_by("test_cases", "none", says="relative error|exact zeros|shape|size")
def IdsOf64Bits(self, tokens):
    """Reads the memory of ids as int64."""
    ids = tokens.topk_ids.view(torch.int64)
    return replace(tokens, topk_ids=ids)


@killed_by("test_cases", "none", says="NaN|relative error")
def LoadsOf64Bytes(self, tokens):
    """Reads x from the multiple of 64 bytes below its first one."""
    x, over = tokens.x, tokens.x.data_ptr() % 64 // tokens.x.itemsize
    if 0 < over <= x.storage_offset():
        x = torch.as_strided(x, x.shape, x.stride(), x.storage_offset() - over)
    return replace(tokens, x=x)


@killed_by("test_cases", "none")
def OffsetOfWeightsIgnored(self, weights):
    """Reads weights from where their storage begins."""
    return replace(weights, **{n: from_its_storage(t) for n, t in weights.tensors().items()})


wrong("OffsetOfTokensIgnored", "Reads tokens from where their storage begins",
      lambda self, tokens: replace(tokens, x=from_its_storage(tokens.x)),
      killed_by("test_repeated_calls", says="NaN|relative error"))  # fmt: skip


@killed_by("test_repeated_calls", says="exact zeros|relative error")
def OffsetOfIdsIgnored(self, tokens):
    """Reads ids from where their storage begins."""
    ids = from_its_storage(tokens.topk_ids)
    return replace(tokens, topk_ids=ids)


@killed_by("test_fewer_columns", says="relative error|exact zeros|NaN", apply=Plain)
def StridesOfIdsIgnored(self, y, tokens, weights, workspace):
    """Reads ids and router weights as if they were contiguous."""

    def misread(t):
        strides = torch.empty(t.shape).stride()
        return torch.as_strided(t, t.shape, strides, t.storage_offset())

    ids, router = misread(tokens.topk_ids), misread(tokens.topk_weights)
    tokens = replace(tokens, topk_ids=ids, topk_weights=router)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_spare_capacity", says="relative error|NaN|exact zeros", apply=Plain)
def RowsForAssignments(self, y, tokens, weights, workspace):
    """Takes the number of rows for the number of assignments."""
    if tokens.num_rows is not None:
        ids = tokens.topk_ids.clone()
        ids.view(-1)[int(tokens.num_rows) :] = -1
        tokens = replace(tokens, topk_ids=ids)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_spare_capacity", says="NaN", apply=Plain)
def ReadsBehindTheRows(self, y, tokens, weights, workspace):
    """Scales x by its largest value, which it looks for in all rows that there is room for."""
    largest = tokens.x.abs().amax() if tokens.num_rows is not None else 1.0
    Plain.apply(self, y, replace(tokens, x=tokens.x / largest * largest), weights, workspace)


@killed_by("test_spare_capacity", says="relative error|NaN|exact zeros", apply=Batched)
def OffsetOfBatchesIgnored(self, y, tokens, weights, workspace):
    """Reads the batched layout from where its storage begins."""
    Batched.apply(self, y, replace(tokens, x=from_its_storage(tokens.x)), weights, workspace)


@killed_by("test_dtype", "float32", says="behind its output")
def WritesWholeTiles(self, y, tokens, weights):
    """Writes the output's last tile of 16 rows whole."""
    in_whole_tiles(y)


@killed_by("test_dtype", "float32", says="behind the end of workspace buffer 0", apply=Plain)
def ScratchTooSmall(self, y, tokens, weights, workspace):
    """Writes the last tile of its workspace whole, and asks for fewer rows."""
    Plain.apply(self, y, tokens, weights, workspace)
    in_whole_tiles(workspace[0])


@killed_by("test_memory_is_stated", "local", says="stated are", transient_bytes=Plain)
def MemoryOfDequantizedWeights(self, rows):
    """Does not state what it dequantizes."""
    return Plain.transient_bytes(self, rows) if self.problem.quant.weight is None else 4096


@killed_by("test_memory_is_stated", "local", says="stated are")
class MemoryOfBalancedExperts(Plain):
    """States the room that experts need if all have as many rows, and gives all as many."""

    COLUMNS = 16384

    def _room(self, rows):
        return torch.empty(self.problem.num_local_experts * rows, self.COLUMNS)

    def transient_bytes(self, rows):
        stated = rows * self.problem.top_k * self.COLUMNS * 4
        return super().transient_bytes(rows) + stated * 3 // 2  # random tokens need less

    def apply(self, y, tokens, weights, workspace):
        ids = tokens.topk_ids[tokens.topk_ids >= 0]
        room = self._room(int(ids.bincount().max()) if len(ids) else 0)
        super().apply(y, tokens, weights, workspace)
        del room


# -- what the process or thread has set -----------------------------------------------------------


@killed_by("test_scheme", "none", says="meta", apply=Plain)
def ScratchOfTheDefaultDevice(self, y, tokens, weights, workspace):
    """Sums in a tensor on torch's default device."""
    total = torch.empty(workspace[0].shape, dtype=torch.float32)
    Plain.apply(self, y, tokens, weights, (total,))


@killed_by("test_repeated_calls", says="inference")
class ScratchOfInferenceMode(Plain):
    """Keeps scratch of a call in inference mode, which other calls cannot write."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        self._own = threading.local()

    def apply(self, y, tokens, weights, workspace):
        kept = self._own.__dict__.get("kept", y[:0])
        if len(kept) < len(y):
            shape = 2 * len(y), self.problem.hidden_size
            kept = self._own.kept = torch.empty(shape, dtype=torch.float32)
        super().apply(y, tokens, weights, (kept,))


@killed_by("test_repeated_calls", says="NaN|relative error")
class ThreadsOfTheFirstCall(Plain):
    """Shares rows out among as many threads as its first call had."""

    threads = 0

    def apply(self, y, tokens, weights, workspace):
        self.threads = self.threads or torch.get_num_threads()
        super().apply(y, tokens, weights, workspace)
        y[-(-len(y) // self.threads) * torch.get_num_threads() :] = 0


@killed_by("test_pack", "none", says="random numbers")
def PackReseeds(self, weights):
    """Seeds the process's random numbers when it packs weights."""
    torch.manual_seed(0)
    return weights


@killed_by("test_dtype", "float32", says="number of threads")
class MadeForOneThread(Plain):
    """Sets the process's number of threads when it is made."""

    def __init__(self, spec, problem):
        super().__init__(spec, problem)
        torch.set_num_threads(torch.get_num_threads() + 1)


# -- what it declares -----------------------------------------------------------------------------


@killed_by("test_input_form", "fp8_block", says="x_scale in float32")
def ScaleInFloat64(self, x, scale):
    """Quantizes with a scale that its own kernels convert, and other dispatchers cannot send."""
    return x, scale.double()


@killed_by("test_input_form", "fp8_block", says="x_scale is")
class ScaleTransposed(Plain):
    """Quantizes with a scale (groups, R), which its own kernels read."""

    def quantize(self, x_RH, weights, valid_rows):
        x, scale = super().quantize(x_RH, weights, valid_rows)
        return x, scale.T

    def apply(self, y, tokens, weights, workspace):
        if tokens.x_scale is not None:
            tokens = replace(tokens, x_scale=tokens.x_scale.T)
        super().apply(y, tokens, weights, workspace)


def undescribed(problem):
    raise KeyError(problem.device.type)


@killed_by(
    "test_unsupported_answers_for_any_device",
    says="its description failed: KeyError",
    describe=undescribed,
)
class CannotBeDescribed(Plain):
    """Raises when `explain` asks how it will run a problem."""


# -- what the other calls leave out ---------------------------------------------------------------


@killed_by("test_fewer_columns", says="relative error|exact zeros|NaN|index|size", apply=RowsByTopK)
def RowsByTopKOrOne(self, y, tokens, weights, workspace):
    """Divides an assignment's number by top_k for its row, unless ids have one column."""
    if tokens.topk_ids.shape[1] > 1:
        return RowsByTopK.apply(self, y, tokens, weights, workspace)
    Plain.apply(self, y, tokens, weights, workspace)


@killed_by("test_routing", "masked", says="relative error|NaN")
def IdsNotFilled(self, tokens):
    """Takes new memory for ids to say that no expert is there."""
    used = tokens.topk_ids >= 0
    ids = torch.empty_like(tokens.topk_ids, memory_format=torch.contiguous_format)
    ids[used] = tokens.topk_ids[used]
    router_weights = tokens.topk_weights.masked_fill(~used, 1.0)
    return replace(tokens, topk_ids=ids, topk_weights=router_weights)


@killed_by("test_routing", "masked", says="relative error|NaN")
class ArenaOfIdsNotFilled(Plain):
    """Takes its workspace for ids to say that no expert is there."""

    def workspace(self, rows):
        ids = BufferSpec((rows, self.problem.top_k), torch.int32)
        return (ids, *super().workspace(rows))

    def apply(self, y, tokens, weights, workspace):
        ids, used = workspace[0][: len(y), : tokens.topk_ids.shape[1]], tokens.topk_ids >= 0
        ids[used] = tokens.topk_ids[used].int()
        super().apply(y, replace(tokens, topk_ids=ids.long()), weights, workspace[1:])


@killed_by("test_deterministic", says="different bits")
class AtomicsForOneToken(Plain):
    """Adds up parts of K by atomic additions, in calls of at most four tokens."""

    calls, LEAST, MOST = 0, 1, 4

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self.LEAST <= len(y) <= self.MOST:
            self.calls += 1
            y[0, 0] *= 1 + 2**-7 * (self.calls % 2)


@killed_by("test_deterministic", says="different bits")
class AtomicsForManyTokens(AtomicsForOneToken):
    """Adds up assignments by atomic additions, in calls of more than 64 tokens."""

    LEAST, MOST = 65, 1 << 20


@killed_by("test_two_calls_in_flight", says="modified the dispatcher's x")
def QuantizesToOneBuffer(self, x, scale):
    """Quantizes to memory that it keeps, and that the next call quantizes to."""
    shape = max(64, len(x)), *x.shape[1:]
    kept = self.__dict__.setdefault("kept", torch.empty(shape, dtype=x.dtype))
    return kept[: len(x)].copy_(x), scale


@killed_by("test_many_calls", says="call 0 of one shape")
class TunedToAWrongKernel(Plain):
    """Chooses a wrong kernel when it is tuned."""

    tuned = False

    def tuning(self):
        self.tuned = True
        return super().tuning()

    def apply(self, y, tokens, weights, workspace):
        super().apply(y, tokens, weights, workspace)
        if self.tuned:
            y.mul_(1.05)


@killed_by("test_nothing_is_kept", says="bytes are left", apply=Plain)
def BufferForEachSize(self, y, tokens, weights, workspace):
    """Keeps a buffer for each number of tokens that it has seen."""
    kept = self.__dict__.setdefault("kept", {})
    if len(y) not in kept:
        kept[len(y)] = torch.empty(workspace[0].shape, dtype=torch.float32)
    Plain.apply(self, y, tokens, weights, (kept[len(y)],))


@killed_by("test_layers_in_turn", says="has packed nothing")
class StateOfPacking(Plain):
    """Keeps what it finds out about weights when it packs them, which another kernel lacks."""

    packed = False

    def pack(self, weights):
        self.packed = True
        return super().pack(weights)

    def apply(self, y, tokens, weights, workspace):
        assert self.packed, "has packed nothing"
        super().apply(y, tokens, weights, workspace)


@killed_by("test_dtype", "float32", says="deterministic algorithms")
def AsksForDeterminism(self, tokens):
    """Makes torch use deterministic algorithms in the whole process."""
    torch.use_deterministic_algorithms(True)
    return tokens


@killed_by("test_constructor_keeps_spec_and_problem", says="division", transient_bytes=Plain)
def MemoryOfNoRows(self, rows):
    """Divides by the number of rows when it states its memory."""
    return Plain.transient_bytes(self, rows) // rows * rows
