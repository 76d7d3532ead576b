// Sparse attention over quantised caches with bf16 queries, by way of a stage: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_512_pairs_64, __nv_bfloat16, 512, Pairs, 64)
FM_DECODE_KERNEL(fm_decode_bf16_512_finepairs_64, __nv_bfloat16, 512, FinePairs, 64)
FM_DECODE_KERNEL(fm_decode_bf16_512_staged_64, __nv_bfloat16, 512, Staged, 64)
FM_DECODE_KERNEL(fm_decode_bf16_512_finestaged_64, __nv_bfloat16, 512, FineStaged, 64)
