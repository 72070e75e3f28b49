"""(seed, offset, token, refinement word): places where the Philox word is 0, found by search over 2**32 words and
more."""

ZERO_WORDS = [
    (1, 12659391, 44, 3943456879),
    (1, 10612004, 575, 3590695575),
    (1, 8666404, 860, 2186410210),
]
