"""Writes which tokens the filters kept: a bit mask, and how many."""

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..jit import jit
from .draw import is_kept, load_record
from .logit_source import StoredLogits, load_tokens, source_of
from .order import mass_of, mass_scale
from .transforms import Rows, load_f32


@jit(
    structs={"stored": StoredLogits, "rows": Rows},
    do_not_specialize=["num_words"],
    do_not_specialize_on_alignment=["logits", "limits_ptr", "masses_ptr", "counts_ptr", "words_ptr"],
)
def kept_kernel(
    logits,  # processed ones, (B, V), any float dtype
    stored,
    rows,
    limits_ptr,  # (B,) int64: ``draw.write_record``
    masses_ptr,  # (B, 4) float32, likewise
    counts_ptr,  # (B,) int64, out
    words_ptr,  # (B, num_words) int64, out
    num_words: tl.int32,
    WORDS: tl.constexpr,  # at a time
    PDL: tl.constexpr,
):
    """Reads a row per program. Grid: (B,). A token of no probability is not kept. A row with one possible token, such
    as a greedy row, keeps that; an undefined one none."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    source = source_of(logits, stored, row)
    record = load_record(limits_ptr, masses_ptr, row)
    last = tl.where(record.kept_mass != record.kept_mass, 0, source.vocab_size)  # none of an undefined row
    scale = mass_scale(load_f32(rows.temperature_at, rows.temperature, row))
    counts = tl.zeros((WORDS,), tl.int32)
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)
        token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        live = token < last
        x = load_tokens(source, token, live)
        kept = is_kept(record, x, mass_of(x, record.top, scale), token, scale) & (x > float("-inf")) & live
        kept = tl.where(record.only_token >= 0, token == record.only_token, kept)
        bits = tl.sum(tl.where(kept, 1 << tl.arange(0, 32)[None, :], 0), axis=1)
        tl.store(words_ptr + row * num_words + word, bits.to(tl.int64), mask=word < num_words)
        counts += tl.sum(kept.to(tl.int32), axis=1)
    tl.store(counts_ptr + row, tl.sum(counts, axis=0).to(tl.int64))
