"""What stands in for an accelerator computes what the accelerator would."""

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from everstep.titan import cpu
from everstep.titan.cpu_attention import DenseVarlenAttention, flex_attention

ROWS, LENGTH, HEADS, KEYS, WIDTH = 2, 24, 4, 2, 8


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, heads, LENGTH, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, KEYS, KEYS)
    ]


def reference(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def positions():
    """Two rows: one of documents of 10 and 14 tokens, one of a single document."""
    return torch.stack([torch.cat([torch.arange(10), torch.arange(14)]), torch.arange(LENGTH)])


def document_mask(window=LENGTH):
    place = torch.arange(LENGTH)
    document = (positions() == 0).cumsum(1)
    distance = place[:, None] - place[None, :]
    same = document[:, :, None] == document[:, None, :]
    return (same & (distance >= 0) & (distance <= window)).unsqueeze(1)


def close(mine, theirs, tensors):
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    weight = torch.linspace(-1, 1, mine.numel()).view_as(mine)
    ours, given = (torch.autograd.grad((out * weight).sum(), tensors) for out in (mine, theirs))
    for one, other in zip(ours, given, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_flex_attention_follows_its_mask_and_has_a_backward():
    q, k, v = inputs()
    documents = (positions() == 0).cumsum(1)

    def mask_mod(row, head, query, key):
        return (query >= key) & (documents[row, query] == documents[row, key])

    mask = create_block_mask(mask_mod, ROWS, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    out, aux = flex_attention(
        q, k, v, score_mod=None, block_mask=mask, scale=None, enable_gqa=True, return_aux=AuxRequest(lse=True),
        kernel_options={},
    )  # fmt: skip
    close(out, reference(q, k, v, document_mask()), (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) / WIDTH**0.5
    torch.testing.assert_close(aux.lse, scores.masked_fill(~document_mask(), -torch.inf).logsumexp(-1))


@pytest.mark.parametrize(("window", "back"), [((-1, 0), LENGTH), ((3, 0), 3)])
def test_varlen_attention_keeps_documents_and_its_window_apart(window, back):
    q, k, v = inputs()
    attention = DenseVarlenAttention.Config(window_size=window).build()
    metadata = create_varlen_metadata_for_document(positions())
    out = attention(*(part.transpose(1, 2) for part in (q, k, v)), attention_masks=metadata)
    close(out.transpose(1, 2), reference(q, k, v, document_mask(back)), (q, k, v))


def exchange(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sent = [[1, 2], [3, 0]]
    inputs = [torch.full((count, 2), 10.0 * rank + to) for to, count in enumerate(sent[rank])]
    outputs = [torch.zeros(sent[source][rank], 2) for source in range(2)]
    cpu.all_to_all(outputs, inputs)
    results.put((rank, [part[:, 0].tolist() for part in outputs]))


def test_gloo_exchanges_parts_of_uneven_sizes(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=exchange, args=(rank, port, results), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert dict(results.get(timeout=400) for _ in ranks) == {0: [[0.0], [10.0] * 3], 1: [[1.0] * 2, []]}
