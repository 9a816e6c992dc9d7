"""Device code: flags and memory order, both ways to dispatch, and the combine.

Every rank has an equal buffer (`layout.Layout`); ``peers_ptr`` holds the addresses of all of
them, and arguments ``*_at`` are byte offsets in a buffer.

RANKS ranks form the group. COPIES consecutive ranks hold the same batch of tokens, and rank
``r * TP + t`` holds slice t of the experts of share r. Shape letters: T tokens of this rank,
K top-k, W int32 words of a row. A constexpr with _2 is the next power of two.
"""
