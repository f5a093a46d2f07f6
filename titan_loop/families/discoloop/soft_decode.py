"""Decode a state to a distribution over tokens, and encode that as a mean of embeddings.

    z_v = w_v · h / τ      p = softmax(z)      Φ(h) = Σ_v p_v e_v

Forward and backward run chunk by chunk, so logits exist for one chunk of tokens at a time. With
`top_k` sum and softmax run over the k tokens of the largest logits alone, with ties going to the
smaller id. With the gradient g of Φ and s_v = g · e_v, the other gradients are

    de_v = p_v g     dz_v = p_v (s_v − Σ_u p_u s_u)     dh = Σ_v dz_v w_v / τ     dw_v = dz_v h / τ

For them the forward pass saves the normaliser of p, and with `top_k` instead the kept tokens and
their p; the backward pass adds one sum over tokens. Ranks that share the
vocabulary exchange the maxima and sums of a chunk, and with `top_k` the k largest logits of each
rank, but no others. Every rank returns the part of Φ that its own rows contribute.

Shape suffixes as in `titan_loop/models/readout.py`; K is the number of tokens kept.

Source: DiscoLoop, arXiv 2607.00341, §4 Eq. 5 and Appendix B; the streaming is ours.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.embedding import Embedding

from titan_loop.models.readout import LMHead
from titan_loop.models.vocabulary import Vocabulary


@dataclass(frozen=True)
class Decoding:
    """Settings with which Φ turns logits into a distribution.

    Attributes:
        temperature: τ > 0.
        top_k: Number of tokens kept; None keeps all of them.
    """

    temperature: float = 1.0
    top_k: int | None = None

    def training_flops(self, dim: int, vocab_size: int) -> tuple[int, int]:
        """Return FLOPs per token, forward and backward, without recomputation.

        The forward pass computes all logits, then a sum of V or K embeddings. The backward pass
        costs twice as much, except that logits that were not kept cost it nothing.
        """
        every, kept = 2 * dim * vocab_size, 2 * dim * (self.top_k or vocab_size)
        return every + kept, 4 * kept


def soft_decode(head: LMHead, hidden_BLD: Tensor, encoder: Embedding, decoding: Decoding) -> Tensor:
    """Return Φ(h), (B, L, D), in the dtype of the tables; a partial sum under tensor parallelism.

    Args:
        head: Holds the rows w_v. It is called, so that its weight is gathered.
        encoder: Holds the rows e_v; it may share the head's weight. It must be gathered together
            with the head.
    """
    (decoded_BLD,) = head((hidden_BLD,), through=partial(_through, encoder, decoding))
    return decoded_BLD


def _through(
    encoder: Embedding,
    decoding: Decoding,
    decoder_VD: Tensor,
    hidden_1BLD: tuple[Tensor, ...],
    head: LMHead,
) -> tuple[Tensor, ...]:
    (hidden_BLD,) = hidden_1BLD
    encoder_VD = None
    if encoder.weight is not head.weight:
        encoder_VD, _ = head.vocabulary.local(encoder.weight, ())
    function = _AllTokens if decoding.top_k is None else _KeptTokens
    decoded_TD = function.apply(
        hidden_BLD.reshape(-1, hidden_BLD.shape[-1]),
        decoder_VD,
        encoder_VD,
        (head.vocabulary, head.chunk_tokens, decoding),
    )
    decoded_BLD = decoded_TD.view(hidden_BLD.shape)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(head.weight, DTensor):  # this rank's part of a sum over the vocabulary
        mesh = head.weight.device_mesh
        decoded_BLD = DTensor.from_local(decoded_BLD, mesh, [Partial()], run_check=False)
    return (decoded_BLD,)


def soft_encode(log_prob_BLV: Tensor, encoder_VD: Tensor, decoding: Decoding) -> Tensor:
    """Return Φ, (B, L, D), of log-probabilities at temperature 1, without gradients."""
    log_prob_CV = log_prob_BLV.flatten(0, -2) / decoding.temperature
    prob_CV = log_prob_CV.softmax(dim=-1)
    if decoding.top_k is not None:
        place_CK = _top_places(log_prob_CV, decoding.top_k)
        kept_CV = torch.zeros_like(prob_CV).scatter(-1, place_CK, prob_CV.gather(-1, place_CK))
        prob_CV = kept_CV / kept_CV.sum(dim=-1, keepdim=True)
    decoded_CD = torch.mm(prob_CV.to(encoder_VD.dtype), encoder_VD)
    return decoded_CD.unflatten(0, log_prob_BLV.shape[:-1])


class _AllTokens(torch.autograd.Function):
    """Φ of the whole softmax; saves the normaliser of p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        decoder_VD: Tensor,
        encoder_VD: Tensor | None,
        how: tuple[Vocabulary, int, Decoding],
    ) -> Tensor:
        vocabulary, chunk_tokens, decoding = ctx.how = how
        encode_VD = decoder_VD if encoder_VD is None else encoder_VD
        decoded_TD = encode_VD.new_empty(hidden_TD.shape)
        log_sum_T = hidden_TD.new_empty(len(hidden_TD), dtype=_wide(decoder_VD))
        for chunk in _chunks(len(hidden_TD), chunk_tokens):
            logit_CV = _logits(hidden_TD[chunk], decoder_VD, decoding)
            log_sum_T[chunk] = _softmax_(logit_CV, vocabulary)
            torch.mm(logit_CV.to(encode_VD.dtype), encode_VD, out=decoded_TD[chunk])
        ctx.save_for_backward(hidden_TD, decoder_VD, encoder_VD, log_sum_T)
        return decoded_TD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator is untyped
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, decoder_VD, encoder_VD, log_sum_T = ctx.saved_tensors
        vocabulary, chunk_tokens, decoding = ctx.how
        gradients = _Gradients(hidden_TD, decoder_VD, encoder_VD)
        for chunk in _chunks(len(hidden_TD), chunk_tokens, 2):
            hidden_CD, grad_CD = hidden_TD[chunk], grad_outputs[0][chunk]
            prob_CV = _logits(hidden_CD, decoder_VD, decoding)
            prob_CV.sub_(log_sum_T[chunk].unsqueeze(-1)).exp_()
            score_CV = torch.mm(grad_CD.to(gradients.encode_VD.dtype), gradients.encode_VD.t())
            gradients.add_product(gradients.encoder_grad_VD, prob_CV, grad_CD)
            score_CV = prob_CV * score_CV
            (mean_C,) = vocabulary.all_reduce_sum(score_CV.sum(dim=-1))
            logit_grad_CV = score_CV.sub_(prob_CV.mul_(mean_C.unsqueeze(-1)))
            gradients.add_decoded(chunk, logit_grad_CV.div_(decoding.temperature), hidden_CD)
        return gradients.all()


class _KeptTokens(torch.autograd.Function):
    """Φ of the K most likely tokens; saves their ids and their p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        decoder_VD: Tensor,
        encoder_VD: Tensor | None,
        how: tuple[Vocabulary, int, Decoding],
    ) -> Tensor:
        vocabulary, chunk_tokens, decoding = ctx.how = how
        assert decoding.top_k is not None
        tokens, kept, wide = len(hidden_TD), decoding.top_k, _wide(decoder_VD)
        encode_VD = decoder_VD if encoder_VD is None else encoder_VD
        decoded_TD = encode_VD.new_empty(hidden_TD.shape)
        id_TK = torch.empty(tokens, kept, dtype=torch.int32, device=hidden_TD.device)
        prob_TK = hidden_TD.new_empty(tokens, kept, dtype=wide)
        for chunk in kept_chunks(kept, tokens, chunk_tokens, encode_VD.shape):
            logit_CV = _logits(hidden_TD[chunk], decoder_VD, decoding)
            id_CK, value_CK = _largest(logit_CV, kept, vocabulary)
            prob_CK = value_CK.softmax(dim=-1)
            id_TK[chunk], prob_TK[chunk] = id_CK.int(), prob_CK
            row_CK, prob_CK = _here(id_CK, prob_CK, encode_VD, vocabulary)
            weight_C1K = prob_CK.unsqueeze(1).to(encode_VD.dtype)
            decoded_TD[chunk] = torch.bmm(weight_C1K, encode_VD[row_CK]).squeeze(1)
        ctx.save_for_backward(hidden_TD, decoder_VD, encoder_VD, id_TK, prob_TK)
        return decoded_TD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator is untyped
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, decoder_VD, encoder_VD, id_TK, prob_TK = ctx.saved_tensors
        vocabulary, chunk_tokens, decoding = ctx.how
        gradients = _Gradients(hidden_TD, decoder_VD, encoder_VD)
        encode_VD = gradients.encode_VD
        gathered = 3 * id_TK.shape[1] * encode_VD.shape[1] / len(encode_VD)
        for chunk in _chunks(len(hidden_TD), chunk_tokens, 2 + gathered):
            hidden_CD, grad_CD = hidden_TD[chunk], grad_outputs[0][chunk]
            row_CK, prob_CK = _here(id_TK[chunk], prob_TK[chunk], encode_VD, vocabulary)
            grad_CD1 = grad_CD.to(encode_VD.dtype).unsqueeze(-1)
            score_CK = prob_CK * torch.bmm(encode_VD[row_CK], grad_CD1).squeeze(-1)
            (mean_C,) = vocabulary.all_reduce_sum(score_CK.sum(dim=-1))
            gradients.add_rows(gradients.encoder_grad_VD, row_CK, prob_CK, grad_CD)
            logit_grad_CK = (score_CK - prob_CK * mean_C.unsqueeze(-1)) / decoding.temperature
            gradients.add_kept_decoded(chunk, row_CK, logit_grad_CK, hidden_CD)
        return gradients.all()


class _Gradients:
    """Gradients of states, and of tables in at least fp32; a tied table has one for both uses."""

    def __init__(self, hidden_TD: Tensor, decoder_VD: Tensor, encoder_VD: Tensor | None) -> None:
        self.decode_VD, self.tied = decoder_VD, encoder_VD is None
        self.encode_VD = decoder_VD if encoder_VD is None else encoder_VD
        self.hidden_grad_TD = torch.empty_like(hidden_TD)
        self.decoder_grad_VD = torch.zeros_like(decoder_VD, dtype=_wide(decoder_VD))
        self.encoder_grad_VD = self.decoder_grad_VD
        if encoder_VD is not None:
            self.encoder_grad_VD = torch.zeros_like(encoder_VD, dtype=_wide(encoder_VD))

    def add_decoded(self, chunk: slice, logit_grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Take the gradient of all logits of a chunk."""
        self.add_product(self.decoder_grad_VD, logit_grad_CV, hidden_CD)
        narrow_CV = logit_grad_CV.to(self.decode_VD.dtype)
        self.hidden_grad_TD[chunk] = torch.mm(narrow_CV, self.decode_VD)

    def add_kept_decoded(
        self, chunk: slice, row_CK: Tensor, logit_grad_CK: Tensor, hidden_CD: Tensor
    ) -> None:
        """Take the gradient of the logits that were kept."""
        self.add_rows(self.decoder_grad_VD, row_CK, logit_grad_CK, hidden_CD)
        weight_C1K = logit_grad_CK.unsqueeze(1).to(self.decode_VD.dtype)
        hidden_grad_CD = torch.bmm(weight_C1K, self.decode_VD[row_CK]).squeeze(1)
        self.hidden_grad_TD[chunk] = hidden_grad_CD

    def all(self) -> tuple[Tensor | None, ...]:
        encoder_grad_VD = None if self.tied else self.encoder_grad_VD.to(self.encode_VD.dtype)
        decoder_grad_VD = self.decoder_grad_VD.to(self.decode_VD.dtype)
        return self.hidden_grad_TD, decoder_grad_VD, encoder_grad_VD, None

    def add_product(self, total_VD: Tensor, weight_CV: Tensor, value_CD: Tensor) -> None:
        """Add weight_v · value to every row v."""
        narrow_CV, value_CD = (part.to(self.decode_VD.dtype) for part in (weight_CV, value_CD))
        if total_VD.dtype == self.decode_VD.dtype:
            total_VD.addmm_(narrow_CV.t(), value_CD)
        else:
            total_VD += torch.mm(narrow_CV.t(), value_CD)

    @staticmethod
    def add_rows(total_VD: Tensor, row_CK: Tensor, weight_CK: Tensor, value_CD: Tensor) -> None:
        """Add weight_v · value to the rows that were kept."""
        product_CKD = weight_CK.unsqueeze(-1) * value_CD.unsqueeze(1).to(total_VD.dtype)
        total_VD.index_add_(0, row_CK.flatten(), product_CKD.flatten(0, 1))


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _chunks(tokens: int, chunk_tokens: int, parts: float = 1) -> list[slice]:
    """Return slices of T tokens, for work whose memory is `parts` times a slice's logits."""
    size = max(1, int(chunk_tokens / parts))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def kept_chunks(kept: int, tokens: int, chunk_tokens: int, shape: tuple[int, ...]) -> list[slice]:
    """Return slices of T tokens for choosing K tokens at each.

    A slice's logits, the buffers that order them and its K embeddings need no more memory than the
    logits of a chunk.

    Args:
        shape: Rows of the table on this rank, and D.
    """
    return _chunks(tokens, chunk_tokens, 3 + kept * shape[1] / shape[0])


def _logits(hidden_CD: Tensor, decoder_VD: Tensor, decoding: Decoding) -> Tensor:
    """Return z, at least fp32."""
    logit_CV = torch.mm(hidden_CD.to(decoder_VD.dtype), decoder_VD.t()).to(_wide(decoder_VD))
    return logit_CV.div_(decoding.temperature)


def _softmax_(logit_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Overwrite the logits with p; return log Σ_v exp z_v."""
    max_C1 = logit_CV.amax(dim=-1, keepdim=True)
    vocabulary.all_reduce_max(max_C1)
    (sum_exp_C,) = vocabulary.all_reduce_sum(logit_CV.sub_(max_C1).exp_().sum(dim=-1))
    logit_CV.div_(sum_exp_C.unsqueeze(-1))
    return sum_exp_C.log() + max_C1.squeeze(-1)


def _largest(logit_CV: Tensor, kept: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return ids and values of the K largest logits of all ranks, by id; ties go to small ids."""
    place_CK = _top_places(logit_CV, min(kept, logit_CV.shape[-1]))
    id_CK, value_CK = place_CK + vocabulary.start, logit_CV.gather(-1, place_CK)
    id_CN, value_CN = _gather_kept(id_CK, value_CK, kept, vocabulary)
    if id_CN.shape[-1] == kept:
        return id_CN, value_CN
    # Slices ascend by rank, and ids ascend in every part: the parts together are in the ids' order.
    place_CK = _top_places(value_CN, kept)
    return id_CN.gather(-1, place_CK), value_CN.gather(-1, place_CK)


def _gather_kept(
    id_CK: Tensor, value_CK: Tensor, kept: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return ids and values of all slices, one after the other; missing ones are -inf."""
    if vocabulary.group is None:
        return id_CK, value_CK
    ranks = dist.get_world_size(vocabulary.group)
    missing = min(kept, -(-vocabulary.rows // ranks)) - id_CK.shape[-1]
    value_CK = F.pad(value_CK, (0, missing), value=-torch.inf)
    id_CK = F.pad(id_CK, (0, missing)).to(value_CK.dtype)  # fp32 holds ids below 2^24 exactly
    pair_C2K = torch.stack((value_CK, id_CK), dim=1)
    parts_C2K = [torch.empty_like(pair_C2K) for _ in range(ranks)]
    dist.all_gather(parts_C2K, pair_C2K, group=vocabulary.group)
    value_CN, id_CN = torch.cat(parts_C2K, dim=-1).unbind(1)
    return id_CN.long(), value_CN


def _top_places(value_CN: Tensor, kept: int) -> Tensor:
    """Return the places of the K largest values, ascending; ties always go to the first places."""
    top = value_CN.topk(kept, dim=-1)  # its choice among equal values is undefined
    smallest_C1 = top.values[:, -1:]
    larger_C1 = (top.values > smallest_C1).sum(dim=-1, keepdim=True)
    seen_CN = (value_CN == smallest_C1).cumsum(dim=-1, dtype=torch.int32)
    slot_K = torch.arange(kept, device=value_CN.device)
    wanted_CK = (slot_K + 1 - larger_C1).clamp_min(1).int()
    first_CK = torch.searchsorted(seen_CN, wanted_CK)
    return torch.where(slot_K < larger_C1, top.indices, first_CK).sort(dim=-1).values


def _here(
    id_CK: Tensor, prob_CK: Tensor, encoder_VD: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return rows of this rank's table, and p, with 0 for tokens of other ranks."""
    row_CK = id_CK.long() - vocabulary.start
    here_CK = (row_CK >= 0) & (row_CK < len(encoder_VD))
    return torch.where(here_CK, row_CK, 0), torch.where(here_CK, prob_CK, 0.0)
