// Sparse attention over a cache of e4m3 codes beside one of e2m1 codes, with bf16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_bf16_512_fine_64, __nv_bfloat16, 512, Fine, 64, 1)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_32, __nv_bfloat16, 512, Fine, 32, 1)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_32_by_2, __nv_bfloat16, 512, Fine, 32, 2)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_32_by_4, __nv_bfloat16, 512, Fine, 32, 4)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_32_by_8, __nv_bfloat16, 512, Fine, 32, 8)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_32_by_16, __nv_bfloat16, 512, Fine, 32, 16)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_16, __nv_bfloat16, 512, Fine, 16, 1)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_16_by_2, __nv_bfloat16, 512, Fine, 16, 2)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_16_by_4, __nv_bfloat16, 512, Fine, 16, 4)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_16_by_8, __nv_bfloat16, 512, Fine, 16, 8)
FM_DECODE_KERNEL(fm_decode_bf16_512_fine_16_by_16, __nv_bfloat16, 512, Fine, 16, 16)
