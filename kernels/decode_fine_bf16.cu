// Sparse attention over a cache of e4m3 codes beside one of e2m1 codes, with bf16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_512_fine_64, __nv_bfloat16, 512, Fine, 64)
FM_DECODE_KERNELS(fm_decode_bf16_512_fine_32, __nv_bfloat16, 512, Fine, 32)
FM_DECODE_KERNELS(fm_decode_bf16_512_fine_16, __nv_bfloat16, 512, Fine, 16)
