// Attention over e4m3 codes of 128 and more query rows, with bf16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_512_pairs_64, __nv_bfloat16, 512, Pairs, 64)
