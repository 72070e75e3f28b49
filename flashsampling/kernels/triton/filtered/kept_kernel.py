"""Writes which tokens the filters kept: a bit mask, and how many."""

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..jit import jit
from .logit_source import StoredLogits, load_tokens, source_of
from .order import key_of, mass_of, mass_scale, reaches, sort_key
from .prefix import ABOVE_ALL
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
    limits_ptr,  # (B,) int64: ``write_record``
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
    record = masses_ptr + row * 4
    least, kept_mass, top = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    only_token = tl.load(record + 3).to(tl.int32, bitcast=True)
    limit = tl.where(kept_mass != kept_mass, ABOVE_ALL, tl.load(limits_ptr + row))
    scale = mass_scale(load_f32(rows.temperature_at, rows.temperature, row))
    counts = tl.zeros((WORDS,), tl.int32)
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)
        token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        live = token < source.vocab_size
        x = load_tokens(source, token, live)
        kept = live & (x > float("-inf")) & (sort_key(key_of(x), token) >= limit)
        kept = kept & reaches(x, mass_of(x, top, scale), least, top, scale)
        kept = tl.where(only_token >= 0, token == only_token, kept)
        bits = tl.sum(tl.where(kept, 1 << tl.arange(0, 32)[None, :], 0), axis=1)
        tl.store(words_ptr + row * num_words + word, bits.to(tl.int64), mask=word < num_words)
        counts += tl.sum(kept.to(tl.int32), axis=1)
    tl.store(counts_ptr + row, tl.sum(counts, axis=0).to(tl.int64))
