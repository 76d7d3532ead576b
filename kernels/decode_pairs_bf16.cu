// Sparse attention over quantised caches by pairs of CTAs, with bf16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_512_pairs_64, __nv_bfloat16, 512, Pairs, 64)
FM_DECODE_KERNEL(fm_decode_bf16_512_finepairs_64, __nv_bfloat16, 512, FinePairs, 64)
